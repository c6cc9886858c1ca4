"""A process group of many ranks in a single process. The other ranks do not exist.

Every other rank counts as a copy of this one: an all-gather fills each part with this rank's, and a sum is this rank's
value times the number of ranks. Values that only another rank knows (for example in a broadcast from it) stay
unchanged in memory. Such messages are counted by name.
"""
# ruff: noqa: D102 - the methods of a group are those of `torch.distributed`

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.core.errors import CommunicationError
from fullshard.plan.hardware import Cluster
from fullshard.plan.time import STEP_LATENCY, steps
from fullshard.plan.traffic import carried, exchanged, passed_on

NAME = "rehearsal"
"""The name of the backend in `torch.distributed`."""

Tensors = list[torch.Tensor]
Lists = list[Tensors]

# Without types: torch calls the methods by place, and declares overloads that are not called here.
_GROUP: Any = dist.ProcessGroup


_LINKS = {"all-to-all": exchanged, "ring": passed_on, "send": passed_on, "receive": passed_on}
"""The functions that say which links carry a message, unless it is the same for all ranks."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of `ranks` ranks, `stride` apart, for a tensor of `nbytes` on all ranks, sent `times` times."""

    what: str
    nbytes: int
    ranks: int
    stride: int
    times: int = 1

    def sent(self, cluster: Cluster) -> tuple[float, float]:
        """Return the bytes that a rank sends on its links inside a host and between hosts."""
        on_links = _LINKS.get(self.what, carried)
        # What a rank sends to itself in an exchange takes no link.
        nbytes = self.nbytes * (1 - 1 / self.ranks) if on_links is exchanged else self.nbytes
        return on_links(self.times * nbytes, self.ranks, stride=self.stride, ranks_per_host=cluster.per_host)

    def seconds(self, cluster: Cluster) -> tuple[float, float, float]:
        """Return the seconds that it takes on the links inside a host, between hosts, and as latency."""
        hops = 1 if _LINKS.get(self.what) is passed_on else steps(self.ranks, times=self.times)
        return *cluster.device.link_seconds(*self.sent(cluster)), hops * STEP_LATENCY


CommunicatorLine = Callable[[Collective, Tensors, Callable[[], object], bool], dist.Work]
"""Starts a collective on a communicator, which runs one after the other. The tensors in the second argument must not be
freed before the collective has ended, the third argument writes its results, and the last says if it is async."""

Lines = Callable[["RehearsedGroup", str], CommunicatorLine]
"""Returns the line of a group for tensors of one kind of device."""

_lines: list[Lines] = []
named_groups: WeakValueDictionary[str, RehearsedGroup] = WeakValueDictionary()
unknown: Counter[str] = Counter()
"""How often the script has asked for values that only other ranks know, by what it asked for."""
polled: dict[str, tuple[int, float]] = {}
"""How often the script has asked for a value since another message, and since when, by what it asked for."""


