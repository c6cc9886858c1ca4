"""Process groups of the simulated device.

As with NCCL, a communicator runs its collectives one after the other. They run on a separate stream if `async_op` is
set, and otherwise on the current stream. Collectives of CPU tensors represent messages between hosts. The host waits
for them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api.rehearsal.group import NAME, Collective, CommunicatorLine, RehearsedGroup, Tensors, register
from fullshard.api.rehearsal.lines import HostWork, StreamLine
from fullshard.api.virtual.device import VirtualDevice, VirtualStream, instead
from fullshard.comm.mesh import Mesh


@contextlib.contextmanager
def playing(device: VirtualDevice, rank: int, world_size: int) -> Iterator[None]:
    """Initialize `torch.distributed` within the block, with process groups whose collectives take time on `device`."""

    def send_from_host(message: Collective, whole: Tensors, fill: Callable[[], object], is_async: bool) -> HostWork:
        fill()
        device.clock.host += device.host.message * math.ceil(math.log2(max(2, message.ranks)))
        return HostWork(0.0)

    def occupy(group: RehearsedGroup, message: Collective, fill: Any) -> None:  # the device's tensors have no values
        whole = message.nbytes * message.times
        group.sent_nbytes += whole if message.what == "ring" else whole * (message.ranks - 1) // message.ranks
        device.collectives += 1
        device.clock.host += device.host.collective
        inside, across, latency = message.seconds(device.cluster)
        link = "link" if inside >= across else "link between hosts"
        device.clock_task(message.what, link, max(inside, across), latency)

    def line(group: RehearsedGroup, kind: str) -> CommunicatorLine:
        if kind == "cpu":
            return send_from_host
        make = lambda: VirtualStream(device, group.title)  # noqa: E731 - a group gets its title late
        return StreamLine(lambda: device.current, make, functools.partial(occupy, group))

    def gather_objects(values: list[Any], value: Any, group: Any = None) -> None:
        of_all: Any = group or dist.group.WORLD
        for _ in ("sizes", "values"):
            of_all.carry("all-gather", [torch.empty(0)])
        values[:] = [value] * len(values)  # every other rank counts as a copy of this one

    # Torch would copy and read the value once for each rank.
    with register(line), instead(dist, "all_gather_object", gather_objects):
        dist.init_process_group(NAME, rank=rank, world_size=world_size, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def name_groups(mesh: Mesh) -> None:
    """Label the groups of a mesh with their purposes, for traces."""
    kinds = {"gather": mesh.gather, "reduce": mesh.reduce, "all-reduce": mesh.replicate}
    for group, name in [(mesh.world_group, "all ranks"), *((getattr(c, "group", None), n) for n, c in kinds.items())]:
        if isinstance(group, RehearsedGroup):
            group.title = name
