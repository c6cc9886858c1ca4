"""The process group of a rehearsal, beside real ranks over Gloo that all have the same values, and its time.

pytest tests/api/rehearsal/test_rehearsal_group.py
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fullshard.api.rehearsal.group import Collective, register, unknown
from fullshard.api.rehearsal.lines import Links, processor_seconds
from fullshard.api.rehearsal.stage import replacements
from fullshard.api.virtual.device import instead
from fullshard.comm.torch_dist import all_gather_single, reduce_scatter_single
from fullshard.core.errors import CommunicationError
from fullshard.plan.hardware import parse_cluster
from tests.distributed import run_ranks

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
OPS = ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


@contextlib.contextmanager
def rehearsed(rank: int, ranks: int = RANKS, *, links: str = "free") -> Iterator[None]:
    """Be one rank of many."""
    cluster = parse_cluster(f"{ranks}xCPU", hosts=1)
    with register(Links(cluster, is_free=links == "free").line), contextlib.ExitStack() as stack:
        for place, function in replacements().items():
            stack.enter_context(instead(place.owner, place.name, function))
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size) % 5 + 1).to(dtype).view(shape)


def _parts(dtype: torch.dtype) -> list[torch.Tensor]:
    return [_tensor(dtype, 2, 2) + index for index in range(RANKS)]


def every_collective(rank: int) -> dict[str, Any]:
    """Call every collective of torch.distributed with values that are the same on all ranks; return all results."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, RANKS)
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        parts, empty = _parts(dtype), [torch.empty(2, 2, dtype=dtype) for _ in range(RANKS)]
        dist.all_gather(empty, parts[1])
        found[f"all_gather {dtype}"] = empty
        whole = torch.empty(2 * RANKS, 2, dtype=dtype)
        all_gather_single(whole, parts[1])
        found[f"all_gather_single {dtype}"] = whole
        found[f"in place {dtype}"] = whole = whole.clone()
        own = whole[2 * rank : 2 * rank + 2]
        own += 1
        all_gather_single(whole, own)
        found[f"broadcast {dtype}"] = own = parts[2].clone()
        dist.broadcast(own, 1)
        found[f"gather {dtype}"] = gathered = [torch.zeros_like(own) for _ in parts] if rank == 1 else None
        dist.gather(own, gathered, dst=1)
        found[f"all_to_all {dtype}"] = outputs = [torch.empty_like(own) for _ in parts]
        dist.all_to_all(outputs, parts)
        found[f"all_to_all_single {dtype}"] = output = torch.empty(2 * RANKS, 2, dtype=dtype)
        dist.all_to_all_single(output, torch.cat(parts))
        sizes = [1, 2, 3]
        uneven = torch.empty(sizes[rank] * RANKS, 2, dtype=dtype)
        dist.all_to_all_single(uneven, _tensor(dtype, 6, 2), [sizes[rank]] * RANKS, sizes)
        found[f"uneven {dtype}"] = uneven
        for name in OPS:
            if dtype.is_floating_point and name.startswith("B"):
                continue
            op = getattr(dist.ReduceOp, name)
            found[f"all_reduce {name} {dtype}"] = reduced = _tensor(dtype, 2, 3)
            dist.all_reduce(reduced, op)
            if rank == 1:
                found[f"reduce {name} {dtype}"] = reduced = _tensor(dtype, 2, 3)
                dist.reduce(reduced, 1, op)
            else:
                dist.reduce(_tensor(dtype, 2, 3), 1, op)
        found[f"reduce_scatter {dtype}"] = reduced = torch.empty(2, 2, dtype=dtype)
        dist.reduce_scatter(reduced, [part.clone() for part in parts])
        found[f"reduce_scatter_single {dtype}"] = reduced = torch.empty(2, 2, dtype=dtype)
        reduce_scatter_single(reduced, torch.cat(parts))
    flag = torch.tensor([True, False])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    found["flag"] = flag
    dist.scatter(scattered := torch.ones(2), [torch.ones(2)] * RANKS if rank == 1 else None, src=1)
    found["scatter"] = scattered
    dist.barrier()
    dist.monitored_barrier()
    return {**found, **_of_objects(rank), **_functional(), **_of_groups(rank)}


def _of_objects(rank: int) -> dict[str, Any]:
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"a": 1, "text": "equal"})
    to_one = [None] * RANKS if rank == 1 else None
    dist.gather_object([1, 2], to_one, dst=1)
    dist.broadcast_object_list(objects := ["here"], src=1)
    return {"all_gather_object": gathered, "gather_object": to_one, "objects": objects}


