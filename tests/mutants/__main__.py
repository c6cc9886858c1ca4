"""Changes critical code in a sample of places and runs, for each, the default tests that reach it.

    python -m tests.mutants --measure [FILES]    first: which tests reach which line (as long as the default tests);
                                                 with files of tests, only those, anew
    python -m tests.mutants [--count 150]        the sample, into the record and the page made from it
    python -m tests.mutants --deep               all tests for what has survived those of the first minutes
    python -m tests.mutants --only engine/unit   all of one file, printed only
    python -m tests.mutants --page               the page alone

Each change is made in a copy of the repository. What the record has already is not run again: delete the record, or
take another seed, for a new sample. `equivalent.json` says why a survivor is no defect of the tests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutants.reached import FOLDER, Reached, environment_of, measure
from tests.mutants.sites import Mutant, mutants

TARGETS = ("engine/**/*", "comm/**/*", "features/**/*", "core/*", "checkpoint/storage",
           "checkpoint/tensor_file", "checkpoint/load", "checkpoint/readers", "checkpoint/save",
           "plan/memory", "plan/setting")  # fmt: skip
SOURCE = Path("src/fullshard")
RECORD = Path(__file__).with_name("record.json")
EQUIVALENT = Path(__file__).with_name("equivalent.json")
PAGE = Path("docs/mutants.md")
STAGES = (10.0,)
"""Tests run in stages; each ends where so many seconds of tests are in it."""
LIMIT = 60.0
"""Seconds of tests after which a change has survived, unless `--deep` is asked for."""

Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]
"""By the change and its line: the same change may be possible twice in a function."""


def all_mutants() -> list[Mutant]:
    """Every mutant of the targets, in order."""
    files = sorted(path for target in TARGETS for path in SOURCE.glob(f"{target}.py"))
    return [mutant for path in files for mutant in mutants(str(path), path.read_text())]


class Laboratory:
    """A copy of the repository in which one mutant at a time lives."""

    def __init__(self, number: int, limit: float) -> None:
        self._tree = (FOLDER / f"tree{number}").resolve()
        self._limit = limit
        shutil.rmtree(self._tree, ignore_errors=True)
        for name in subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n"):
            if name and Path(name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(name, self._tree / name)
        self._reached = Reached()

    def examine(self, mutant: Mutant) -> Row:
        """Run the tests that reach the mutant until one fails."""
        began = time.monotonic()
        row: Row = {"mutant": mutant.name, "line": mutant.line, "outcome": "survived", "by": ""}
        tests = self._reached.tests(mutant)
        if not tests:
            return row | {"outcome": "not reached"}
        tests = self._first(tests)
        source = Path(mutant.file).read_text()
        copy = self._tree / mutant.file
        copy.write_text(mutant.apply(source))
        try:
            for stage in self._stages(tests):
                row["by"] = self._run(stage)
                if row["by"]:
                    row["outcome"] = "killed"
                    break
        finally:
            copy.write_text(source)
        if row["by"].startswith("pytest ended") and self._run(tests):
            raise RuntimeError(f"{tests} fail without the mutant {mutant.name}; hint: measure their files again")
        return row | {"tests": len(tests), "seconds": round(time.monotonic() - began, 1)}

    def _first(self, tests: list[str]) -> list[str]:
        """As many as take no longer than the limit, but one at least."""
        until = accumulate(map(self._reached.seconds, tests))
        return tests[: max(1, sum(taken <= self._limit for taken in until))]

    def _stages(self, tests: list[str]) -> Iterator[list[str]]:
        limits = iter(STAGES)
        limit, taken, stage = next(limits), 0.0, []
        for test in tests:
            stage.append(test)
            taken += self._reached.seconds(test)
            if taken > limit:
                yield stage
                limit, taken, stage = next(limits, float("inf")), 0.0, []
        if stage:
            yield stage

    def _run(self, tests: list[str]) -> str:
        """The test that failed, or what else ended them; empty if all passed."""
        seconds = list(map(self._reached.seconds, tests))
        limit = 60 + 5 * sum(seconds)
        # A test may have to make what its file's first one made when it was measured.
        for_one = ["--timeout", str(round(45 + 5 * max(seconds)))]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *for_one, *tests]
        run = subprocess.Popen(
            command,
            cwd=self._tree,
            env=environment_of(self._tree),
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            return f"no end after {limit:.0f} s"
        # Without parameters, which may quote messages and thus change.
        failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
        if failed:
            return failed[1]
        return f"pytest ended with {run.returncode}" if run.returncode else ""


def page(rows: list[Row], possible: int) -> str:
    """The page, made from the record."""
    equivalent: dict[str, str] = json.loads(EQUIVALENT.read_text())
    left = [row for row in rows if row["outcome"] != "killed"]
    killed = len(rows) - len(left)
    explained = sum(row["mutant"] in equivalent for row in left)
    targets = ", ".join(f"`{target}`" for target in TARGETS)
    lines = [
        "# Mutants",
        "",
        "If a line can be removed and no test fails, no test checks that line. `make mutants` changes critical code",
        "at a seeded random sample of places, one at a time. A change removes a statement, negates a condition,",
        "returns None, or replaces a comparison, an operator or a number. For each change, `make mutants` runs the",
        "default tests that reach the place, in any process, until one fails.",
        "",
        f"`make mutants` changes these files: {targets}.",
        "",
        f"Of {possible:,} possible changes, {len(rows)} were tried. The tests detected {killed} of them",
        f"({killed / len(rows):.1%}) and missed {len(left)}. Of the missed changes, {explained} do not affect any",
        "number or behavior, or need a device or a torch version that was not available. If a change was missed at",
        "first, a test was added, and the change was tried again.",
        "",
        "| change | outcome | why this is not a defect of the tests |",
        "|---|---|---|",
    ]
    for row in left:
        change = row["mutant"].removeprefix(f"{SOURCE}/").replace("|", "\\|")
        lines.append(f"| `{change}` | {row['outcome']} | {equivalent.get(row['mutant'], '')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="note which tests reach which line, and end")
    parser.add_argument("--count", type=int, default=150, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--only", default="", help="every mutant whose name contains this, printed only")
    parser.add_argument("--deep", action="store_true", help="run what has survived again, with all tests that reach it")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and end")
    options, more = parser.parse_known_args()
    if options.measure:
        measure(more)
        return
    everything = all_mutants()
    rows: Rows = {}
    if RECORD.exists() and not options.only:
        rows = {(row["mutant"], row["line"]): row for row in json.loads(RECORD.read_text())}
    if not options.page:
        for row in _examined(_chosen(options, everything, rows), options.jobs, math.inf if options.deep else LIMIT):
            print(f"{row['outcome']:12}{row.get('seconds', 0):7.1f} s  {row['mutant']}  {row['by']}", flush=True)
            rows[row["mutant"], row["line"]] = row
            if not options.only:
                RECORD.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    if not options.only:
        PAGE.write_text(page(list(rows.values()), len(everything)))


def _chosen(options: argparse.Namespace, everything: list[Mutant], rows: Rows) -> list[Mutant]:
    if options.only:
        return [mutant for mutant in everything if options.only in mutant.name]
    outcomes = {mutant: rows.get((mutant.name, mutant.line), {}).get("outcome") for mutant in everything}
    if options.deep:
        return [mutant for mutant, outcome in outcomes.items() if outcome == "survived"]
    sample = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    return [mutant for mutant in sample if outcomes[mutant] is None]


def _examined(chosen: list[Mutant], jobs: int, limit: float) -> Iterator[Row]:
    """The rows, each as soon as it is known."""
    free: SimpleQueue[Laboratory] = SimpleQueue()
    for number in range(jobs):
        free.put(Laboratory(number, limit))

    def examine(mutant: Mutant) -> Row:
        laboratory = free.get()
        try:
            return laboratory.examine(mutant)
        finally:
            free.put(laboratory)

    with ThreadPoolExecutor(jobs) as threads:
        for done in as_completed([threads.submit(examine, mutant) for mutant in chosen]):
            yield done.result()


if __name__ == "__main__":
    main()
