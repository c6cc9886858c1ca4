"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import py_compile
import signal
import sys
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path

import pytest
from hypothesis import settings

from fullshard.config.switches import OFFLOAD
from tests import sources
from tests.distributed import end_workers

# A machine that is busy makes any example slow. The default tests try the same examples each time, so that a change is
# judged by what it changes; `make test-full` draws new ones (`--hypothesis-profile drawn`).
settings.register_profile("drawn", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Compile once what hundreds of processes import, where the environment has forbidden them to leave it behind."""
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        for folder in ("src", "tests"):
            for path in (Path(__file__).parents[1] / folder).rglob("*.py"):
                _compile(path)


def _compile(path: Path) -> None:
    """Unless it has been. That counts for the same source only, whenever that was written: a mutant is another."""
    compiled, digest = Path(cache_from_source(str(path))), source_hash(path.read_bytes())
    header = MAGIC_NUMBER + (0b11).to_bytes(4, "little") + digest
    if not (compiled.exists() and compiled.read_bytes()[: len(header)] == header):
        with contextlib.suppress(OSError):  # a tree that nobody may write to makes tests slower, no more
            py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Leave behind what pytest makes of the tests' assertions, too: half of what collecting takes."""
    is_forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    yield
    sys.dont_write_bytecode = is_forbidden


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: no search for garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _fresh_workers() -> Iterator[None]:
    """The processes of tests serve one file: what a test leaves in them cannot reach another file's tests."""
    yield
    end_workers()
    if (simulated := sys.modules.get("tests.simulated.process")) is not None:
        simulated.end_worker()
    sources.forget()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a test of this file has left a process group, in which the tests of other files would fail")


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """A shell ignores SIGINT for what it starts in the background, and the processes of a test would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offloaded really moves, on a CPU too."""
    monkeypatch.setenv(OFFLOAD.name, "rehearse")
