"""`shard_placement_fn` that gives `Shard(0)`: each rank has the rows that torch's `fully_shard` gives it.

pytest tests/engine/test_row_placement.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import PlacementError
from fullshard.features import fully_shard
from tests.distributed import run_ranks
from tests.traps import batch, rank_and_size

WIDTH = 6


class Part(nn.Module):
    """Rows that no number of ranks divides, fewer of them than ranks, three dims, none for some."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 5), nn.LayerNorm(5)
        self.down = nn.Linear(5, WIDTH)
        self.cube, self.single = nn.Parameter(torch.randn(3, 2, WIDTH)), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.norm(self.up(x)).tanh()) * self.cube.mean((0, 1)) + self.single
        return out


class Model(nn.Module):
    """A table that is tied to the head, two parts, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight
        self.get_parameter("parts.1.up.bias").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for part in self.parts:
            x = part(x)
        out: torch.Tensor = self.head(x)
        return out


def rows(_parameter: nn.Parameter) -> Shard:
    return Shard(0)


def make(entry: Any = fully_shard, *, meta: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Model()
    if entry is fully_shard:
        options.setdefault("shard_placement_fn", rows)
    for unit in (*model.parts, model):
        entry(unit, **options)
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rank, _ = rank_and_size()
    x = batch(step, rank, 4, 3).abs().mul(3).long() % 7
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def assert_alike(own: Any, others: Any, what: str) -> None:
    """Two DTensors: placements, and what each rank has of them."""
    assert own.placements == others.placements, what
    assert (own.shape, own.dtype, own.stride()) == (others.shape, others.dtype, others.stride()), what
    assert own.to_local().shape == own._local_tensor.shape == others.to_local().shape, what
    torch.testing.assert_close(own.to_local(), others.to_local(), msg=lambda text: f"{what}: {text}")


def assert_models_alike(model: nn.Module, reference: nn.Module) -> None:
    for (name, own), others in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_alike(own.detach(), others.detach(), name)
        assert (own.grad is None) == (others.grad is None), name
        if own.grad is not None:
            assert_alike(own.grad, others.grad, f"gradient of {name}")


def check_as_torch(options: dict[str, Any]) -> None:
    _, size = rank_and_size()
    mesh = options.pop("mesh", (size,))
    options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    foreach = options.pop("foreach", True)
    offload: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if options.pop("offloads", False) else {}
    )
    model, reference = make(**options, **offload), make(torch_fully_shard, **options)
    assert_models_alike(model, reference)
    both = (model, reference)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1, foreach=foreach) for m in both]
    for step in range(3):
        for part in range(2):  # two micro-batches, of which the first is reduced in one step and not in the others
            for each in both:
                each.set_requires_gradient_sync(part == 1 or step == 1)
            losses = [loss_of(m, 2 * step + part) for m in both]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        assert_models_alike(model, reference)
        norms: list[Any] = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in both]
        torch.testing.assert_close(*(norm.full_tensor() for norm in norms))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_models_alike(model, reference)
    for own, others in zip(model.parameters(), reference.parameters(), strict=True):
        state, wanted = (o.state[p] for o, p in zip(optimizers, (own, others), strict=True))
        for key in wanted.keys() - {"step"}:
            assert_alike(state[key], wanted[key], key)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (2, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "reshard_after_forward": False}),
        (3, {"foreach": False}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(4, {"mesh": (2, 2)}, marks=pytest.mark.full),
        pytest.param(2, {"offloads": True}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("collectives", ["", "gloo"])
def test_local_parts_are_torchs(
    ranks: int, options: dict[str, Any], collectives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if collectives:
        monkeypatch.setenv("FULLSHARD_COMM", collectives)
    run_ranks(check_as_torch, ranks, options)


def check_tiles() -> None:
    """Tensor parallelism beneath: rows of columns, and rows of rows, which are torch's `_StridedShard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded(entry: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return entry(model, mesh=mesh["dp"], **options)

    model, reference = sharded(fully_shard, shard_placement_fn=rows), sharded(torch_fully_shard)
    assert_models_alike(model, reference)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        x = batch(step, mesh.get_local_rank("dp"), 4, WIDTH).float()
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
        assert_models_alike(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        assert_models_alike(model, reference)
    packed = nn.Linear(WIDTH, 8, bias=False)
    placed = distribute_tensor(packed.weight.detach(), mesh["tp"], [_StridedShard(0, split_factor=2)])
    packed.weight = nn.Parameter(placed)
    with pytest.raises(PlacementError, match=r"packed matrices \(8, 6\)"):
        fully_shard(packed, mesh=mesh["dp"], shard_placement_fn=rows)


@pytest.mark.full
def test_rows_of_tiles_are_torchs() -> None:
    run_ranks(check_tiles, 4)


def check_computing() -> None:
    """What a script does with them is as with a `Shard(0)` DTensor of torch's, and of the whole."""
    rank, size = rank_and_size()
    made: Any
    model, plain = make(), make(lambda *_, **__: None)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        whole = other.detach()
        mesh, placements = own.device_mesh, own.placements
        parts = whole.chunk(size)
        mine = parts[rank] if rank < len(parts) else whole[:0]
        assert torch.equal(own.to_local(), mine) and torch.equal(own.full_tensor(), whole)
        for made in (own * 2, own.detach(), own.clone(), torch.zeros_like(own), own.new_empty(own.shape), own[:]):
            assert made.placements == placements and made.to_local().shape == mine.shape
        for given in (distribute_tensor(whole * 3, mesh, placements), DTensor.from_local(mine * 3, mesh, placements)):
            if given.shape == own.shape:  # `from_local` takes it that all ranks have as many rows
                torch.testing.assert_close((own.detach() + given).full_tensor(), whole * 4)
                torch.testing.assert_close((given + own.detach()).full_tensor(), whole * 4)
                with torch.no_grad():
                    own.copy_(given)
                assert torch.equal(own.to_local(), mine * 3)
                copied: Any = given.clone()
                torch._foreach_add_([copied], [own.detach()])
                assert torch.equal(copied.full_tensor(), whole * 6)
                own.grad = given
                assert torch.equal(own.grad.to_local(), mine * 3)
                own.grad = None
            with torch.no_grad():
                own.to_local().copy_(mine)  # it is the memory that optimizers update
        assert torch.equal(own.full_tensor(), whole)
        assert torch.equal(own.redistribute(placements=[Replicate()]).to_local(), whole)
        assert torch.equal(own[-1:].full_tensor(), whole[-1:]) and torch.equal(
            own.view(-1).full_tensor(), whole.view(-1)
        )
        all_rows, none = own.split([len(whole), 0])
        assert torch.equal(all_rows.full_tensor(), whole) and none.shape == whole[:0].shape
        assert none.full_tensor().numel() == 0
        torch.testing.assert_close(own.norm().full_tensor(), whole.norm())
        if own.requires_grad:
            own.to_local().square().sum().backward()
            assert torch.equal(own.grad.to_local(), 2 * mine)


def test_what_is_computed_of_them() -> None:
    run_ranks(check_computing, 2)


def stepped(entry: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = make(entry, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    settings = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=settings),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=settings),
    }


