"""Process groups of the virtual device, with NCCL's order: one collective of a communicator after the other.

This rank's part is played; the others do the same at the same time. Collectives that are asked for without `async_op`
run on the current stream, others on one of the communicator's own, as in torch's process group for NCCL. Tensors of the
CPU are messages between hosts, which the host waits for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api.virtual.clock import Task
from fullshard.api.virtual.device import VirtualDevice, VirtualStream

# Without types: torch calls the methods by place, and declares overloads that are not called here.
_WORK: Any = dist.Work
_GROUP: Any = dist.ProcessGroup


class VirtualWork(_WORK):  # type: ignore[misc]
    """A collective under way, and the objects that must outlive it."""

    def __init__(self, device: VirtualDevice, task: Task | None, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._task, self._tensors = device, task, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait."""
        self._device.clock.have_wait(self._device.current.queue, self._task)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self._device.clock.is_over(self._task)

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()


class VirtualGroup(_GROUP):  # type: ignore[misc]
    """One communicator.

    Args:
        device: whose clocks it takes.
        name: for people.
        rank, size: this rank's place in it.
        stride: how far apart its ranks are.

    Attributes:
        title: of its stream.
        sent_nbytes: bytes that this rank would have sent.
        is_in_order: memory is written only after all ranks have read their parts of it.
    """

    is_in_order = True

    def __init__(self, device: VirtualDevice, name: str, rank: int, size: int, stride: int = 1) -> None:
        super().__init__(rank, size)
        self._device, self._members, self._stride = device, size, stride
        self.name = self.title = name
        self._stream: VirtualStream | None = None
        self._last: Task | None = None
        self.sent_nbytes = 0

    def getBackendName(self) -> str:
        """Return the backend's name, for torch."""
        return "virtual"

    @property
    def group_name(self) -> str:
        """The group's name, for torch."""
        return self.name

    def _meet(self, what: str, whole: list[torch.Tensor], options: Any, *, times: int = 1) -> VirtualWork:
        """Run a collective of all that `whole` has, over the ranks; in an exchange each rank has another part."""
        device, nbytes = self._device, sum(t.nbytes for t in whole)
        if whole and not whole[0].is_meta:
            device.clock.host += device.host.message * math.ceil(math.log2(max(2, self._members)))
            return VirtualWork(device, None, [])
        self.sent_nbytes += times * (nbytes // self._members) * (self._members - 1)
        device.collectives += 1
        device.clock.host += device.host.collective
        stream = device.current
        is_async = bool(getattr(options, "asyncOp", True))
        if is_async:
            self._stream = self._stream or VirtualStream(device, self.title)
            stream = self._stream
            stream.wait_stream(device.current)
        device.clock.have_wait(stream.queue, self._last)
        costs = {"all-gather": device.gather_cost, "all-to-all": device.exchange_cost}
        cost = costs.get(what, device.collective_cost)
        resource, work, latency = cost(nbytes, self._members, stride=self._stride, times=times)
        with stream:
            self._last = device.clock_task(what, resource, work, latency)
        return VirtualWork(device, self._last, whole if is_async else [])

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("all-reduce", tensors, options, times=2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("broadcast", tensors, options)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        """See `torch.distributed`. Between hosts all say the same."""
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

    def barrier(self, opts: Any = None) -> Any:
        """See `torch.distributed`."""
        return self._meet("barrier", [torch.zeros(1)], opts)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
