"""The buffers of a real job on CPUs, whose ranks send point-to-point messages instead of torch's collectives."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api.rehearsal.group import RehearsedGroup, repeat
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.select import Candidate


class RehearsedMessages(GlooCollectives):
    """The engine's collectives over Gloo, in which every peer sends what this rank sends to itself."""

    group: Any

    def _messages(self, there: Sequence[torch.Tensor], here: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        arriving = [part for rank, part in enumerate(here) if rank != self.rank]
        return [self.group.carry("all-to-all", [*here], fill=lambda: repeat(arriving, there[self.rank]))]


def messages_of(group: dist.ProcessGroup, device: torch.device) -> Candidate | str:
    """Return the collectives of a rehearsed group of CPUs."""
    if device.type != "cpu" or not isinstance(group, RehearsedGroup):
        return "the group is not rehearsed on CPUs"
    return Candidate(RehearsedMessages(group), "point to point", "as a real job's on CPUs, with the same buffers")
