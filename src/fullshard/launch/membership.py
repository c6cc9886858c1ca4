"""Jobs that hosts may join and leave while they run. The processes then restart with the new set of hosts.

A lost host does not count as a failure. Before a host joins or ends, all processes that listen for signals save after
the same step. Each host joins again at the rendezvous server (`launch.rendezvous_server`), which starts them.
"""

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
    """Decides on one host when its processes must restart because hosts have joined or left the job."""

    def __init__(
        self, client: RendezvousClient, preemption: Path, grace_period: float, say: Callable[[str], None]
    ) -> None:
        self._client, self._preemption, self._grace_period, self._say = client, preemption, grace_period, say
        self._until: float | None = None

    def begin(self) -> None:
        """Reset the state when new processes have been started."""
        self._until = None

    def has_changed(self, result: RunResult, *, is_asked: bool) -> bool:
        """Return whether this host's processes must restart with other hosts. `is_asked` means it was told to end."""
        if is_asked:  # even if another host that was asked to end has ended first
            return False
        cause = self._client.root_cause
        if result.state is WorkerState.SUCCEEDED:
            return any(self._preemption.glob("stopping-*"))
        if cause is not None and cause.lost:
            self._say("continuing with the remaining hosts from the newest checkpoint")
            return True
        if not self._client.waits or result.is_failed():
            return self._client.waits  # the others have restarted before this host learned the reason
        if self._until is None:
            self._until = time.monotonic() + self._ask_to_save()
        return time.monotonic() >= self._until

    def _ask_to_save(self) -> float:
        """Ask the processes to save. Return how many seconds they have, or 0 if none listens for signals."""
        listening = below(listening_in(self._preemption))
        if not listening:
            self._say(
                "another host has joined; the processes do not listen for signals, and restart from their checkpoint"
            )
            return 0.0
        self._say("another host has joined; the processes save and restart with it")
        for pid in listening:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return self._grace_period
