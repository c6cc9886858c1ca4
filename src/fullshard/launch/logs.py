"""The destination of each rank's output: the terminal, files, or both.

The first rank of a host writes straight to the terminal, so that its progress bars work. The lines of the others get
the prefix `[rank N] `, so they pass through a pipe and a thread here. torchelastic itself reads a file again while it
grows, which can lose the last line and tears lines that are written in pieces.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from fullshard.launch.streams import STREAMS, StreamPlan

_CHUNK_NBYTES = 65536
_LONGEST_LINE_NBYTES = 65536
"""A line is shown once it is complete, or so long."""
DRAIN_SECONDS = 2.0
"""Seconds that a job that has ended waits for a reader of its last output."""
_LOOK_SECONDS = 0.1


class RankLogs(LogsSpecs):
    """The destination of each worker's streams, in the form that torchelastic asks for.

    Args:
        plan: what the user asked for.
        run_id: name of the job, part of the directory's name.
        scratch: where reports of failures go if the user asked for no files.

    Attributes:
        variables: further environment variables of every worker.
    """

    def __init__(self, plan: StreamPlan, run_id: str, scratch: Path) -> None:
        super().__init__()
        self._plan = plan
        if plan.directory is not None:
            plan.directory.mkdir(parents=True, exist_ok=True)
            # A directory of its own: a second run, or another host on the same disk, must not write over the first.
            self.directory = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=plan.directory))
        else:
            self.directory = scratch
        self._pump: Pump | None = None
        self.variables: dict[str, str] = {}

    @property
    def root_log_dir(self) -> str:
        """Return the directory of this run."""
        return str(self.directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open what is needed for the workers about to start, and complete their environment."""
        self._pump = pump = Pump()
        destination = LogsDest()
        for local_rank, environ in envs.items():
            attempt = self.directory / f"attempt_{environ['TORCHELASTIC_RESTART_COUNT']}"
            directory = attempt / f"rank_{environ['RANK']}"
            directory.mkdir(parents=True, exist_ok=True)
            report = directory / "error.json"
            report.unlink(missing_ok=True)
            environ |= {**self.variables, "TORCHELASTIC_ERROR_FILE": str(report)}
            prefix = b"[rank %s] " % environ["RANK"].encode() if local_rank else b""
            for stream in STREAMS:
                path = self._route(pump, local_rank, stream, directory, prefix)
                (destination.stdouts if stream == "stdout" else destination.stderrs)[local_rank] = path
            destination.error_files[local_rank] = str(report)
        pump.start()
        return destination

    def _route(self, pump: Pump, local_rank: int, stream: str, directory: Path, prefix: bytes) -> str:
        to_terminal, to_file = self._plan.of(local_rank, stream)
        path = directory / f"{stream}.log"
        if not to_terminal:
            return str(path)
        if not to_file and not prefix:
            return ""  # torchelastic's word for the terminal itself
        return pump.open(1 if stream == "stdout" else 2, prefix, path.open("ab", buffering=0) if to_file else None)

    def drain(self) -> None:
        """Show the last output of the workers, which have ended."""
        if self._pump is not None:
            self._pump.drain()


@dataclass(slots=True)
class _Pipe:
    terminal: int | None
    prefix: bytes
    file: BinaryIO | None
    written: int
    line: bytearray = field(default_factory=bytearray)


class Pump(threading.Thread):
    """A thread that moves ranks' output from pipes to the terminal, whole lines at a time, and to files."""

    def __init__(self) -> None:
        super().__init__(name="fullshard-logs", daemon=True)
        self._pipes = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._pipes.register(self._wake, selectors.EVENT_READ)
        self._until: float | None = None  # when to give up a terminal without a reader
        self._drained = False

    def open(self, terminal: int, prefix: bytes, file: BinaryIO | None) -> str:
        """Return a path whose output appears on the descriptor `terminal` and in `file`."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._pipes.register(read, selectors.EVENT_READ, _Pipe(terminal, prefix, file, write))
        return f"/dev/fd/{write}"

    def run(self) -> None:
        """Move until `drain` is called."""
        while True:
            for key, _ in self._pipes.select():
                if key.fd == self._wake:
                    return
                self._move(key.fd, key.data)

    def drain(self) -> None:
        """Stop, after everything that was written until now."""
        if self._drained:
            return
        self._drained = True
        self._until = time.monotonic() + DRAIN_SECONDS
        os.write(self._waker, b".")
        if self.is_alive():
            self.join()
        for key in list(self._pipes.get_map().values()):
            if key.fd != self._wake:
                while self._move(key.fd, key.data):
                    pass
                self._show(key.data, rest=True)
                os.close(key.data.written)
                if key.data.file is not None:
                    key.data.file.close()
            os.close(key.fd)
        os.close(self._waker)
        self._pipes.close()

    def _move(self, descriptor: int, pipe: _Pipe) -> bool:
        try:
            chunk = os.read(descriptor, _CHUNK_NBYTES)
        except BlockingIOError:
            return False
        if pipe.file is not None:
            pipe.file.write(chunk)
        pipe.line += chunk
        self._show(pipe, rest=not pipe.prefix)
        return bool(chunk)

    def _show(self, pipe: _Pipe, *, rest: bool) -> None:
        """Write complete lines to the terminal; with `rest`, the incomplete one as well."""
        if not pipe.prefix:
            text = bytes(pipe.line)
            pipe.line.clear()
        else:
            # A carriage return ends a line too: otherwise a progress bar would only appear at its end.
            *lines, last = re.split(rb"\r\n|\n|\r(?!\Z)", bytes(pipe.line))
            if last and (rest or len(last) > _LONGEST_LINE_NBYTES):
                lines.append(last.rstrip(b"\r"))
                last = b""
            pipe.line[:] = last
            text = b"".join(pipe.prefix + line + b"\n" for line in lines)
        if text and pipe.terminal is not None:
            try:
                with contextlib.suppress(AttributeError, ValueError):
                    (sys.stdout if pipe.terminal == 1 else sys.stderr).flush()
                write_all(pipe.terminal, text, lambda: self._until)
            except OSError:  # it has no reader any more; files are still written
                pipe.terminal = None


def write_all(descriptor: int, text: bytes, until: Callable[[], float | None]) -> None:
    """Write to a terminal, a pipe or a file, but wait for its reader no longer than until a time.

    Args:
        descriptor: opened to block or not to.
        text: all of it.
        until: asked while it waits; by `time.monotonic`, None for ever.

    Raises:
        OSError: it has no reader any more.
    """
    while text:
        _, is_ready, _ = select.select([], [descriptor], [], _LOOK_SECONDS)
        if is_ready:
            text = text[os.write(descriptor, text[: select.PIPE_BUF]) :]  # this much fits without waiting
        elif (end := until()) is not None and time.monotonic() > end:
            raise OSError("nobody reads it")