def _called(name: str, before: str) -> Any:
    """Return a functional collective, which torch 2.13 renamed."""
    return getattr(functional, name, None) or getattr(functional, before)


def _functional() -> dict[str, Any]:
    world: Any = dist.group.WORLD
    value = _tensor(torch.float32, 3, 4)
    mesh = init_device_mesh("cpu", (RANKS,))
    many = [value.clone(), value + 1]
    gather = _called("all_gather_single", "all_gather_tensor")
    scatter = _called("reduce_scatter_single", "reduce_scatter_tensor")
    gather_all = _called("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
    scatter_all = _called("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    partial = DTensor.from_local(value, mesh, [Partial()])
    placed = distribute_tensor(_tensor(torch.float32, 7, 4), mesh, [Shard(0)], src_data_rank=None)
    return {
        "functional all_gather": gather(value, 0, world).clone(),
        "functional reduce_scatter": scatter(value, "sum", 0, world).clone(),
        "functional all_reduce": functional.all_reduce(value, "max", world).clone(),
        "functional all_to_all": functional.all_to_all_single(value, None, None, world).clone(),
        "functional broadcast": functional.broadcast(value, 0, world).clone(),
        "coalesced gathers": [t.clone() for t in gather_all(many, world)],
        "coalesced reductions": [t.clone() for t in scatter_all(many, "sum", [0, 0], world)],
        "coalesced sums": [t.clone() for t in functional.all_reduce_coalesced(many, "sum", world)],
        "partial": partial.redistribute(placements=[Replicate()]).to_local(),
        "scattered": partial.redistribute(placements=[Shard(0)]).to_local(),
        "placed": placed.to_local().shape,
        "whole": placed.full_tensor().shape,
        "norm": placed.redistribute(placements=[Replicate()]).shape,
    }


def _of_groups(rank: int) -> dict[str, Any]:
    pair = dist.new_group([0, 1])
    if rank > 1:
        return {}
    value = torch.ones(2)
    work = dist.all_reduce(value, group=pair, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    return {"pair": value, "ranks": dist.get_process_group_ranks(pair), "own": dist.get_group_rank(pair, rank)}


@pytest.mark.full
def test_every_collective_gives_what_equal_ranks_over_gloo_give() -> None:
    """Same values, shapes and dtypes for each of the ranks."""
    real = run_ranks(_ranked, RANKS)
    for rank in range(RANKS):
        with rehearsed(rank):
            found = every_collective(rank)
        assert found.keys() == real[rank].keys()
        for name, expected in real[rank].items():
            if "object" in name:
                assert found[name] == expected, name
            else:
                torch.testing.assert_close(found[name], expected, rtol=0, atol=0, msg=name)


def _ranked() -> dict[str, Any]:
    return every_collective(dist.get_rank())


def test_what_only_another_rank_knows_stays_and_is_counted() -> None:
    """Broadcasts, scatters and messages from others leave memory as it is; sends end."""
    unknown.clear()
    with rehearsed(1):
        value = torch.full((3,), 7.0)
        dist.broadcast(value, 2)
        dist.scatter(value, src=0)
        dist.recv(value, 2)
        dist.send(value, 0)
        with pytest.raises(CommunicationError, match="rank 1 waits for a message from any rank"):
            dist.recv(value)
        received: Any = dist.irecv(value, 0)
        received.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, value, 2), dist.P2POp(dist.isend, value, 0)]):
            work.wait()
        assert value.tolist() == [7.0] * 3
        dist.broadcast(value, 1)
        objects: list[Any] = ["own"]
        dist.broadcast_object_list(objects, src=0)
        dist.recv_object_list(objects, 2)
        dist.scatter_object_list(objects, None, group_src=2)
        assert objects == ["own"]
        dist.scatter_object_list(objects, [0, 1, 2], src=1)
        assert objects == [1]
    found = dict(unknown)
    assert sum(found.values()) == 8
    assert found["broadcast_object_list from rank 0"] == found["recv_object_list from rank 2"] == 1
    assert found["broadcast from rank 2 of 3"] == 1
    assert found["scatter from rank 0 of 3"] == 1


def test_groups_have_the_backend_that_was_asked_for() -> None:
    """Scripts compare its name, and make groups of other backends, or parts of a group."""
    with rehearsed(5, 8):
        assert dist.get_backend() == "gloo"
        assert dist.get_backend(dist.new_group(backend="cpu:gloo")) == "cpu:gloo"
        assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        part = dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]])
        assert dist.get_process_group_ranks(part) == [4, 5, 6, 7]
        assert dist.get_process_group_ranks(dist.split_group(part, [[0, 2], [1, 3]])) == [5, 7]
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        assert list(mesh.get_coordinate() or ()) == [1, 1]
        replicas: Any = mesh["replicate"].get_group()
        assert replicas.stride == 4


