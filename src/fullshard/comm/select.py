"""The choice of collectives for a group of ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import Collectives
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.torch_dist import Alone, NativeCollectives


@dataclass(frozen=True, slots=True)
class Candidate:
    """Collectives that a group could use, with their name and the reason why they are or are not chosen."""

    collectives: Collectives
    name: str
    reason: str


Backend = Callable[[dist.ProcessGroup, torch.device], Candidate | str]
"""Returns collectives for the tensors of a group of at least two ranks, or the reason why it has none. All ranks of the
group call it, and all get collectives or none does."""

_BACKENDS: list[Backend] = []


def register_backend(backend: Backend) -> None:
    """Register a backend that is tried before torch's own collectives in all groups created from now on."""
    _BACKENDS.append(backend)


def collectives_for(
    group: dist.ProcessGroup | None, device: torch.device, *, only_all_reduce: bool = False
) -> Collectives:
    """Return the fastest collectives for a group. With `only_all_reduce`, do not try the registered backends."""
    return choices_for(group, device, only_torchs=only_all_reduce)[0].collectives


def choices_for(group: dist.ProcessGroup | None, device: torch.device, *, only_torchs: bool = False) -> list[Candidate]:
    """Return all collectives that a group (None: only this rank) can use, fastest first. All its ranks call this."""
    if group is None or dist.get_world_size(group) == 1:
        return [Candidate(Alone(), "none", "one rank has nobody to communicate with")]
    own, name = NativeCollectives(group), dist.get_backend(group)
    tried = [] if only_torchs else [backend(group, device) for backend in _BACKENDS]
    found = [each for each in tried if isinstance(each, Candidate)]
    if device.type == "cpu" and torch_private.backend_of(group, device) is None:
        return [*found, Candidate(own, name, "the group is written in Python")]
    if device.type != "cpu":
        return [*found, Candidate(own, name, "it is made for the devices' own links")]
    reasons = ["Gloo's own are slower"] if found else [each for each in tried if isinstance(each, str)]
    messages = Candidate(GlooCollectives(group), "point to point", "; ".join(reasons) or "Gloo's own are slower")
    return [*found, messages, Candidate(own, "gloo", "never: each byte of a reduce-scatter is sent twice")]
