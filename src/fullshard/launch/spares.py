"""Warm standbys: processes that wait with their imports done, to replace ranks that are started again.

Once a rank has made a step, it lists its imports (`launch.bootstrap`), and the standbys of this host import the same,
one after the other, so that training does not slow down. When ranks are started again, the standbys get the arguments,
environment and standard streams of the new ranks, and become those ranks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from fullshard.core.files import read_json
from fullshard.launch import bootstrap, torch_private
from fullshard.launch.processes import descendants
from fullshard.launch.spare import HEADER_NBYTES
from fullshard.launch.streams import STREAMS

_SECONDS = 5.0
"""Seconds that a warm standby may take to read its orders."""


@dataclass(slots=True)
class _Spare:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    _has_said: bool = False

    @property
    def is_ready(self) -> bool:
        """Return whether it has done its imports, or has ended: then there is nothing to wait for."""
        if not self._has_said:
            with contextlib.suppress(BlockingIOError):
                self.socket.recv(1, socket.MSG_DONTWAIT)  # nothing at all if it has ended
                self._has_said = True
        return self._has_said


class Spares:
    """The warm standbys of one host, by local rank."""

    def __init__(self) -> None:
        self._spares: dict[int, _Spare] = {}

    @property
    def pids(self) -> set[int]:
        """Processes that wait."""
        return {spare.process.pid for spare in self._spares.values()}

    @property
    def processes(self) -> set[int]:
        """Processes that wait, and those that their imports have started."""
        return self.pids.union(*map(descendants, self.pids))

    def look(self, directory: Path, ranks: Mapping[int, int]) -> None:
        """Start the next one, once its imports are known and those before it have done theirs.

        Args:
            directory: where ranks leave what they have imported.
            ranks: the process of each local rank.
        """
        if not all(spare.is_ready for spare in self._spares.values()):
            return
        for local_rank, pid in ranks.items():
            listing = directory / f"{bootstrap.IMPORTS}-{pid}"
            if local_rank not in self._spares and listing.exists():
                imported = read_json(listing)
                listing.unlink()  # it has the environment, secrets too
                with contextlib.suppress(OSError):  # too many processes or files: a rank will be a new process
                    self._spares[local_rank] = _start(imported)
                return

    @contextlib.contextmanager
    def taken_first(self) -> Iterator[None]:
        """Make torchelastic's workers from waiting processes, and from new ones where none waits."""
        spares = self

        class Handler(SubprocessHandler):
            def _popen(self, args: Any, env: dict[str, str]) -> Any:
                streams = [torch_private.stream_of(self, name) for name in STREAMS]
                return spares.take(self.local_rank_id, args, env, streams) or super()._popen(args, env)

        torchs = elastic.get_subprocess_handler
        vars(elastic)["get_subprocess_handler"] = Handler
        try:
            yield
        finally:
            vars(elastic)["get_subprocess_handler"] = torchs

    def take(
        self, local_rank: int, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[str] | None]
    ) -> subprocess.Popen[bytes] | None:
        """Return the standby of a rank, which becomes that rank; None if none can.

        Args:
            local_rank: see above.
            command: of the rank.
            environment: all of it.
            streams: its standard output and standard error; None is this process's own.
        """
        spare = self._spares.pop(local_rank, None)
        if spare is None:
            return None
        descriptors = [0, *(number if file is None else file.fileno() for number, file in enumerate(streams, start=1))]
        order = json.dumps({"arguments": list(command[1:]), "environment": dict(environment)}).encode()
        # A standby that still imports may hang there, where it would not be recognised as a rank.
        if spare.is_ready and command[0] == sys.executable and command[1] in ("-m", bootstrap.__file__):
            with contextlib.suppress(OSError), spare.socket:  # it has ended, or there is no standard input
                spare.socket.settimeout(_SECONDS)
                socket.send_fds(spare.socket, [len(order).to_bytes(HEADER_NBYTES, "big")], descriptors)
                spare.socket.sendall(order)
                return spare.process
        _end([spare])
        return None

    def end(self) -> None:
        """End the waiting processes."""
        _end(self._spares.values())
        self._spares.clear()


def _start(imported: Mapping[str, Any]) -> _Spare:
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started, theirs, tempfile.TemporaryFile() as listing:
        unless_started.enter_context(ours)
        listing.write(json.dumps(imported["modules"]).encode())
        listing.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "fullshard.launch.spare", str(theirs.fileno())],
            env=imported["environment"],
            stdin=listing,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        unless_started.pop_all()
    return _Spare(process, ours)


def _end(spares: Collection[_Spare]) -> None:
    for spare in spares:
        spare.process.kill()
    for spare in spares:
        spare.process.wait()
        spare.socket.close()
