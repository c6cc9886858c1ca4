"""A record of what this host's processes were doing when one failed, made before the launcher ends the others."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.core.process import is_of_script, read_status, stat_of
from fullshard.launch.bootstrap import STACK_SIGNAL

_NOTICE_SECONDS = 1.0
"""Seconds for the remaining ranks to notice that one has ended, and to report where they waited for it."""
_STACK_SECONDS = 1.0
_STILL_SECONDS = 0.1
"""A stack is complete if its file has not grown for this long. Stacks are written in pieces."""
_FRAMES = 8
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_WAITS_IN = ("/fullshard/comm/", "/fullshard/features/shared_memory/", "/torch/distributed/")
_OWN_START = "/fullshard/launch/bootstrap.py"
_HANG_WORDS = ("no answer from another rank", "timed out", "timeout", "time-out")
_LOSS_WORDS = ("communicationerror", "connection closed", "connection reset", "broken pipe")


def is_of_a_loss(text: str) -> bool:
    """Return whether the report is from a rank that lost its connection to another rank or waited too long for one."""
    return _has(text, _LOSS_WORDS) or is_of_a_hang(text)


def is_of_a_hang(text: str) -> bool:
    """Return whether the report comes from a rank that waited too long for another one."""
    return _has(text, _HANG_WORDS)


def _has(text: str, words: Iterable[str]) -> bool:
    # Ignore source lines in a traceback, which are indented: they may contain any word.
    messages = "\n".join(line for line in text.lower().splitlines() if not line.startswith(" "))
    return any(word in messages for word in words)


class Scene:
    """Holds the state of the processes during one attempt. They write their stacks to `directory` on `STACK_SIGNAL`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ended: set[int] = set()  # processes that were running at the failure and that the launcher ended
        self.done: set[int] = set()  # processes whose script had ended without an error before
        self._stopped: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._failed: set[int] = set()  # processes that were ending because of an error
        self._waited: dict[int, float] = {}  # seconds, by process

    def look(self, processes: Mapping[int, Any], *, is_over: bool) -> None:
        """Record the state of processes that are about to be ended. `is_over` means that the job has failed."""
        failed = [process for process in processes.values() if process.poll() not in (None, 0)]
        if not failed and not is_over:
            return
        if any(process.poll() < 0 for process in failed):
            self._wait(lambda: not self._running(processes), _NOTICE_SECONDS)
        running = self._running(processes)
        finished, failed_too = (
            {pid for pid in running if (self._directory / f"{how}-{pid}").is_file()} for how in ("finished", "failed")
        )
        self.ended |= set(running) - finished
        self._failed |= failed_too
        self.done |= {process.pid for process in processes.values() if process.poll() == 0} | finished
        statuses = {pid: read_status(self._directory / f"status-{pid}") for pid in running}
        self._waited |= {pid: age for pid, (line, age, _) in statuses.items() if "waiting in " in line}
        asked = [pid for pid in running if (self._directory / f"stack-{pid}").is_file()]
        self._stopped |= {pid for pid in running if stat_of(pid)[0] in "Tt"}
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                if pid in asked:
                    os.kill(pid, STACK_SIGNAL)
                if pid in self._stopped:
                    os.kill(pid, signal.SIGCONT)
        self._wait(lambda: all(self._is_written(pid) for pid in asked), _STACK_SECONDS)
        self._stacks |= {pid: self._stack(pid) for pid in asked}

    def done_early(self, ranks: Mapping[int, int], world_size: int) -> str:
        """Describe the ranks that exited with code 0 while others needed them. `ranks` maps process ids to ranks."""
        text = ""
        for who, pid in self._named(self.done, ranks, world_size):
            text += f"{who} had already ended with exit code 0: it ran fewer steps than the others, or left its loop\n"
            last = read_status(self._directory / f"status-{pid}")[0]
            text += f"its last action: {last}\n" if last else ""
        return text

    def hung(self, ranks: Mapping[int, int], world_size: int, least: float) -> str:
        """Describe the ranks that were not waiting, if another rank has waited for at least `least` seconds."""
        longest = max(self._waited.values(), default=0.0)
        how = f"kept others waiting for {longest:.0f} s" if longest else "did not finish its step"
        return self.missing(ranks, world_size, how) if longest >= least else ""

    def missing(self, ranks: Mapping[int, int], world_size: int, how: str = "did not get that far") -> str:
        """Describe the ranks that the others waited for, each with its stack; empty if all ranks were waiting."""
        text = ""
        for who, pid in self._named(self.ended - self._failed, ranks, world_size):
            lines = self._stacks.get(pid, "").splitlines()
            frames = [line for line in lines if line.startswith("  File ") and _OWN_START not in line]
            waits = pid in self._waited or any(place in frame for frame in frames[:4] for place in _WAITS_IN)
            if waits and pid not in self._stopped:
                continue
            script = next((n for n, frame in enumerate(frames) if is_of_script(frame.split('"')[1])), 0)
            if script >= _FRAMES:  # leave out frames of libraries
                frames = [*frames[: _FRAMES // 2], "  ...", *frames[script:]]
            state = "was stopped (SIGSTOP)" if pid in self._stopped else "was running"
            where = ". Its stack, with the innermost call first:\n" + "\n".join(frames[:_FRAMES]) if frames else ""
            text += f"{who} {state} and {how}{where}\n"
        return text

    def _named(self, pids: set[int], ranks: Mapping[int, int], world_size: int) -> Iterator[tuple[str, int]]:
        for pid in sorted(pids, key=lambda pid: ranks.get(pid, 0)):
            yield f"\nrank {ranks.get(pid)} of {world_size} (process {pid} on {socket.gethostname()})", pid

    def _running(self, processes: Mapping[int, Any]) -> list[int]:
        return [process.pid for process in processes.values() if process.poll() is None]

    def _is_written(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            status = (self._directory / f"stack-{pid}").stat()
            return bool(status.st_size) and time.time() - status.st_mtime > _STILL_SECONDS
        return False

    def _stack(self, pid: int) -> str:
        """Return the main thread's stack, which is the last in the file, because the main thread is the oldest."""
        with contextlib.suppress(OSError):
            text = (self._directory / f"stack-{pid}").read_text(encoding="utf-8", errors="replace")
            return _THREAD.split(text)[-1]
        return ""

    def _wait(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