def test_averages_and_scaled_sums() -> None:
    """The two reductions that Gloo does not have, and a small integer's sum of many ranks."""
    with rehearsed(0, 1000):
        value, small = torch.full((2,), 3.0), torch.full((2,), 1, dtype=torch.int8)
        dist.all_reduce(value, dist.ReduceOp.AVG)
        assert value.tolist() == [3.0, 3.0]
        dist.all_reduce(value, dist._make_nccl_premul_sum(0.5))
        assert value.tolist() == [1500.0, 1500.0]
        dist.all_reduce(small)
        assert small.tolist() == [1000 - 1024] * 2


def test_messages_take_the_time_of_the_links_beside_the_computation() -> None:
    """One after the other, also of several communicators; the host goes on meanwhile."""
    whole, own = torch.zeros(15_000_000), torch.zeros(7_500_000)  # 30 MB of 60 arrive, at 1.5 GB/s: 20 ms
    with rehearsed(0, 2, links="CPU"):
        pair = dist.new_group([0, 1])
        dist.all_gather_single(whole, own)
        begin = time.perf_counter()
        works: list[Any] = [dist.all_reduce(own, async_op=True, group=group) for group in (None, None, pair)]
        assert works[1]._end - works[0]._end >= 0.0199
        assert works[2]._end - works[1]._end >= 0.0199
        works[2].wait()
        assert works[0].is_completed()
        assert time.perf_counter() - begin >= 0.06
        work: Any = dist.all_reduce(own, async_op=True)
        time.sleep(0.03)  # a computation that hides it
        assert work.is_completed()
        begin = time.perf_counter()
        dist.all_reduce(own)
        assert time.perf_counter() - begin >= 0.02


def _processor_time_of_a_message() -> float:
    """Return the seconds that other threads than this one spend during a message of 30 MB."""
    own, before = torch.zeros(7_500_000), (time.process_time(), time.thread_time())
    work: Any = dist.all_reduce(own, async_op=True)
    work.wait()
    assert work.is_completed()
    return time.process_time() - before[0] - (time.thread_time() - before[1])


def test_messages_over_gloo_take_the_processors_time() -> None:
    """In a thread, as long as was measured for so many bytes; the message has not ended before."""
    links = Links(parse_cluster("2xCPU", hosts=1), processor=1e-9)
    with register(links.line):
        dist.init_process_group("rehearsal", rank=0, world_size=2, store=dist.HashStore())
        try:
            spent = [_processor_time_of_a_message() for _ in range(5)]
            work: Any = dist.all_reduce(torch.ones(7_500_000), async_op=True)
            [arrived] = work.get_future().wait()  # hooks of DDP continue with it
            assert arrived[0] == arrived[-1] == 2
            links.is_free = True
            assert links.reserve(Collective("all-gather", 2**30, 2, 1), 0.0)[2] == 0
        finally:
            dist.destroy_process_group()
    assert 0.03 <= min(spent) < 0.04  # of a process whose other threads take time, too
    assert 1e-11 < processor_seconds() < 1e-8


def test_links_inside_and_between_hosts() -> None:
    """As the planner has them: a group whose ranks are on several hosts waits for the slower links."""
    links = Links(parse_cluster("16xH100"))

    class Group:
        def seconds(self, ranks: int, stride: int, what: str = "all-gather", times: int = 1) -> float:
            sending, latency = links.seconds(Collective(what, 2**30, ranks, stride, times))
            return max(sending) + latency

    of = Group().seconds
    inside, across, strided = of(8, 1), of(16, 1), of(2, 8)
    assert inside == pytest.approx(2**30 * 7 / 8 / (450e9 * 0.75), rel=0.02)
    assert strided == pytest.approx(2**30 / 2 / (50e9 * 0.75), rel=0.02)
    assert across > inside
    assert of(8, 1, "all-reduce", 2) == pytest.approx(2 * inside, rel=0.02)
    for what in ("all-to-all", "all-gather"):  # what a rank keeps of an exchange is on no link
        assert Collective(what, 2**30, 8, 1).sent(parse_cluster("8xH100"))[0] == pytest.approx(2**30 * 7 / 8)
    assert of(1, 1) == 0
    links.is_free = True
    assert of(16, 1) == 0
