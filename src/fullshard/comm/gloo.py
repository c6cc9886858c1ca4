"""Collectives for CPU ranks without shared memory, built from Gloo's point-to-point messages."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import Inspector, Reduction, SplitSizes, Work, WorkOf, own_interval
from fullshard.comm.torch_dist import NativeCollectives, filling
from fullshard.core.sizes import SUM_BLOCK_NBYTES, sum_blocks


class GlooCollectives(NativeCollectives):
    """Gloo collectives whose all-gather and reduce-scatter are built from point-to-point messages.

    Gloo's own all-gather takes about four times as long for large tensors. Gloo's own reduce-scatter is internally an
    all-reduce, which sends every byte twice (`docs/decisions/0002-gloo-point-to-point.md`).
    """

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Send this rank's interval to every peer, and receive the intervals of all peers."""
        torch_private.count_for_debugging("c10d._allgather_base_")
        parts = [own_interval(full, rank, self.size) for rank in range(self.size)]
        return filling(full, self._messages([parts[self.rank]] * self.size, parts, tag))

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Send every peer its interval, receive this rank's interval from every peer, and sum them locally."""
        torch_private.count_for_debugging("c10d._reduce_scatter_base_")
        parts = [own_interval(full, rank, self.size) for rank in range(self.size)]
        contributions = [part if rank == self.rank else torch.empty_like(part) for rank, part in enumerate(parts)]
        works = self._messages(parts, contributions, how.tag)

        def wait() -> torch.Tensor:
            while works:
                works.pop().wait()  # the work keeps the received message alive
            # Sum into a received part, so that the unsharded buffer can be freed and no other memory is needed.
            into = contributions[1 if self.rank == 0 else 0]
            return average(contributions, into, how.divisor, how.inspector)

        return WorkOf(wait)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Send every peer its part, and receive this rank's parts from all peers. Empty parts are not sent."""
        torch_private.count_for_debugging("c10d.alltoall_base_")
        there, here = leaving.split_with_sizes(splits.leaving), arriving.split_with_sizes(splits.arriving)
        works = self._messages(there, here, tag)
        here[self.rank].copy_(there[self.rank])
        return filling(arriving, works)

    def _messages(self, there: Sequence[torch.Tensor], here: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        """Start sending each peer its part of `there` and receiving a part from it into `here`; return the messages."""
        works = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if here[source].numel():
                works.append(receive(here[source], self.group, source, tag))
            if there[to].numel():
                works.append(send(there[to], self.group, to, tag))
        return works


_NEVER_SENT = 2**31 - 1
"""A tag that no message uses."""


class FailedWork(dist.Work):
    """A message that could not be started because its peer has exited. Its `wait` raises the backend's error."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def wait(self, timeout: object = None) -> NoReturn:
        """Raise the error that prevented the message from starting."""
        raise self._error


def end_waits(group: dist.ProcessGroup) -> None:
    """Make all waits in a group fail, on this rank and on the others. The group cannot be used afterwards.

    When a Gloo message times out, Gloo closes all connections of its group. A message on a connection that another rank
    has already closed fails immediately and does not close other connections.
    """
    if torch_private.backend_of(group, torch.device("cpu")) is None or group.size() == 1:
        return
    for step in range(1, group.size()):
        with contextlib.suppress(RuntimeError):
            other = (group.rank() + step) % group.size()
            receive(torch.empty(1), group, other, _NEVER_SENT).wait(timedelta(milliseconds=1))


def send(tensor: torch.Tensor, group: dist.ProcessGroup, to: int, tag: int) -> dist.Work:
    """Start sending a tensor to rank `to` of the group."""
    return _begun(dist.isend, tensor, group=group, tag=tag, group_dst=to)


def receive(tensor: torch.Tensor, group: dist.ProcessGroup, source: int, tag: int) -> dist.Work:
    """Start receiving a tensor from rank `source` of the group."""
    return _begun(dist.irecv, tensor, group=group, tag=tag, group_src=source)


def _begun(begin: Callable[..., dist.Work | None], tensor: torch.Tensor, **how: Any) -> dist.Work:
    try:
        work = begin(tensor, **how)
    except RuntimeError as error:
        return FailedWork(error)
    assert work is not None  # noqa: S101 -- this rank is in the group
    return work


@torch.no_grad()
def average(
    terms: Sequence[torch.Tensor], into: torch.Tensor, divisor: float, inspector: Inspector | None = None
) -> torch.Tensor:
    """Add at least two `terms`, one per rank, divide the sum by `divisor`, write it to `into`, and return `into`.

    `into` may be one of the terms. They are added in order along a balanced binary tree: 8 ranks are added as 4 + 4.
    """
    length = SUM_BLOCK_NBYTES // into.itemsize
    number = sum_blocks(len(terms), is_cast=any(term.dtype != into.dtype for term in terms))
    rooms = [into.new_empty(min(length, into.numel())) for _ in range(number)]
    for start in range(0, into.numel(), length):
        block = into[start : start + length]
        parts = [term[start : start + length] for term in terms]
        total = _tree_sum(parts, [room[: block.numel()] for room in rooms] or [block])
        if divisor != 1:
            total.div_(divisor)
        if inspector is not None:
            inspector(total, dict(enumerate(parts)))
        if rooms:  # in a separate buffer, because `into` may be a term that is still needed
            block.copy_(total)
    return into


def _tree_sum(terms: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `terms`, computed in the buffers `rooms` (one buffer per tree level)."""
    if len(terms) == 1:
        return terms[0] if terms[0].dtype == rooms[-1].dtype else rooms[0].copy_(terms[0])
    half = 1 << (len(terms) - 1).bit_length() - 1
    return torch.add(_tree_sum(terms[:half], rooms), _tree_sum(terms[half:], rooms[1:] or rooms), out=rooms[0])
