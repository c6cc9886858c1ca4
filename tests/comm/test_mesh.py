"""The mesh and the process groups that it holds."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.checkpoint import full_state_dict
from fullshard.comm.device import current
from fullshard.comm.mesh import _submesh, init_mesh
from fullshard.core.errors import ConfigError, NonFiniteError
from fullshard.features import fully_shard, shard_model
from tests.distributed import end_workers, run_ranks


def _threads_of_gloo() -> int:
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))


def _train_once(store: Path, *, is_part: bool) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if is_part:
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"])
    else:
        shard_model(model, unit_modules=list(model))
    model(torch.ones(1, 4)).sum().backward()
    del model
    gc.collect()
    return _threads_of_gloo()


def _train_in_turn(stores: list[Path]) -> list[list[int]]:
    ways = (False, True)
    return [[_train_once(store.with_suffix(f".{part}"), is_part=part) for store in stores] for part in ways]


def test_groups_end_with_the_world_that_they_were_made_in(tmp_path: Path) -> None:
    stores = [tmp_path / str(number) for number in range(4)]
    for threads in itertools.chain.from_iterable(run_ranks(_train_in_turn, 2, stores)):
        # One generation is let go as the next mesh is made; each has at least four groups.
        assert threads[0] >= 4
        assert threads[-1] == threads[1]


def _meshes() -> bool:
    return init_mesh() is init_mesh() and init_mesh(shard_size=1) is not init_mesh()


def test_a_mesh_is_made_once() -> None:
    assert run_ranks(_meshes, 2) == [True, True]


def _groups_of(strategy: str) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    shard_model(nn.Linear(4, 4), unit_modules=[], strategy=strategy)
    return len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize(("strategy", "groups"), [("FULL_SHARD", 3), ("NO_SHARD", 2)])
def test_no_group_is_made_that_the_strategy_has_no_use_for(strategy: str, groups: int) -> None:
    """Each has threads and memory: one for messages, one or two to gather and reduce, one for replicas."""
    assert run_ranks(_groups_of, 2, strategy) == [groups] * 2


def _train_on(ranks: list[Any]) -> None:
    """On a mesh that lists its ranks in an order of its own, whatever their groups make of that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    reference = copy.deepcopy(model)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-torch.tensor(ranks).ndim :])
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
    size = dist.get_world_size()
    for step in range(3):
        torch.manual_seed(1 + step)
        inputs = torch.rand(size, 4, 5, dtype=torch.float64)
        model(inputs[dist.get_rank()]).square().mean().backward()
        for rank in range(size):
            (reference(inputs[rank]).square().mean() / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(model, rank0_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [[1, 0], pytest.param([3, 1, 0, 2], marks=pytest.mark.full), [[1, 0], [3, 2]]])
def test_ranks_in_another_order(ranks: list[Any]) -> None:
    end_workers()
    run_ranks(_train_on, torch.tensor(ranks).numel(), ranks)


def _blame(ranks: list[list[int]], culprit: int) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters())
    (model(torch.ones(2, 8)).sum() * (float("nan") if dist.get_rank() == culprit else 1.0)).backward()
    with pytest.raises(NonFiniteError, match=f"they came from rank {culprit};"):
        optimizer.step()


def test_ranks_have_their_own_numbers_wherever_a_mesh_puts_them() -> None:
    """Not those of their places, of which 1 is rank 2's."""
    end_workers()
    run_ranks(_blame, 4, [[0, 2], [1, 3]], 2)


def _made_by_their_ranks() -> list[Any]:
    """The device that the default group is bound to while neighbors make a group, and after it."""
    world, new_group, found = dist.group.WORLD, dist.new_group, list[Any]()
    assert world is not None
    mesh, bound = init_mesh(), torch.device("cuda", 0)
    world.bound_device_id = bound

    def make(*arguments: Any, **options: Any) -> Any:
        found.append(world.bound_device_id)
        return new_group(*arguments, **options)

    dist.new_group = make
    try:
        if dist.get_rank() < 2:  # the others do something else
            mesh.neighbors(2)
    finally:
        dist.new_group = new_group
    return [*found, world.bound_device_id == bound]


def test_neighbors_make_their_group_without_the_rest_of_the_world() -> None:
    """Torch splits groups off a default group that is bound to a device, which takes all of its ranks with NCCL."""
    assert run_ranks(_made_by_their_ranks, 4) == [[None, True]] * 2 + [[True]] * 2


def _refuse() -> None:
    with pytest.raises(ConfigError, match=r"list their ranks in different orders(?s:.*)ascending"):
        mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicate", "shard"))
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]])
    dist.barrier()  # or a rank that is done closes its end while others still connect
    with pytest.raises(ConfigError, match="mesh_dim_names"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)


def test_replicas_whose_shards_would_differ_are_refused() -> None:
    end_workers()
    run_ranks(_refuse, 4)


def _messages_without_a_group_for_the_host() -> list[Any]:
    group = dist.new_group([0, 1], backend="cuda:gloo")  # as in a job that began with init_process_group("nccl")
    if dist.get_rank() == 2:
        return []
    part = _submesh(DeviceMesh.from_group(group, "cpu"), torch.device("cuda", 0), only_replicates=False)
    assert part.shard_group is group is part.world_group
    return part.all_gather_object(dist.get_rank())


def test_a_part_of_the_world_whose_groups_send_nothing_from_the_host() -> None:
    assert run_ranks(_messages_without_a_group_for_the_host, 3) == [[0, 1], [0, 1], []]


@pytest.mark.parametrize(
    ("environ", "was_used", "expected"),
    [({"LOCAL_RANK": "1"}, False, 1), ({"LOCAL_RANK": "1"}, True, 0), ({"LOCAL_RANK": "2"}, False, 0), ({}, False, 0)],
)
def test_a_rank_takes_the_device_that_the_launcher_says(
    environ: dict[str, str], was_used: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's meshes do: unless the script has taken one, or there is none with that number."""
    chosen = [0]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: was_used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    assert current() == torch.device("cuda", expected) and chosen[-1] == expected
