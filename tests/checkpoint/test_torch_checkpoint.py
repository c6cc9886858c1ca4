"""Checkpoints by torch's own functions: whole at any world size, in both directions with torch's `fully_shard`.

pytest tests/checkpoint/test_torch_checkpoint.py
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from fullshard.core.boxes import boxes
from fullshard.core.errors import LifecycleError
from fullshard.core.imports import Replaced
from fullshard.core.layout import Interval
from fullshard.features import ShardedTensor, fully_shard
from fullshard.features import optimizer_state as of_state
from fullshard.features.torch_tools import torch_private
from tests.distributed import preload, run_ranks

preload("torch.distributed.checkpoint.state_dict")

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Model(nn.Module):
    """Shapes that no number of ranks divides, three dims, one element, something frozen, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 16), nn.Linear(16, 5)
        self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.tensor([1.5]))
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.frozen = nn.Parameter(torch.randn(11), requires_grad=False)
        self.register_buffer("counts", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.second(self.first(x).relu())) * self.scale
        return out @ self.cube.sum(0) + self.frozen.sum()


def make(shard: Callable[..., Any], *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    for module in (model.first, model.second, model):
        shard(module)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def trained(shard: Callable[..., Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(shard)
    for step in range(2):
        torch.manual_seed(10 + step)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: Any) -> Any:
    """Copies, with whole tensors in place of DTensors."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return whole(list(get_state_dict(model, optimizer)))


def assert_same(left: Any, right: Any) -> None:
    """The same bits."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):  # torch makes lists of tuples in groups that rank 0 sends
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


# -- dcp.save and dcp.load ------------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[..., Any]] = {"fullshard": fully_shard, "torch": torchs_fully_shard}


def save(engine: str, folder: str) -> Any:
    model, optimizer = trained(ENGINES[engine])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return everything(model, optimizer)


def load(engine: str, folder: str) -> Any:
    model, optimizer = make(ENGINES[engine], seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("saved_by", "ranks", "loaded_by", "other_ranks"),
    [
        ("fullshard", 2, "fullshard", 3),
        ("fullshard", 3, "fullshard", 1),
        ("fullshard", 2, "torch", 3),
        ("torch", 2, "fullshard", 3),
        ("fullshard", 1, "torch", 2),
        ("torch", 3, "fullshard", 2),
    ],
)
def test_round_trips(tmp_path: Path, saved_by: str, ranks: int, loaded_by: str, other_ranks: int) -> None:
    saved = run_ranks(save, ranks, saved_by, str(tmp_path))
    loaded = run_ranks(load, other_ranks, loaded_by, str(tmp_path))
    for each in (*saved, *loaded):
        assert_same(each, saved[0])


_WAYS = ("async", "sync")


def save_plainly(folder: str) -> Any:
    """As people write it who have no optimizer to save, in the background too."""
    model, _ = trained(fully_shard)
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/async").result()  # type: ignore[union-attr]
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/sync")
    here, _ = multiprocessing.Pipe()  # by which `AsyncCheckpointerType.PROCESS` sends it to the process that saves
    with pytest.raises(LifecycleError, match="cannot pickle"):
        here.send({"model": model.state_dict()})
    expected = whole(model.state_dict())
    for name in _WAYS:
        other, _ = make(fully_shard, seed=1)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        assert_same(dict(whole(other.state_dict())), dict(expected))  # it is loaded into the parameters themselves
    return expected


def test_other_ways_to_save(tmp_path: Path) -> None:
    expected, _ = run_ranks(save_plainly, 2, str(tmp_path))
    for name in _WAYS:
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        assert_same(torch.load(tmp_path / f"{name}.pt")["model"], dict(expected))


def save_as_hugging_face(folder: str) -> list[Any]:
    """As torchtitan does it for its last step: a rank's part of a tensor that ends within a row is several boxes."""
    model: Any = trained(fully_shard)[0]
    expected = whole(model.state_dict())
    index = {name: 1 + number % 2 for number, name in enumerate(expected)}
    options: list[dict[str, Any]] = [
        {},
        {"fqn_to_index_mapping": index},
        {"fqn_to_index_mapping": index, "enable_consolidation": True},
    ]
    for number, each in enumerate(options):
        path = f"{folder}/{number}"
        dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(path, save_distributed=True, **each))
        for make_other in (fully_shard, torchs_fully_shard):
            other, _ = make(make_other, seed=1)
            state = other.state_dict()
            dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
            assert_same(dict(whole(state)), dict(expected))
    return [len(list(parameter.boxes())) for parameter in model.parameters()]


def test_the_hugging_face_writer_keeps_every_box(tmp_path: Path) -> None:
    boxes_of = run_ranks(save_as_hugging_face, 2, str(tmp_path))
    assert max(number for of_rank in boxes_of for number in of_rank) > 1, "every part is one box: this shows nothing"
    files = {path.name for path in (tmp_path / "2").glob("*.safetensors")}
    assert files == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


# -- every option ---------------------------------------------------------------------------------------------------


def check_options() -> None:
    model, optimizer = trained(fully_shard)
    expected_model, expected_optimizer = everything(model, optimizer)
    rank = dist.get_rank()

    full = get_model_state_dict(model, options=FULL)
    assert_same(dict(full), dict(expected_model))
    assert_same(get_optimizer_state_dict(model, optimizer, options=FULL), expected_optimizer)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert_same(dict(get_model_state_dict(model, options=on_rank_0)), dict(expected_model) if rank == 0 else {})
    moved = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, ShardedTensor) for name, value in moved.items() if name != "counts")
    assert_same(dict(whole(moved)), dict(expected_model))
    trainable = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert trainable.keys() == expected_model.keys() - {"frozen"}
    inner = get_model_state_dict(model, submodules={model.get_submodule("first")})
    assert inner.keys() == {"first.weight", "first.bias"}

    for options in (FROM_RANK_0, FULL):
        other, other_optimizer = make(fully_shard, seed=1)
        has = rank == 0 or options is FULL
        given = expected_model.copy() if has else {}
        set_model_state_dict(other, given, options=options)
        state = whole(expected_optimizer) if has else {}
        set_optimizer_state_dict(other, other_optimizer, state, options=options)
        assert_same(everything(other, other_optimizer), [expected_model, expected_optimizer])
        assert all(isinstance(v, ShardedTensor) for s in other_optimizer.state.values() for v in s.values() if v.dim())
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    other, other_optimizer = make(fully_shard, seed=1)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    assert "state.first.weight.exp_avg" in flattened
    set_optimizer_state_dict(other, other_optimizer, flattened, options=flat)
    assert_same(everything(other, other_optimizer)[1], expected_optimizer)
    part = {name: value for name, value in expected_model.items() if name != "scale"}
    set_model_state_dict(other, part.copy(), options=StateDictOptions(full_state_dict=True, strict=False))
    loaded = whole(other.state_dict())
    assert_same({name: loaded[name] for name in part}, part)


