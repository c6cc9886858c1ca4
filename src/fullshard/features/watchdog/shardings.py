"""Which shardings ranks have done: whoever failed in one has no part of the tensors that others are about to gather."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.agreement import check_agreement
from fullshard.comm.waiting import Waiting, Watcher


@dataclass(slots=True)
class _Shardings:
    """Shardings over one group: begun, done, and whether the ranks have found these numbers to be the same."""

    begun: int = 0
    done: int = 0
    are_alike: bool = True


class ShardingWatcher(Watcher):
    """Counts the shardings over each group of ranks."""

    def __init__(self) -> None:
        self._shardings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shardings] = weakref.WeakKeyDictionary()

    def sharding_begins(self, group: dist.ProcessGroup | None) -> None:
        """Count it, if there is another rank."""
        if group is not None:
            counts = self._shardings.setdefault(group, _Shardings())
            counts.begun, counts.are_alike = counts.begun + 1, False

    def sharding_ends(self, group: dist.ProcessGroup | None) -> None:
        """Count it, if there is another rank."""
        if group is not None:
            self._shardings[group].done += 1

    def agree_on_shardings(self, group: dist.ProcessGroup | None) -> None:
        """Note that all ranks have the same model, whatever has failed before on some."""
        if group is not None:
            self._shardings.setdefault(group, _Shardings()).are_alike = True

    def before_whole(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Compare shardings if they have not been. Else, if ranks meet on accelerators, name one that does not come.

        Raises:
            CommunicationError: A sharding failed on some rank and was done on others, or a rank does not come.
        """
        if group is None:
            return
        counts = self._shardings.setdefault(group, _Shardings())
        if counts.are_alike:
            meet(group, device, "gathering a whole tensor")
            return
        lines = [f"{counts.done} of {counts.begun} shardings done"]
        hint = "see why it failed there; after a sharding that some ranks failed in, make a new process group"
        check_agreement(lines, group, what="what is sharded", hint=hint)
        counts.are_alike = True


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group are here. What follows could neither be ended, nor name a rank that did not come.

    It uses a message from host to host, if the group sends such. An accelerator's collectives either let no host wait,
    and it then waits where it reads a number, or, as NCCL's barrier, wait until NCCL ends the process.

    Args:
        group: whose ranks meet.
        device: where they go on. Messages between CPUs are watched as they are.
        what: see `Waiting`, which says what is raised, too.
    """
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), Waiting(what, [group]):
            dist.all_reduce(torch.zeros(1, device=host), group=group)