def check_torchs_checkpoints(directory: Path) -> None:
    entries = {"own": fully_shard, "torch": torch_fully_shard}
    written = {name: stepped(entry) for name, entry in entries.items()}
    for saved, loaded in (("own", "torch"), ("torch", "own"), ("own", "own")):
        path = directory / f"{saved}-{loaded}"
        dcp.save(state_of(*written[saved]), checkpoint_id=path)
        model, optimizer = stepped(entries[loaded])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        reference, its = written["torch"]
        assert_models_alike(model, reference)
        for own, others in zip(model.parameters(), reference.parameters(), strict=True):
            if own.requires_grad:
                assert_alike(optimizer.state[own]["exp_avg"], its.state[others]["exp_avg"], "exp_avg")
    whole = {name: state_of(*one, full_state_dict=True) for name, one in written.items()}
    torch.testing.assert_close(whole["own"]["model"], whole["torch"]["model"])
    model, _ = stepped(fully_shard)
    with torch.no_grad():
        model.head.weight.zero_()
    set_model_state_dict(model, whole["own"]["model"], options=StateDictOptions(full_state_dict=True))
    assert_models_alike(model, written["torch"][0])


def test_torchs_checkpoints_both_ways(tmp_path: Path) -> None:
    run_ranks(check_torchs_checkpoints, 2, tmp_path)


def as_rows(name: str) -> Any:
    return {"rows": rows, "intervals": None, "both": lambda p: Shard(0) if p.ndim > 1 else None}[name]


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.requires_grad]
    return [tensor.full_tensor().detach() for tensor in (*model.parameters(), *moments)]


def check_saved(path: Path, placement: str) -> list[torch.Tensor]:
    model, optimizer = stepped(fully_shard, shard_placement_fn=as_rows(placement))
    save_checkpoint(path, model=model, optimizer=optimizer)
    return wholes(model, optimizer)


def check_loaded(path: Path, placement: str) -> list[torch.Tensor]:
    model, optimizer = stepped(fully_shard, shard_placement_fn=as_rows(placement))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(path, model=model, optimizer=optimizer)
    return wholes(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(("rows", 2), ("both", 3)), (("intervals", 3), ("rows", 2)), (("rows", 1), ("intervals", 2))]
)
def test_checkpoints_of_rows_and_of_intervals_are_one(
    tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    written = run_ranks(check_saved, saved[1], tmp_path / "checkpoint", saved[0])
    read = run_ranks(check_loaded, loaded[1], tmp_path / "checkpoint", loaded[0])
    torch.testing.assert_close(read[0], written[0], rtol=0, atol=0)


def check_meta(how: str) -> None:
    plain = make(lambda *_, **__: None)
    model = make(meta=True)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    if how == "empty":
        model.to_empty(device="cpu")
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                own.copy_(distribute_tensor(other.detach(), own.device_mesh, own.placements))
    else:
        if how == "distributed":
            own = model.state_dict()
            state = {n: distribute_tensor(v, own[n].device_mesh, own[n].placements) for n, v in state.items()}
        model.load_state_dict(state, assign=True)
    reference = make(torch_fully_shard)
    for each in (model, reference):
        loss_of(each, 0).backward()
    assert_models_alike(model, reference)


@pytest.mark.parametrize("how", ["empty", "assign", "distributed"])
def test_from_the_meta_device(how: str) -> None:
    run_ranks(check_meta, 2, how)


def check_refused() -> None:
    model, reference = make(shard_placement_fn=lambda p: Shard(-p.ndim)), make(torch_fully_shard)
    assert_models_alike(model, reference)
    assert make(shard_placement_fn=None).table.weight.placements != (Shard(0),)
    assert make(shard_placement_fn=lambda p: Shard(p.ndim - 1)).table.weight.placements != (Shard(0),)
    with pytest.raises(PlacementError, match=r"scale"):
        layer: Any = nn.Linear(2, 2)
        layer.scale = nn.Parameter(torch.ones(()))
        fully_shard(layer, shard_placement_fn=rows)


def test_what_else_is_asked_for() -> None:
    run_ranks(check_refused, 2)
