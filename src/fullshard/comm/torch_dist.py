"""Collectives over `torch.distributed` process groups."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import BufferSpec, Collectives, FullBuffer, Reduction, SplitSizes, Work, WorkOf, own_interval
from fullshard.comm.resized_buffer import ResizedBuffer
from fullshard.comm.waiting import waiting_in_step


def completed(result: torch.Tensor) -> Work:
    """Return a finished `Work` for a result that needed no communication."""
    return WorkOf(lambda: result)


def filling(result: torch.Tensor, works: list[dist.Work]) -> Work:
    """Return one `Work` that waits for several operations, which together fill `result`."""

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return result

    return WorkOf(wait)


def dividing(work: dist.Work, total: torch.Tensor, how: Reduction) -> Work:
    """Return a `Work` that waits for a sum and then divides it by `how.divisor`."""

    def wait() -> torch.Tensor:
        work.wait()
        average = total / how.divisor  # never a view, so that the unsharded buffer is freed
        if how.inspector is not None:
            how.inspector(average, {})
        return average

    return WorkOf(wait)


def as_sent(flat: torch.Tensor) -> torch.Tensor:
    """Return `flat`, viewed as bytes unless every backend can send its dtype. NCCL, for example, cannot send int16."""
    return flat if flat.dtype in _SENT_AS_THEY_ARE else flat.view(torch.uint8)


class PersistentBuffer(FullBuffer):
    """The main weights of a single rank, used as the unsharded buffer because they already have its dtype."""

    is_persistent = True
    nbytes = 0

    def __init__(self, full: torch.Tensor) -> None:
        self.full = self.main = full

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Return immediately, because there is nothing to gather."""
        return completed(self.full)

    def free(self, *, keeps_memory: bool = False) -> None:
        """Do nothing, because the main weights must stay in memory."""


class Alone(Collectives):
    """A group of one rank, which needs no communication."""

    rank = 0
    size = 1
    sends = False

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        if spec.holds_main:
            return PersistentBuffer(torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device))
        return ResizedBuffer(self, spec)

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Return immediately, because `full` is already complete."""
        return completed(full)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        if how.divisor != 1:
            full.div_(how.divisor)
        if how.inspector is not None:
            how.inspector(full, {0: full})
        return completed(full)

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Return immediately, because `tensor` is already the sum."""
        return completed(tensor)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Copy `leaving` to `arriving`."""
        return completed(arriving.copy_(leaving))


class NativeCollectives(Collectives):
    """The native collectives of the backend (NCCL, XCCL and others)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        return ResizedBuffer(self, spec)

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Gather with one in-place all-gather."""
        sent = as_sent(full)
        own = own_interval(sent, self.rank, self.size)
        return filling(full, [all_gather_single(sent, own, group=self.group, async_op=True)])

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Reduce with one reduce-scatter into this rank's interval."""
        own = own_interval(full, self.rank, self.size)
        is_python = torch_private.backend_of(self.group, full.device) is None
        if is_python and not getattr(self.group, "is_in_order", False):
            own = torch.empty_like(own)  # a backend in Python may write to it while other ranks still read it
        return dividing(reduce_scatter_single(own, full, group=self.group, async_op=True), own, how)

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Reduce with one all-reduce."""
        return filling(tensor, [dist.all_reduce(tensor, group=self.group, async_op=True)])

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Exchange with one all-to-all."""
        sizes = list(splits.arriving), list(splits.leaving)
        work = dist.all_to_all_single(arriving, leaving, *sizes, group=self.group, async_op=True)
        return filling(arriving, [work])


# torch 2.13 renamed both functions and warns on the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SENT_AS_THEY_ARE = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def all_reduce(
    tensor: torch.Tensor, what: str, groups: Iterable[dist.ProcessGroup], op: Any = dist.ReduceOp.SUM
) -> None:
    """All-reduce a tensor in place over one group after another, as part of the current step."""
    groups = list(groups)
    with waiting_in_step(what, groups):
        for group in groups:
            torch_private.count_for_debugging("c10d_functional.all_reduce")  # as when a DTensor's partial sum is read
            with torch_private.uncounted():
                dist.all_reduce(tensor, op=op, group=group)
