"""A fifth of the full set: each test is in one, failures count if they fail alone, and time ends it.

pytest tests/project/test_slices.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import slices

ROOT = Path(__file__).parents[2]
TESTS = """
from pathlib import Path
import pytest

pytestmark = pytest.mark.full

def test_that_fails_once():
    with Path("seen").open("a") as file:
        file.write("x")
    assert Path("seen").read_text() == "xx"

def test_that_fails_twice():
    assert False

@pytest.mark.parametrize("i", range(30))
def test_that_passes(i):
    pass
"""


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit with the runner in it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("tests").mkdir()
    shutil.copy(ROOT / "tests" / "slices.py", "tests")
    Path("conftest.py").write_text("import hypothesis\nhypothesis.settings.register_profile('drawn')\n")
    Path("pytest.ini").write_text("[pytest]\nmarkers =\n full\n gpu\n xla\n")
    for command in (["init", "-q"], ["config", "user.name", "a"], ["config", "user.email", "a@b"]):
        git(*command)
    commit()
    return tmp_path


def commit() -> None:
    git("add", ".")
    git("commit", "-q", "--allow-empty", "-m", "more")


def noted(number: int) -> None:
    slices.note(f"slice {number}: all")


def test_ci_takes_the_slice_that_was_noted_last_and_else_counts_commits(project: Path) -> None:
    counted = []
    for _ in range(slices.COUNT):
        counted.append(slices.slice_of_ci())
        commit()
    assert sorted(counted) == list(range(slices.COUNT))
    noted(3)
    assert slices.slice_of_ci() == 3, "also before its line is committed"
    commit()
    assert slices.slice_of_ci() == 3
    commit()
    assert slices.slice_of_ci() == 4


def test_each_landing_with_a_line_takes_the_next(project: Path) -> None:
    taken = []
    for landing in range(slices.COUNT):
        for _ in range(landing):
            commit()
        noted((slices.last_noted() + 1) % slices.COUNT)
        commit()
        taken.append(slices.slice_of_ci())
    assert sorted(taken) == list(range(slices.COUNT))


def run_slice(text: str, *flags: str) -> int:
    """Run slice 1, in which the tests of `TESTS` are that fail."""
    Path("tests", "test_some.py").write_text(text)
    return slices.main(["--slice", "1", "--no-jobs", "--workers", "1", *flags])


def test_a_failure_counts_if_it_fails_alone_too(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("tests", "test_other.py").write_text("import not_there")
    code, lines = run_slice(TESTS), capfd.readouterr().out.splitlines()
    assert code == 1 and "; 3 failed and 1 of them passed alone" in lines[-1]
    assert [line for line in lines if line.startswith("FAILED, alone")] == [
        "FAILED, alone too: tests/test_other.py",
        "FAILED, alone too: tests/test_some.py::test_that_fails_twice",
    ]
    assert slices.last_noted() == 1 and lines[-1] in slices.LOG.read_text()


def test_in_ci_a_failure_counts_once_its_slice_has_passed(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_slice(TESTS, "--ci", "-k", "twice") == 0
    assert "slice 1 has never passed" in capfd.readouterr().out
    slices.note("slice 1: 7 of 7 tests in 9 s; 1 failed and 0 of them passed alone")
    assert not slices.has_passed(1)
    slices.note("slice 1: 7 of 7 tests in 9 s")
    assert not slices.has_passed(0)
    assert run_slice(TESTS, "--ci", "-k", "twice") == 1


def test_what_there_was_no_time_for_is_named(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = TESTS.replace("    pass", "    import time; time.sleep(1)")
    code = run_slice(slow, "--ci", "-k", "passes", "--until", "0")
    line = capfd.readouterr().out.splitlines()[-1]
    found = re.match(r"slice 1: (\d) of 7 tests in \d+ s; not run: (\d) tests of test_some.py$", line)
    assert code == 0 and found is not None and int(found[1]) + int(found[2]) == 7, line
    assert slices.last_noted() == -1


@pytest.mark.full
def test_a_failure_that_there_was_no_time_to_see_again_is_named(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow_again = (
        TESTS
        + """
def test_slow_once_it_has_failed():
    if Path("tried").exists():
        import time; time.sleep(60)
    Path("tried").touch()
    assert False
"""
    )
    code = run_slice(slow_again, "-k", "slow_once", "--minutes", "0.3")
    line = capfd.readouterr().out.splitlines()[-1]
    assert code == 0 and "; no time to run again: tests/test_some.py::test_slow_once_it_has_failed" in line


def test_a_job_that_fails_is_tried_again_and_lacks_no_interpreter_in_silence(project: Path) -> None:
    Path("Makefile").write_text("test-x:\n\t[ -n '$(ARGS)' ]\ntest-y:\n\tfalse\ntest-z:\n\tsleep 60\n")
    soon = time.time() + 2
    for job, word, has_failed in (("x", "passed", False), ("y", "failed twice", True), ("z", "not finished", False)):
        said, failed = slices.run_job(("make", f"test-{job}"), soon)
        assert said.startswith(f"make test-{job} {word} in ") and failed == has_failed
    said, failed = slices.run_job(("make", "test-x", "PYTHON=python3.99"), soon)
    assert said == "make test-x PYTHON=python3.99 not run: python3.99 is not here" and not failed


def test_arguments_of_the_slice_are_none_of_its_jobs(project: Path) -> None:
    Path("slice.py").write_text("import sys\nfrom tests import slices\nsys.exit(slices.run(('make', 'job'), 60))\n")
    Path("Makefile").write_text(f"job:\n\t@test -z '$(ARGS)'\nslice:\n\t@{sys.executable} slice.py\n")
    subprocess.run(["make", "slice", "ARGS=--ci"], check=True)


def test_pytorch_xla_runs_in_any_slice_once_its_sources_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sources = slices.sources_of_xla()
    for noted_sources, is_added in ((sources, False), ("another", True)):
        monkeypatch.setattr(slices, "noted_sources_of_xla", lambda noted_sources=noted_sources: noted_sources)
        assert (("make", "test-xla") in slices.jobs(1)) == is_added
        assert slices.jobs(0) == [("make", "test-xla")]


def test_the_sources_of_pytorch_xla_are_all_that_is_imported_with_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = f"import sys, {slices.ADAPTER}\nfor name, module in list(sys.modules.items()):\n"
    code += "    if name.startswith('fullshard'): print(module.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    imported = {Path(line).relative_to(ROOT) for line in done.stdout.splitlines()}
    assert len(imported) > 20 and imported <= set(slices.files_of_xla())
