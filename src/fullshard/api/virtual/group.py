"""Process groups of the simulated device.

As with NCCL, a communicator runs its collectives one after the other. They run on a separate stream if `async_op` is
set, and otherwise on the current stream. Collectives of CPU tensors represent messages between hosts. The host waits
for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch.distributed as dist

from fullshard.api.rehearsal.group import NAME, Collective, CommunicatorLine, RehearsedGroup, Tensors, register
from fullshard.api.rehearsal.lines import HostWork, StreamLine
from fullshard.api.virtual.device import VirtualDevice, VirtualStream
from fullshard.comm.mesh import Mesh


class VirtualStreams:
    """The streams of a simulated device, whose tensors have no values to fill. They also count a group's messages."""

    def __init__(self, device: VirtualDevice, group: RehearsedGroup) -> None:
        self._device, self._group = device, group

    def current(self) -> VirtualStream:
        """See `GpuStreams`."""
        return self._device.current

    def make(self, title: str) -> VirtualStream:
        """See `GpuStreams`."""
        return VirtualStream(self._device, title)

    def occupy(self, message: Collective, fill: Callable[[], object]) -> None:
        """See `GpuStreams`."""
        part = message.nbytes // message.ranks
        self._group.sent_nbytes += (
            message.nbytes if message.what == "ring" else message.times * part * (message.ranks - 1)
        )
        self._device.collectives += 1
        self._device.clock.host += self._device.host.collective
        inside, across, latency = message.seconds(self._device.cluster)
        link = "link" if inside >= across else "link between hosts"
        self._device.clock_task(message.what, link, max(inside, across), latency)


@contextlib.contextmanager
def playing(device: VirtualDevice, rank: int, world_size: int) -> Iterator[None]:
    """Initialize `torch.distributed` within the block, with process groups whose collectives take time on `device`."""

    def send_from_host(message: Collective, whole: Tensors, fill: Callable[[], object], is_async: bool) -> HostWork:
        fill()
        device.clock.host += device.host.message * math.ceil(math.log2(max(2, message.ranks)))
        return HostWork(0.0)

    def line(group: RehearsedGroup, kind: str) -> CommunicatorLine:
        return send_from_host if kind == "cpu" else StreamLine(VirtualStreams(device, group), group)

    with register(line):
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
