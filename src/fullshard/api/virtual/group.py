"""Simulation of one rank of a large job in a single process.

`torch.distributed` gets process groups of the virtual device, and there are no other ranks. As with NCCL, a
communicator runs its collectives one after the other. They run on a separate stream if `async_op` is set, and
otherwise on the current stream. Collectives of CPU tensors represent messages between hosts, for which the host waits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.api.virtual.clock import Task
from fullshard.api.virtual.device import VirtualDevice, VirtualStream
from fullshard.comm.mesh import Mesh

_NAME = "virtual"
_playing: list[VirtualDevice] = []

# Without types: torch calls the methods by place, and declares overloads that are not called here.
_WORK: Any = dist.Work
_GROUP: Any = dist.ProcessGroup


class VirtualWork(_WORK):  # type: ignore[misc]
    """A running collective, and the tensors that must not be freed before it has ended."""

    def __init__(self, device: VirtualDevice, task: Task | None, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._task, self._tensors = device, task, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective."""
        self._device.clock.have_wait(self._device.current.queue, self._task)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has completed."""
        return self._device.clock.is_over(self._task)

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()


class VirtualGroup(_GROUP):  # type: ignore[misc]
    """A simulated communicator of `size` ranks, whose rank numbers are `stride` apart.

    `title` labels its stream for users.
    """

    is_in_order = True  # memory is written only after all ranks have read their parts of it

    def __init__(self, device: VirtualDevice, name: str, rank: int, size: int, stride: int = 1) -> None:
        super().__init__(rank, size)
        self._device, self._members, self._stride = device, size, stride
        self.name = self.title = name
        self._stream: VirtualStream | None = None
        self._last: Task | None = None
        self.sent_nbytes = 0  # that this rank would have sent
        device.groups[name] = self

    def getBackendName(self) -> str:
        """Return the backend's name. torch calls this method."""
        return "virtual"

    @property
    def group_name(self) -> str:
        """Return the group's name. torch reads this property."""
        return self.name

    def _meet(self, what: str, whole: list[torch.Tensor], options: Any, *, times: int = 1) -> VirtualWork:
        """Simulate a collective, and return its work. The tensors in `whole` contain the parts of all ranks."""
        device, nbytes = self._device, sum(t.nbytes for t in whole)
        if whole and not whole[0].is_meta:
            device.clock.host += device.host.message * math.ceil(math.log2(max(2, self._members)))
            return VirtualWork(device, None, [])
        self.sent_nbytes += nbytes if what == "ring" else times * (nbytes // self._members) * (self._members - 1)
        device.collectives += 1
        device.clock.host += device.host.collective
        stream = device.current
        is_async = bool(getattr(options, "asyncOp", True))
        if is_async:
            self._stream = self._stream or VirtualStream(device, self.title)
            stream = self._stream
            stream.wait_stream(device.current)
        device.clock.have_wait(stream.queue, self._last)
        with stream:
            self._last = device.collective(what, nbytes, self._members, stride=self._stride, times=times)
        return VirtualWork(device, self._last, whole if is_async else [])

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("all-reduce", tensors, options, times=2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("broadcast", tensors, options)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`. The results are copies of this rank's tensor, because there are no other ranks."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._meet("all-gather", outputs[0], options)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("all-gather", [output], options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("reduce-scatter", [given], options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, source: list[int], to: list[int], options: Any = None
    ) -> Any:
        """See `torch.distributed`."""
        return self._meet("all-to-all", [max(output, given, key=torch.numel)], options)

    def send(self, what: str, given: torch.Tensor, made: torch.Tensor, *sizes: Any) -> VirtualWork:
        """Simulate a functional collective, which ends before its result is read. Return its work.

        An all-to-all with a message to a single rank is a step of a ring.
        """
        if what == "all_to_all_single" and sum(map(bool, sizes[-1])) == 1:
            return self._meet("ring", [given], None)
        return self._meet(
            what.replace("_", "-"), [max(made, given, key=torch.numel)], None, times=1 + (what == "all_reduce")
        )

    def barrier(self, opts: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("barrier", [torch.zeros(1)], opts)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single


@contextlib.contextmanager
def playing(device: VirtualDevice, rank: int, world_size: int) -> Iterator[None]:
    """Initialize `torch.distributed` within the block, with process groups whose collectives take time on `device`."""
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=["cpu", "meta"])
    _playing.append(device)
    dist.init_process_group(_NAME, rank=rank, world_size=world_size, store=torch_private.store_of_nobody())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _playing.pop()


def name_groups(mesh: Mesh) -> None:
    """Label the groups of a mesh with their purposes, for traces."""
    kinds = {"gather": mesh.gather, "reduce": mesh.reduce, "all-reduce": mesh.replicate}
    for group, name in [(mesh.world_group, "all ranks"), *((getattr(c, "group", None), n) for n, c in kinds.items())]:
        if isinstance(group, VirtualGroup):
            group.title = name


def _make(options: Any, _: Any) -> VirtualGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return VirtualGroup(_playing[-1], str(options.group_id), options.group_rank, options.group_size, stride)
