"""The mesh and the process groups that it holds."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.mesh import init_mesh
from fullshard.engine import shard_model
from tests.distributed import run_ranks


def _threads_of_gloo() -> int:
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))


def _train_once(store: Path) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_model(model, unit_modules=list(model))
    model(torch.ones(1, 4)).sum().backward()
    del model
    gc.collect()
    return _threads_of_gloo()


def _train_in_turn(stores: list[Path]) -> list[int]:
    return [_train_once(store) for store in stores]


def test_groups_end_with_the_world_that_they_were_made_in(tmp_path: Path) -> None:
    for threads in run_ranks(_train_in_turn, 2, [tmp_path / str(number) for number in range(4)]):
        # One generation is let go as the next mesh is made; each has at least four groups.
        assert threads[0] >= 4
        assert threads[-1] == threads[1]


def _meshes() -> bool:
    return init_mesh() is init_mesh() and init_mesh(shard_size=1) is not init_mesh()


def test_a_mesh_is_made_once() -> None:
    assert run_ranks(_meshes, 2) == [True, True]
