"""A job whose hosts may come and go: its processes begin again with other hosts, which is no failure.

    a host is lost            the others begin again without it, from the newest checkpoint
    a host comes              processes that listen to signals save after one step of all ranks, then all begin again
    a host is told to end     it saves with all the others, ends, and they begin again

A host that begins again joins at the rendezvous server (`launch.rendezvous_server`), which starts all that are there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from fullshard.launch.preemption import listening_in
from fullshard.launch.processes import below
from fullshard.launch.rendezvous_server import RendezvousClient


class Membership:
    """One host's view of the membership.

    In the directory `preemption` processes say that they listen to signals, and that they stop because of one.
    """

    def __init__(
        self, client: RendezvousClient, preemption: Path, grace_period: float, say: Callable[[str], None]
    ) -> None:
        self._client, self._preemption, self._grace_period, self._say = client, preemption, grace_period, say
        self._until: float | None = None

    def begin(self) -> None:
        """Note that processes have been started."""
        self._until = None

    def has_changed(self, result: RunResult, *, is_asked: bool) -> bool:
        """Return whether this host's processes are to begin again with other hosts; `is_asked`: it was told to end."""
        if is_asked:  # also if another host that was asked, too, has ended first
            return False
        cause = self._client.root_cause
        if result.state is WorkerState.SUCCEEDED:
            return any(self._preemption.glob("stopping-*"))
        if cause is not None and cause.lost:
            self._say("going on with the hosts that are left, from the newest checkpoint")
            return True
        if not self._client.waits or result.is_failed():
            return self._client.waits  # others have begun again before this host learned why
        if self._until is None:
            self._until = time.monotonic() + self._ask_to_save()
        return time.monotonic() >= self._until

    def _ask_to_save(self) -> float:
        """Ask the processes to save, and return the seconds they have for it: none if no process listens."""
        listening = below(listening_in(self._preemption))
        if not listening:
            self._say("another host has come; the processes do not listen to signals, and go on from their checkpoint")
            return 0.0
        self._say("another host has come; the processes save, and go on with it")
        for pid in listening:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return self._grace_period
