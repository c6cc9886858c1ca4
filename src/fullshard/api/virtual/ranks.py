"""One process as one rank of many: torch.distributed with process groups of the virtual device, and no other rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.api.virtual.device import VirtualDevice
from fullshard.api.virtual.group import VirtualGroup
from fullshard.comm.mesh import Mesh

_NAME = "virtual"
_playing: list[VirtualDevice] = []


@contextlib.contextmanager
def playing(device: VirtualDevice, rank: int, world_size: int) -> Iterator[None]:
    """Initialise `torch.distributed`, and make `device` the meta device, within the block."""
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=["cpu", "meta"])
    _playing.append(device)
    dist.init_process_group(_NAME, rank=rank, world_size=world_size, store=torch_private.store_of_nobody())
    try:
        with device.running():
            yield
    finally:
        dist.destroy_process_group()
        _playing.pop()


def name_groups(mesh: Mesh) -> None:
    """Name the groups of a mesh after their purpose."""
    kinds = {"gather": mesh.gather, "reduce": mesh.reduce, "all-reduce": mesh.replicate}
    for group, name in [(mesh.world_group, "all ranks"), *((getattr(c, "group", None), n) for n, c in kinds.items())]:
        if isinstance(group, VirtualGroup):
            group.title = name


def _make(options: Any, _: Any) -> VirtualGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return VirtualGroup(_playing[-1], str(options.group_id), options.group_rank, options.group_size, stride)
