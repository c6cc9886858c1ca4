"""Which shardings ranks have done: whoever failed in one has no part of the tensors that others are about to gather."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.agreement import check_agreement
from fullshard.comm.torch_dist import meet
from fullshard.comm.waiting import Watcher


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