@contextlib.contextmanager
def register(lines: Lines) -> Iterator[None]:
    """Let groups of the backend `NAME` that are created within the block use these lines."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda", "meta"])
    _lines.append(lines)
    try:
        yield
    finally:
        _lines.pop()


def _make(options: Any, _: Any) -> RehearsedGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return RehearsedGroup(options, ranks[1] - ranks[0] if len(ranks) > 1 else 1, _lines[-1])


class RehearsedGroup(_GROUP):  # type: ignore[misc]
    """A communicator with the methods that `torch.distributed` calls. `title` labels it for users."""

    is_in_order = True  # memory is written only after all ranks have read their parts of it

    def __init__(self, options: Any, stride: int, lines: Lines) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.name = self.title = str(options.group_id)
        named_groups[self.name] = self
        self.stride, self.sent_nbytes = stride, 0  # that this rank would have sent
        self._open, self._lines = lines, dict[str, CommunicatorLine]()
        self._last: Any = None

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self.name

    def carry(
        self,
        what: str,
        whole: Tensors,
        options: Any = None,
        fill: Callable[[], object] = lambda: None,
        *,
        times: int = 1,
        ranks: int = 0,
    ) -> Any:
        """Start a collective, and return its work. The tensors in `whole` have the parts of all ranks."""
        if what not in ("broadcast", "receive"):
            polled.clear()
        kind = whole[0].device.type
        line = self._lines.get(kind) or self._lines.setdefault(kind, self._open(self, kind))
        nbytes = sum(tensor.nbytes for tensor in whole)
        message = Collective(what, nbytes, ranks or self.size(), self.stride, times)
        is_async = bool(getattr(options, "asyncOp", True))
        self._last = line(message, whole, fill, is_async)
        return self._last

    def _ask(self, what: str, root: int) -> bool:
        """Return whether this rank is the root of a message. If not, count it as one whose values nobody has."""
        if root != self.rank():
            unknown[f"{what} from rank {root} of {self.size()}"] += 1
        return bool(root == self.rank())

    # -- a value of every rank -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        return self.carry("all-reduce", tensors, options, lambda: self._combine(tensors, options), times=2)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, options: Any = None) -> Any:
        # Only the root has a result.
        here = tensors if options.rootRank == self.rank() else []
        return self.carry("reduce", tensors, options, lambda: self._combine(here, options))

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, options: Any = None) -> Any:
        own = [parts[self.rank()] for parts in inputs]
        whole = [part for parts in inputs for part in parts]
        return self.carry("reduce-scatter", whole, options, lambda: self._combine(_copy(outputs, own), options))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:

        def fill() -> None:
            parts = [given.reshape(self.size(), -1)[self.rank()] for given in inputs]
            self._combine(_copy(outputs, [part.view_as(o) for part, o in zip(parts, outputs, strict=True)]), options)

        return self.carry("reduce-scatter", inputs, options, fill)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], options)

    def allgather(self, outputs: Lists, inputs: Tensors, options: Any = None) -> Any:
        whole = [part for parts in outputs for part in parts]
        given = [tensor for tensor, parts in zip(inputs, outputs, strict=True) for _ in parts]
        return self.carry("all-gather", whole, options, lambda: _copy(whole, given))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:

        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                rows, own = output.view(-1).view(self.size(), -1), given.reshape(-1)
                for part in (rows[: self.rank()], rows[self.rank() + 1 :], rows[self.rank()]):
                    _copy([part], [own.expand_as(part)])

        return self.carry("all-gather", outputs, options, fill)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], options)

    def gather(self, outputs: Lists, inputs: Tensors, options: Any = None) -> Any:
        # Only the root has outputs.
        parts = outputs[0] if outputs else []
        whole = parts or inputs * self.size()
        return self.carry("gather", whole, options, lambda: _copy(parts, inputs * len(parts)))

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        # Every rank sends what this one sends to itself.
        whole = max(outputs, inputs, key=lambda tensors: sum(t.numel() for t in tensors))
        return self.carry("all-to-all", whole, options, lambda: repeat(outputs, inputs[self.rank()]))

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, sizes: list[int], own_sizes: list[int], options: Any = None
    ) -> Any:
        # Every rank sends what this one sends to itself.

        if self.size() > 1 and sum(map(bool, own_sizes)) == 1:  # each rank sends all it has to one other
            return self.carry("ring", [given], options, lambda: repeat([output], given))

        def fill() -> None:
            parts = [t.split(s) if s else t.chunk(self.size()) for t, s in ((output, sizes), (given, own_sizes))]
            repeat(parts[0], parts[1][self.rank()])

        return self.carry("all-to-all", [max(output, given, key=torch.numel)], options, fill)

    def barrier(self, opts: Any = None) -> Any:
        return self.carry("barrier", [torch.zeros(1)], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # -- a value of one rank: what another one sends stays as it is ----------------------------------------------

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        self._ask("broadcast", getattr(options, "rootRank", self.rank()))
        return self.carry("broadcast", tensors, options)

    def scatter(self, outputs: Tensors, inputs: Lists, options: Any = None) -> Any:
        if not self._ask("scatter", options.rootRank):
            return self.carry("scatter", outputs * self.size(), options)
        return self.carry("scatter", inputs[0], options, lambda: _copy(outputs, [inputs[0][self.rank()]]))

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        return self.carry("send", tensors, None, ranks=2)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        self._ask("receive", source)
        return self.carry("receive", tensors, None, ranks=2)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        raise CommunicationError(
            f"rank {self.rank()} waits for a message from any rank, but in a rehearsal no other rank exists",
            hint="receive from a rank that the script names, or run the script in several processes",
        )

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> Any:
        return self._last

    # The names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _combine(self, tensors: Sequence[torch.Tensor], options: Any) -> None:
        """Reduce each tensor in place with as many equal ones as there are other ranks."""
        op, factor = torch_private.reduction_of(options.reduceOp)
        many = self.size() * (1 if factor is None else factor)
        for tensor in (t.data for t in tensors):
            if tensor.dtype is torch.bool:  # true or false, however many there are
                continue
            if op in (dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM) and tensor.itemsize == 1:
                wide = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
                tensor.copy_(wide * many)  # the number of ranks may be more than this dtype can hold
            elif op in (dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM):
                tensor.mul_(many)
            elif op == dist.ReduceOp.PRODUCT:
                tensor.pow_(self.size())
            elif op == dist.ReduceOp.BXOR and self.size() % 2 == 0:
                tensor.zero_()


def _copy(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy the data of each input to its output, unless it is in place, and return the outputs."""
    for output, given in zip(outputs, inputs, strict=True):
        if output.numel() and (output.numel() != given.numel() or output.data_ptr() != given.data_ptr()):
            output.data.copy_(given.data)
    return outputs


def repeat(outputs: Sequence[torch.Tensor], given: torch.Tensor) -> None:
    """Fill each output with the elements of `given`, repeated if the output is longer."""
    for output in (output.data for output in outputs):
        if output.numel() and given.numel():
            for part in output.view(-1).split(given.numel()):  # without memory of its own
                part.copy_(given.data.reshape(-1)[: part.numel()])
        else:
            output.zero_()
