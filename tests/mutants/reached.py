"""Which default tests reach a line, in whichever process, and how long each takes."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import coverage
import pytest

from tests.mutants.sites import Mutant

FOLDER = Path("build/mutants")
_DATA = FOLDER / "reached"
_SECONDS = FOLDER / "seconds.json"
_TAKEN: defaultdict[str, float] = defaultdict(float)
_FAILED: set[str] = set()
_SETTINGS = """[run]
source_pkgs = fullshard
branch = false
parallel = true
relative_files = true
data_file = {data}
patch = subprocess, fork, _exit
plugins = tests.mutants.contexts
"""


def environment_of(tree: Path) -> dict[str, str]:
    """Variables for processes that take fullshard and its tests from a copy of the repository."""
    path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def measure(arguments: list[str]) -> None:
    """Run the default tests once and note what each reaches. One that fails says nothing about mutants: it is left out.

    Args:
        arguments: more arguments of pytest, such as files. What is known of other tests stays then.

    Raises:
        RuntimeError: pytest was ended, or found no tests.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("reached.*" if arguments else "reached*"):
        old.unlink()
    settings = FOLDER / "coveragerc"
    settings.write_text(_SETTINGS.format(data=_DATA.resolve()))
    environment = environment_of(Path.cwd()) | {"COVERAGE_PROCESS_START": str(settings.resolve())}
    default = "not full and not gpu and not xla"
    command = [sys.executable, "-m", "pytest", "-p", __name__, "-q", "-m", default, "-n", "2", "--dist", "worksteal"]
    done = subprocess.run([*command, *arguments], env=environment, check=False)
    _drop_broken()
    recorder = coverage.Coverage(config_file=str(settings))
    if arguments:
        recorder.load()
    recorder.combine(data_paths=[str(FOLDER)])
    recorder.save()
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {done.returncode}; hint: the lines above say why")


def _drop_broken() -> None:
    """Without what a process left that a test let write no more: of a full disk, say."""
    for path in FOLDER.glob("reached.*"):
        try:
            with closing(sqlite3.connect(path)) as database:
                is_whole = database.execute("pragma integrity_check").fetchone() == ("ok",)
        except sqlite3.DatabaseError:
            is_whole = False
        if not is_whole:
            path.unlink()


class Reached:
    """What `measure` found."""

    def __init__(self) -> None:
        self._data = coverage.CoverageData(str(_DATA))
        self._data.read()
        self._seconds: dict[str, float] = json.loads(_SECONDS.read_text())
        self._of_file: dict[str, list[str]] = defaultdict(list)
        for test in self._seconds:
            self._of_file[test.partition("::")[0]].append(test)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests of all files that reach the statement of a mutant, those first that are likely to tell soon.

        Whole files, because a fixture or a process may be made in one test and used in others. Files take turns: each
        has time as it reaches what few others reach of the same module. What runs as a module is imported counts for
        all that reach the module.
        """
        contexts = self._data.contexts_by_lineno(mutant.file)
        first, last = mutant.statement
        lines = contexts if mutant.at_import else range(first, last + 1)
        direct = {name.rpartition(" ")[0] for line in lines for name in contexts.get(line, []) if name}
        nearness = self._nearness(mutant.file)
        when: dict[str, float] = {}
        for file in {test.partition("::")[0] for test in direct}:
            tests = sorted(self._of_file[file], key=lambda test: (test not in direct, self.seconds(test)))
            for test, taken in zip(tests, accumulate(map(self.seconds, tests)), strict=True):
                when[test] = taken / nearness[file] ** 2
        return sorted(when, key=when.__getitem__)

    @functools.cache  # noqa: B019 -- one lives as long as the process
    def _nearness(self, file: str) -> dict[str, float]:
        """By file of tests: its share in the lines of a module that it reaches, added up."""
        near: dict[str, float] = defaultdict(float)
        for names in self._data.contexts_by_lineno(file).values():
            files = {name.partition("::")[0] for name in names if name}
            for each in files:
                near[each] += 1 / len(files)
        return near

    def seconds(self, test: str) -> float:
        """What the test took while it was measured."""
        return self._seconds[test]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called by pytest, with `-p tests.mutants.reached`, after each phase of a test."""
    _TAKEN[report.nodeid] += report.duration
    if report.failed:
        _FAILED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Called by pytest at the end of each process; the one that deals the tests out has heard of all of them."""
    if not hasattr(session.config, "workerinput"):
        passed = {test: round(taken, 3) for test, taken in _TAKEN.items() if test not in _FAILED}
        known = json.loads(_SECONDS.read_text()) if _DATA.exists() else {}
        _SECONDS.write_text(json.dumps(known | passed))
