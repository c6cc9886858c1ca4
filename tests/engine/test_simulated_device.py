"""The simulated accelerator does what CUDA says, so that what the engine is shown by it counts."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm.mesh import init_mesh
from fullshard.features import shard_model
from tests.simulated.process import on_device


def each_order(program: Callable[[], Any]) -> dict[str, Any]:
    """What a program finds in each order of the streams."""
    from tests.simulated.device import ORDERS, begin

    found = {}
    for order in ORDERS:
        begin(order, seed=1)
        found[order.name] = program()
    return found


def filled(value: float) -> torch.Tensor:
    return torch.full((8,), value, device="simulated")


# -- kernels ----------------------------------------------------------------------------------------------------


def _layers() -> dict[str, bool]:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(9, 16), nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Flatten(), nn.Linear(96, 5)
    )
    tokens, target = torch.randint(0, 9, (6, 4)), torch.randint(0, 5, (6,))

    def train(model: nn.Module, place: str) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(tokens.to(place)), target.to(place))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return losses + [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train(copy.deepcopy(plain), "cpu")
    return each_order(lambda: all(map(torch.equal, train(copy.deepcopy(plain).to("simulated"), "simulated"), expected)))


def test_kernels_are_the_cpus_bit_for_bit() -> None:
    assert set(on_device(_layers).values()) == {True}


def _random_numbers() -> dict[str, list[float]]:
    def draw() -> list[float]:
        torch.manual_seed(3)
        side = torch.Stream("simulated")
        first = torch.rand(4, device="simulated")
        with side:
            second = nn.functional.dropout(torch.ones(64, device="simulated"), 0.5).sum()
        state = torch.get_device_module("simulated").get_rng_state()
        third = torch.randn(2, device="simulated")
        torch.get_device_module("simulated").set_rng_state(state)
        assert torch.equal(third, torch.randn(2, device="simulated"))
        torch.accelerator.synchronize()
        return [*first.tolist(), second.item(), *third.tolist()]

    return each_order(draw)


def test_random_numbers_are_those_of_the_launch() -> None:
    values = list(on_device(_random_numbers).values())
    assert all(value == values[0] for value in values)


def _values_the_host_needs() -> list[Any]:
    from tests.simulated.device import host_waits

    x = torch.tensor([3.0, -1.0, 2.0], device="simulated")
    with host_waits() as waits:
        found = [x[x > 0].tolist(), torch.nonzero(x > 0).flatten().tolist(), torch.equal(x, x), bool((x > 2).any())]
    return [*found, sum(waits.values())]


def test_what_depends_on_values_waits_for_them() -> None:
    assert on_device(_values_the_host_needs) == [[3.0, 2.0], [0, 2], True, True, 7]


# -- order ------------------------------------------------------------------------------------------------------


def _missing_waits() -> dict[str, dict[str, float]]:
    def program() -> dict[str, float]:
        found = {}
        for before, after in ((True, True), (False, True), (True, False)):
            side, x = torch.Stream("simulated"), filled(1.0) * 3
            if before:
                side.wait_stream(torch.accelerator.current_stream())
            with side:
                y = x * 2
            if after:
                torch.accelerator.current_stream().wait_stream(side)
            found[f"before {before}, after {after}"] = (y + 1).sum().item()
        return found

    return each_order(program)


def test_a_missing_wait_gives_a_wrong_number() -> None:
    found = on_device(_missing_waits)
    assert {values["before True, after True"] for values in found.values()} == {56.0}
    assert found["EAGER_SIDE"]["before False, after True"] != 56.0
    assert found["LAZY"]["before True, after False"] != 56.0
    assert found["EAGER_COMPUTE"]["before True, after False"] != 56.0


def _copies() -> list[Any]:
    from tests.simulated.device import host_waits, pending

    host = torch.empty(8, pin_memory=True).fill_(1)
    with host_waits() as waits:
        late = torch.empty(8, device="simulated").copy_(host, non_blocking=True)
        host.fill_(7)  # too early
        back = torch.empty(8, pin_memory=True).copy_(late, non_blocking=True)
    found: list[Any] = [host.is_pinned(), dict(waits), bool(back.isnan().all())]
    torch.accelerator.synchronize()
    found += [back.tolist()[0], pending()]
    with host_waits() as waits:
        late.copy_(torch.ones(8), non_blocking=True)  # not pinned
        torch.empty(8).copy_(late, non_blocking=True)
        late.copy_(torch.empty(8, pin_memory=True), non_blocking=False)
        late.copy_(torch.ones(8, dtype=torch.float64).pin_memory(), non_blocking=True)  # cast by the host first
    found.append(sorted(key.split(" in ")[0] for key in waits.elements()))
    kept = torch.empty(8, pin_memory=True).fill_(5)
    late.copy_(kept, non_blocking=True)
    del kept  # its memory waits for the copy
    others = [torch.empty(8, pin_memory=True).fill_(6) for _ in range(8)]
    return [*found, late.tolist()[0], len(others)]


def test_copies_block_as_on_cuda() -> None:
    blocking = ["copy to the device"] * 3 + ["copy to the host"]
    assert on_device(_copies) == [True, {}, True, 7.0, 0, blocking, 5.0, 8]


def _freed_while_read() -> dict[str, dict[str, float]]:
    def program() -> dict[str, float]:
        found = {}
        for way in ("nothing", "wait", "record_stream"):
            side, x = torch.Stream("simulated"), filled(1.0)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                y = x * 2
            if way == "wait":
                torch.accelerator.current_stream().wait_stream(side)
            if way == "record_stream":
                x.record_stream(side)
            del x
            assert filled(5.0).sum().item() == 40  # takes the memory
            side.synchronize()
            found[way] = y.sum().item()
        return found

    return each_order(program)


def test_freed_memory_is_overwritten_by_what_its_stream_allocates_next() -> None:
    found = on_device(_freed_while_read)
    assert all(values["wait"] == values["record_stream"] == 16 for values in found.values())
    assert found["LAZY"]["nothing"] != 16


def _statistics() -> list[Any]:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    reserved = torch.accelerator.memory_reserved()
    tensor = torch.empty(2**20, dtype=torch.uint8, device="simulated")
    found = [torch.accelerator.memory_allocated() - before, torch.accelerator.memory_reserved() - reserved]
    storage = tensor.untyped_storage()
    tensor.fill_(3)
    storage.resize_(0)
    found.append(torch.accelerator.memory_allocated() - before)
    storage.resize_(2**20)
    segments = torch.accelerator.memory_stats()["segment.all.allocated"]
    found += [torch.accelerator.memory_allocated() - before, int(tensor[0].item())]  # poison, not what was there
    big = torch.empty(2**21, dtype=torch.uint8, device="simulated")
    found.append(torch.accelerator.memory_stats()["segment.all.allocated"] - segments)
    del big, tensor, storage
    torch.accelerator.empty_cache()
    found += [torch.accelerator.max_memory_allocated() - before, torch.accelerator.memory_reserved() <= reserved]
    return found


def test_statistics_count_as_torchs_allocators_do() -> None:
    mib = 2**20
    assert on_device(_statistics) == [mib, 2 * mib, 0, mib, 255, 1, 3 * mib, True]


def _reaches_in() -> None:
    ctypes.string_at(filled(1.0).data_ptr(), 4)


def test_the_cpu_cannot_reach_its_memory() -> None:
    with pytest.raises(RuntimeError, match="ended its process with code -11"):
        on_device(_reaches_in)


def _fails() -> str:
    table = torch.zeros(3, 2, device="simulated")
    torch.index_select(table, 0, torch.tensor([5], device="simulated"))
    with pytest.raises(RuntimeError) as caught:
        table.sum().item()
    with pytest.raises(RuntimeError):
        filled(1.0)
    return str(caught.value)


def test_a_kernel_that_fails_is_told_by_what_comes_later() -> None:
    assert "the device has failed: aten::index_select" in on_device(_fails)


def _freed() -> str:
    x = filled(1.0)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        x.add_(1)
    return str(caught.value)


def test_a_kernel_on_freed_memory_is_an_error() -> None:
    assert "on memory that has been freed: 32 bytes of a storage of 0" in on_device(_freed)


def _asks() -> int:
    filled(1.0).add_(1).add_(1)
    event = torch.accelerator.current_stream().record_event()
    asked = 1
    while not event.query():
        asked += 1
    return asked


def test_a_query_is_answered_in_the_end() -> None:
    assert 2 < on_device(_asks) < 10


# -- collectives ------------------------------------------------------------------------------------------------


def _collective_values() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for place in (torch.device("cpu"), torch.device("simulated", rank)):
        own = torch.arange(2.0 * size, device=place) + 10 * rank
        gathered, part = torch.empty(2 * size * size, device=place), torch.empty(2, device=place)
        dist.all_gather_into_tensor(gathered, own)
        dist.reduce_scatter_tensor(part, own.clone())
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        first = own.clone()
        dist.broadcast(first, src=0)
        turned = torch.empty_like(own)
        dist.all_to_all_single(turned, own)
        listed = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(listed, own)
        found.append([t.cpu().tolist() for t in (gathered, part, largest, first, turned, *listed)])
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    dist.barrier()
    assert found[0] == found[1] and everybody == [{"rank": r} for r in range(size)]
    return found[0]


def _values_on(size: int) -> dict[str, Any]:
    from tests.simulated.group import run_ranks

    return each_order(lambda: run_ranks(_collective_values, size))


def test_collectives_are_right_in_every_order() -> None:
    found = on_device(_values_on, 2)
    gathered = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    listed = [gathered[:4], gathered[4:]]
    first = [gathered, [10.0, 12.0], gathered[4:], gathered[:4], [0.0, 1.0, 10.0, 11.0], *listed]
    second = [gathered, [14.0, 16.0], gathered[4:], gathered[:4], [2.0, 3.0, 12.0, 13.0], *listed]
    assert all(values == [first, second] for values in found.values())


def _waits_of_collectives() -> list[Any]:
    from tests.simulated.device import host_waits

    rank = dist.get_rank()
    own = torch.ones(4, device=f"simulated:{rank}") * (rank + 1)
    full = torch.empty(8, device=own.device)
    with host_waits() as waits:
        work = dist.all_gather_into_tensor(full, own, async_op=True)
        del own  # the group keeps it until somebody waits
        torch.zeros(4, device=full.device)  # or this would take its memory
        early = full + 0
        work.wait()
        right = full + 0
    return [dict(waits), early.tolist() == right.tolist(), right.tolist()]


def _waits() -> Any:
    from tests.simulated.group import run_ranks

    return run_ranks(_waits_of_collectives, 2)


def test_wait_orders_streams_and_does_not_block_the_host() -> None:
    right = [1.0] * 4 + [2.0] * 4
    assert on_device(_waits) == [[{}, False, right]] * 2


def _crossed() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x = torch.ones(2, device=f"simulated:{dist.get_rank()}")
    for group in groups if dist.get_rank() else groups[::-1]:
        dist.all_reduce(x, group=group)
    x.sum().item()


def _unequal() -> None:
    x = torch.ones(2 + dist.get_rank(), device=f"simulated:{dist.get_rank()}")
    dist.all_reduce(x)
    x.sum().item()


def _left() -> None:
    if dist.get_rank() == 0:
        torch.ones(1, device="simulated").sum().item()
    else:
        dist.barrier()


def _error_of(function: Callable[[], None]) -> str:
    from tests.simulated.group import run_ranks

    with pytest.raises(RuntimeError) as caught:
        run_ranks(function, 2)
    return str(caught.value)


def test_a_deadlock_is_found_with_its_cause() -> None:
    message = on_device(_error_of, _crossed)
    assert "deadlock: every rank waits" in message
    for rank in (0, 1):
        assert f"rank {rank} waits for its computing stream, which waits for stream" in message
    assert "all_reduce of 2 Float on communicator" in message and "has not come" in message


def test_ranks_that_enter_different_collectives_are_told() -> None:
    message = on_device(_error_of, _unequal)
    assert "member 1 enters all_reduce of 3 Float where another has entered all_reduce of 2 Float" in message


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    message = on_device(_error_of, _left)
    assert "rank 1 waits for its collective between hosts, in barrier" in message
    assert "member 0 was not launched" in message


def _devices_of_meshes() -> list[tuple[str, str]]:
    from tests.simulated.group import run_ranks

    def devices() -> tuple[str, str]:
        meshes = [init_mesh(device_mesh=init_device_mesh(kind, (2,))) for kind in ("cpu", "simulated")]
        return meshes[0].device.type, meshes[1].device.type

    found: list[tuple[str, str]] = run_ranks(devices, 2)
    return found


def test_a_mesh_of_cpus_is_one_although_there_is_an_accelerator() -> None:
    """As under torch's `fully_shard`."""
    assert on_device(_devices_of_meshes) == [("cpu", "simulated")] * 2


def _index_left_out() -> list[str]:
    """A device named by its kind alone is the current one, to all that compares devices."""
    model = shard_model(nn.Linear(8, 8), unit_modules=[], device=torch.device("simulated"))
    model.to("simulated")
    model.to("simulated:0").float()
    return [str(init_mesh(device=torch.device(kind)).device) for kind in ("simulated", "simulated:0", "cpu", "meta")]


def test_a_device_may_be_named_by_its_kind() -> None:
    assert on_device(_index_left_out) == ["simulated:0", "simulated:0", "cpu", "meta"]
