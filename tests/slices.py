"""Run a fifth of the full set, and what needs an environment of its own, in limited time, as CI does each time.

    make test-slice             the slice after the last one in tests/slices.log, which gets a line
    make test-slice SLICE=2     that one
    python -m tests.slices --ci --dry     which one CI takes at this commit, and what is in it

CI takes the last slice in the log, plus the number of commits since that line was committed. So whoever commits the
line last has CI run the same slice, and five landings with a line each have run everything; a landing without one takes
a slice by its number of commits. A test's slice depends on its name alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

COUNT = 5
LOG = Path("tests/slices.log")
MINUTES = 50.0
RESERVE = 0.1
"""Part of the time that is kept for running failed tests again."""
LINES = 100
FEWER = {"EXAMPLES": "1000", "KILLS": "12", "LOSSES": "4"}
"""How often tests repeat that do so for an hour otherwise."""
_OF_MAKE = ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
ADAPTER = "fullshard.integrations.xla"

Job = tuple[str, ...]


# -- which ------------------------------------------------------------------------------------------------------


def slice_of(test: str) -> int:
    """Return the slice of a test, from its node id."""
    return int(hashlib.sha256(test.encode()).hexdigest()[:8], 16) % COUNT


def last_noted() -> int:
    """Return the slice in the log's last line, -1 without one."""
    found = re.findall(r"^\S+ \S+ UTC slice (\d)", LOG.read_text() if LOG.exists() else "", re.MULTILINE)
    return int(found[-1]) if found else -1


def has_passed(number: int) -> bool:
    """Return whether the log has a line of a slice that was run whole, in which nothing failed."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    return any(f"UTC slice {number}: " in line and "failed" not in line and "not run" not in line for line in lines)


def slice_of_ci() -> int:
    """Return the slice that CI runs at this commit."""
    if git("status", "--porcelain", str(LOG)):
        return last_noted() % COUNT  # its line is about to be committed
    noted = git("log", "-1", "--format=%H", "--", str(LOG))
    return (last_noted() + int(git("rev-list", "--count", f"{noted}..HEAD" if noted else "HEAD"))) % COUNT


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def jobs(number: int) -> list[Job]:
    """Return the commands of a slice: environments that `make test` does not run in. One slice needs none."""
    of_slice: tuple[Callable[[], Job], ...] = (
        lambda: ("make", "test-xla"),
        lambda: ("make", "test-versions", "TORCH=2.11"),
        lambda: ("make", "test-versions", "TORCH=2.12", f"PYTHON={interpreter('3.12')}"),
        lambda: ("make", "test-versions", "TORCH=2.14", f"PYTHON={interpreter('3.13')}"),
        lambda: ("make", "docs"),
    )
    found = [of_slice[number]()]
    if number != 0 and sources_of_xla() != noted_sources_of_xla():
        found.append(("make", "test-xla"))
    return found


def interpreter(version: str) -> str:
    """Return the path of Python `version`; its name, if there is none."""
    versions = Path("~/.pyenv/versions").expanduser()
    paths = [shutil.which(f"python{version}"), *map(str, versions.glob(f"{version}.*/bin/python{version}"))]
    for path in filter(None, paths):
        if subprocess.run([path, "-c", "import venv, ssl"], capture_output=True, check=False).returncode == 0:
            return path
    return f"python{version}"


def files_of_xla() -> list[Path]:
    """Return the files that PyTorch/XLA's adapter and its tests are made of."""
    from grimp import build_graph  # of import-linter

    graph = build_graph("fullshard", exclude_type_checking_imports=True, cache_dir=None)
    modules = graph.find_upstream_modules(ADAPTER, as_package=True) | graph.find_descendants(ADAPTER)
    modules |= graph.find_modules_directly_imported_by("fullshard")  # which Python imports first
    found = {Path("src", *module.split(".")) for module in {*modules, ADAPTER, "fullshard.torchacc"}}
    found |= {parent for path in found for parent in path.parents if parent.is_relative_to("src/fullshard")}
    files = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in found)
    return sorted([*files, *Path("tests/xla").glob("*.py")])


def sources_of_xla() -> str:
    """Return a digest of `files_of_xla`."""
    digest = hashlib.sha256()
    for path in files_of_xla():
        digest.update(f"{path}\n{path.read_text()}".encode())
    return digest.hexdigest()[:12]


def noted_sources_of_xla() -> str:
    """Return the digest at the last `make test-xla` that passed."""
    found = re.findall(r"UTC xla (\w{12}) passed", LOG.read_text() if LOG.exists() else "")
    return found[-1] if found else ""


def note(line: str) -> None:
    """Append a line to the log."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    LOG.write_text("\n".join([*lines, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC {line}"][-LINES:]) + "\n")


# -- inside pytest ----------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", type=int)
    parser.addoption("--until", type=float, help="time.time() at which no further test begins")
    parser.addoption("--record", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.getoption("--record")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one slice: tests with long time-outs first, and the others from another one on at each commit."""
    number = config.getoption("--slice")
    if number is None:
        return
    kept = [item for item in items if slice_of(item.nodeid) == number]
    config.hook.pytest_deselected(items=[item for item in items if slice_of(item.nodeid) != number])
    rest = [item for item in kept if not _limit(item)]
    start = int(git("rev-list", "--count", "HEAD")) * 37 % max(len(rest), 1)
    items[:] = [*sorted(filter(_limit, kept), key=_limit, reverse=True), *rest[start:], *rest[:start]]


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Begin no further test once the time is over; each of the workers sees to it."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        item.session.shouldstop = "the time of this slice is over"


