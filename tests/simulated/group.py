"""Process groups with NCCL's semantics, and ranks that are threads of one process.

A collective is ordered on a stream that its communicator has on each device. It returns at once; `wait` has the current
stream wait, and the tensors are kept until then. That of tensors of the CPU has the host wait.

Of the threads one runs at a time, until it must wait for another: a run is the same each time, and a deadlock is found.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, WorldData

from tests.simulated import device

_c10d: Any = torch._C._distributed_c10d
_numbers = itertools.count()


class _Work(_c10d.Work):
    """A collective that was launched on `stream`, and the tensors that must outlive it."""

    def __init__(self, group: SimulatedGroup, stream: torch.Stream, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = stream.record_event(), tensors
        if group.keeps:
            group.keep(self._event, tensors)
        self._group, self._device = group, stream.device

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = []
        self._group.let_go(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self.wait()


class _HostWork(_c10d.Work):
    """A collective between hosts."""

    def __init__(self, communicator: int, upto: int) -> None:
        super().__init__()
        self._place = communicator, upto

    def wait(self, timeout: Any = None) -> bool:
        torch.ops.simulated.wait_on_host(*self._place)
        return True


class SimulatedGroup(_c10d.ProcessGroup):
    """One communicator as one of its members has it.

    Attributes:
        keeps: the tensors of work that is dropped before anybody has waited, as NCCL's does.
        is_in_order: a reduce-scatter may write to its own part of the input, as NCCL's may.
    """

    keeps = True
    is_in_order = True

    def __init__(self, communicator: int, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._communicator, self._member, self._members = communicator, rank, size
        self._streams: dict[torch.device, torch.Stream] = {}
        self._kept: list[tuple[torch.Event, list[torch.Tensor]]] = []

    def getBackendName(self) -> str:
        return "simulated"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def keep(self, event: torch.Event, tensors: list[torch.Tensor]) -> None:
        """Until somebody waits: who drops the work without that does not free what it uses."""
        self._kept.append((event, tensors))

    def let_go(self, event: torch.Event) -> None:
        self._kept = [kept for kept in self._kept if kept[0] is not event]

    def _meet(
        self, what: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None, root: int = 0
    ) -> Any:
        reduce = int(options.reduceOp.op if hasattr(options.reduceOp, "op") else options.reduceOp) if options else 0
        place = (outputs or inputs)[0].device
        arguments = (self._communicator, self._member, self._members, what, outputs, inputs, reduce, root)
        if place.type == "cpu":
            return _HostWork(self._communicator, torch.ops.simulated.meet(*arguments))
        if place not in self._streams:
            self._streams[place] = torch.Stream(place)
        stream = self._streams[place]
        stream.wait_stream(torch.accelerator.current_stream(place))
        with stream:
            torch.ops.simulated.meet(*arguments)
        return _Work(self, stream, [*outputs, *inputs])

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._meet("all_reduce", tensors, tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._meet("broadcast", tensors, tensors, root=options.rootRank)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        return self._meet("all_gather", outputs[0], inputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        is_here = self._member == options.rootRank
        there = outputs[0] if is_here else [torch.empty_like(inputs[0]) for _ in range(self._members)]
        return self._meet("all_gather", there, inputs)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return self._meet("all_gather", [output], [given])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return self._meet("reduce_scatter", [output], [given], options)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], options: Any = None) -> Any:
        """That of functional collectives, which pass one tensor."""
        return self.all_gather_single(*outputs, *inputs)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, source: list[int], to: list[int], options: Any = None
    ) -> Any:
        def cut(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            return list(tensor.split(sizes) if sizes else tensor.chunk(self._members))

        return self._meet("all_to_all", cut(output, source), cut(given, to))

    def barrier(self, opts: Any = None) -> Any:
        return self._meet("barrier", [], [torch.zeros(1)])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced


def _communicator(store: Any, name: str = "communicator") -> int:
    """The number of the communicator that the ranks with this store make."""
    number = next(_numbers)
    return int(store.compare_set(name, "", str(number)))


dist.Backend.register_backend(
    "simulated",
    lambda store, rank, size, timeout: SimulatedGroup(_communicator(store), rank, size),
    devices=["cpu", device.NAME],
)


def rank_here() -> int:
    """Return the rank that this thread belongs to. Autograd's threads belong to a device, and so to a rank."""
    rank: int | None = getattr(_here, "rank", None)
    return torch.accelerator.current_device_index() if rank is None else rank


class _World(ThreadLocalWorld):
    """What torch keeps about process groups, for each rank by itself."""

    def __init__(self) -> None:
        self.of: dict[int, WorldData] = {}

    def _get_world(self) -> WorldData:
        rank = rank_here()
        if rank not in self.of:
            nobody: Any = None
            self.of[rank] = WorldData(nobody, {}, {}, {}, {}, 0, {}, {}, {}, [])
        return self.of[rank]


_here = threading.local()


@contextmanager
def _worlds() -> Iterator[None]:
    """Each rank has process groups of its own, and makes new ones together with the others."""
    module: Any = dist.distributed_c10d
    world, barrier = module._world, module._store_based_barrier

    def together(rank: int, store: Any, name: str, size: int, *rest: Any) -> None:
        meeting, member = _communicator(store, name), (store.add(f"members of {name}", 1) - 1) % size
        upto = torch.ops.simulated.meet(meeting, member, size, "making a group", [], [torch.zeros(1)], 0, 0)
        torch.ops.simulated.wait_on_host(meeting, upto)

    module._world, module._store_based_barrier = _World(), together
    _c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _c10d._set_thread_isolation_mode(False)
        module._world, module._store_based_barrier = world, barrier


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` as each of `size` ranks, rank r on device r, and return what they return.

    Raises:
        Exception: what a rank has raised, with its number; the others' deadlock, if there was none.
    """
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    store = dist.HashStore()

    def rank_thread(rank: int) -> None:
        _here.rank = rank
        device.enter(rank)
        try:
            dist.init_process_group("simulated", rank=rank, world_size=size, store=store)
            results[rank] = function(*arguments)
        except BaseException as error:
            error.add_note(f"on rank {rank}")
            failures[rank] = error
        finally:
            device.leave(rank)

    device.begin_ranks(size)
    with _worlds():
        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        # Who waits for a rank that has failed is in a deadlock, which is not the cause.
        raise min(failures.values(), key=lambda error: "deadlock" in str(error))
    return [results[rank] for rank in range(size)]