@pytest.mark.filterwarnings("ignore:Getting submodules:FutureWarning")
def check_methods_of_torch_itself() -> None:
    """torch hangs its functions onto the objects, and then calls the classes' own by name: `state_dict(self=...)`."""
    found = []
    for shard in (fully_shard, torchs_fully_shard):
        model, optimizer = trained(shard)
        _patch_model_state_dict(model, options=FULL)
        _patch_optimizer_state_dict(model, optimizers=optimizer, options=FULL)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        other, other_optimizer = make(shard, seed=3)
        _patch_model_state_dict(other, options=FULL)
        _patch_optimizer_state_dict(other, optimizers=other_optimizer, options=FULL)
        other.load_state_dict(whole(states["model"]))
        other_optimizer.load_state_dict(whole(states["optimizer"]))
        assert_same({"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}, states)
        found.append(states)
    assert_same(*found)
    names = [*vars(torch_private).values(), *vars(of_state).values()]
    places = [place for place in names if isinstance(place, Replaced)]
    assert len(places) > 5
    for place in places:
        function = getattr(place.owner, place.name)
        ours = inspect.signature(function, follow_wrapped=False).parameters
        theirs = inspect.signature(place.torchs).parameters
        assert function is not place.torchs
        named = [name for name, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        assert named == list(theirs)[: len(named)], place.name


def test_methods_that_torch_replaces_itself() -> None:
    run_ranks(check_methods_of_torch_itself, 2)


def test_every_option_of_a_state_dict() -> None:
    run_ranks(check_options, 2)


# -- boxes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (3, 5, 2), (1, 4, 1, 3), (2, 3, 2, 2)])
def test_an_interval_is_few_boxes(shape: tuple[int, ...]) -> None:
    whole_numel = torch.Size(shape).numel()
    flat = torch.arange(whole_numel)
    for start in range(whole_numel + 1):
        for stop in range(start, whole_numel + 1):
            found = list(boxes(shape, Interval(start, stop)))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts: list[torch.Tensor] = []
            for box in found:
                part = flat.view(shape)
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                assert box.start == sum(p.numel() for p in parts) and math.prod(box.sizes) == part.numel()
                parts.append(part.reshape(-1))
            assert torch.equal(torch.cat([*parts, flat[:0]]), flat[start:stop])