class _Recorder:
    """Writes down what was chosen and what came of it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._write({"chosen": list(ids)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "took": report.duration})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._write({"is_cut": bool(getattr(node, "workeroutput", {}).get("shouldstop"))})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed"})

    def _write(self, entry: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


# -- around it --------------------------------------------------------------------------------------------------


def run(command: Sequence[str], seconds: float) -> int | None:
    """Run a command with all that it starts. Returns its exit code, None if its time was over."""
    print(f"-- {' '.join(command)}", flush=True)
    # What `make test-slice ARGS=...` was given is in the environment, and is no argument of the targets of jobs.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    process = subprocess.Popen(command, start_new_session=True, env={**FEWER, **environment})
    try:
        return process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(15)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def run_job(job: Job, until: float) -> tuple[str, bool]:
    """Run a job, and what failed of it again. Returns what to say of it, and whether it failed twice."""
    name, began = " ".join(re.sub(r"=.*/", "=", word) for word in job), time.time()
    lacking = [word for word in job if word.startswith("PYTHON=") and not Path(word.removeprefix("PYTHON=")).exists()]
    if lacking:
        return f"{name} not run: {lacking[0].removeprefix('PYTHON=')} is not here", False
    code = run(job, until - began)
    if code:
        code = run((*job, "ARGS=--last-failed") if "test" in job[1] else job, until - time.time())
    word = {None: "not finished", 0: "passed"}.get(code, "failed twice")
    return f"{name} {word} in {time.time() - began:.0f} s", code not in (None, 0)


def full_set(record: Path, *arguments: str) -> list[str]:
    """Return the command that runs the tests of the full set, with what to choose of them."""
    common = ["-m", "full and not gpu and not xla", "--hypothesis-profile", "drawn"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "tests.slices", "--record", str(record), *common, *arguments]


def run_tests(number: int, until: float, workers: int, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Run the tests of a slice, and what failed of it alone. Returns what to say, and what failed alone, too."""
    record, began = Path("build/slice.jsonl"), time.time()
    record.parent.mkdir(exist_ok=True)
    record.unlink(missing_ok=True)
    stop = until - RESERVE * (until - began)
    parallel = ("--numprocesses", str(workers), "--dist", "worksteal")
    chosen_here = ("--slice", str(number), "--until", str(stop), *parallel, *others)
    # A test that is under way when no further one begins has a third of the reserve.
    code = run(full_set(record, *chosen_here), stop + (until - stop) / 3 - began)
    chosen, outcomes, is_cut = read(record)
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    again = {test: run(full_set(record, test), until - time.time()) for test in failed}
    alone = [test for test, code_alone in again.items() if code_alone]
    unsure = [test for test, code_alone in again.items() if code_alone is None]
    if not (failed or is_cut or code in (None, 0, pytest.ExitCode.NO_TESTS_COLLECTED)):
        alone.append(f"what pytest did not come to, for it ended with {code}")
    left = sorted(chosen - outcomes.keys())
    if chosen and not outcomes:
        alone.append("all of it: no test ended in time")
    said = [f"{len(chosen) - len(left)} of {len(chosen)} tests in {time.time() - began:.0f} s"]
    if failed:
        said.append(f"{len(failed)} failed and {len(failed) - len(alone) - len(unsure)} of them passed alone")
    if unsure:  # most of them were under way when the time was over
        said.append(f"no time to run again: {', '.join(unsure)}")
    if left:
        files = sorted({test.split("::")[0].removeprefix("tests/") for test in left})
        said.append(f"not run: {len(left)} tests of {', '.join(files[:5])}{' and others' if files[5:] else ''}")
    return said, alone


def read(record: Path) -> tuple[set[str], dict[str, str], bool]:
    """Return the tests that were chosen, the outcome of each that ended, and whether time has ended the run."""
    chosen: set[str] = set()
    is_cut = False
    outcomes: dict[str, str] = {}
    for entry in map(json.loads, record.read_text().splitlines() if record.exists() else ()):
        chosen |= {*entry.get("chosen", ())}
        is_cut |= entry.get("is_cut", False)
        if entry.get("outcome") == "failed":
            outcomes[entry["test"]] = "failed"
        elif entry.get("when") == "teardown":
            outcomes.setdefault(entry["test"], entry["outcome"])
    return chosen, outcomes, is_cut


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a slice as the flags say. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.slices", allow_abbrev=False)
    parser.add_argument("--slice", type=int, choices=range(COUNT), dest="number")
    parser.add_argument("--ci", action="store_true", help="the slice of this commit, and no line in the log")
    parser.add_argument("--dry", action="store_true", help="say what would be run")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-jobs", action="store_true", help="only the tests")
    parser.add_argument("--note-xla", action="store_true", help="note that `make test-xla` has passed, and end")
    options, others = parser.parse_known_args(arguments)
    if options.note_xla:
        note(f"xla {sources_of_xla()} passed")
        return 0
    until = time.time() + 60 * options.minutes
    number = options.number
    if number is None:
        number = slice_of_ci() if options.ci else (last_noted() + 1) % COUNT
    work = [] if options.no_jobs else jobs(number)
    print(f"slice {number} of 0 to {COUNT - 1}, in at most {options.minutes:g} minutes; {work}", flush=True)
    if options.dry:
        return 0
    done = [run_job(job, until) for job in work]
    said, alone = run_tests(number, until, options.workers, others)
    line = f"slice {number}: " + "; ".join([*said, *(text for text, _ in done)])
    if not options.ci:
        note(line)
    for test in alone:
        print(f"FAILED, alone too: {test}")
    print(line)
    has_failed = bool(alone) or any(failed for _, failed in done)
    if has_failed and options.ci and not has_passed(number):
        print(
            f"slice {number} has never passed: until it has, by `make test-slice`, its failures are named and count not"
        )
        return 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
