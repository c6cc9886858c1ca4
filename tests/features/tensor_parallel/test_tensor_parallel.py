"""Tensor parallelism beneath: parameters that are DTensors over an axis of their own, sharded over another.

pytest tests/features/tensor_parallel/test_tensor_parallel.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from typer.testing import CliRunner

import fullshard
import fullshard.api
from fullshard.checkpoint import (
    full_state_dict,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
    verify_checkpoint,
)
from fullshard.checkpoint.coded_state import coded_tensors
from fullshard.checkpoint.pretrained import load_pretrained
from fullshard.cli.main import app
from fullshard.core.errors import ConfigError, LifecycleError, NonFiniteError, WrapError
from fullshard.engine.step.plain_tensors import as_local
from fullshard.features.local_optimizers.coded import decode
from fullshard.features.torch_tools.install import describe_intervals
from tests.distributed import end_workers, preload, run_ranks

preload("typer")

DIM, WORDS, LENGTH = 12, 20, 8
RATE = 0.05


@pytest.fixture(autouse=True)
def _new_workers() -> None:
    """Torch remembers what it has computed with a mesh by its ranks, and so groups that are gone with the last test."""
    end_workers()


class Block(nn.Module):
    """Attention and a feed-forward, as Llama has them; the head size is 4."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, 16, bias=False) for _ in range(3))
        self.o = nn.Linear(16, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def attend(self, hidden: torch.Tensor) -> Any:
        q, k, v = (layer(hidden).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = hidden + self.attend(self.attention_norm(hidden))
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Words(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def build(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    return Words().to(dtype)


def parallelize(model: Any, mesh: DeviceMesh, *, sequence: bool = False) -> Any:
    """Split layers over the axis; with `sequence` norms work on a part of the sequence, as torch's own examples do."""
    if not sequence:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        for block in model.blocks:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
        return model
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=Shard(1)))
        rows = dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=Shard(1)))
        parallelize_module(
            block, mesh, {**columns, **rows, "attention_norm": SequenceParallel(), "norm": SequenceParallel()}
        )
    return model


def shard(model: Any, mesh: DeviceMesh, fully_shard: Any = fullshard.fully_shard, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def data(step: int, part: int, parts: int) -> torch.Tensor:
    """Tokens of 4 sequences, of which each of `parts` has a part."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
    return tokens.chunk(parts)[part]


def train(model: nn.Module, part: int, parts: int, *, steps: int = 2, norm: float | None = 0.3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        tokens = data(step, part, parts)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if norm is not None:
            losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def mean(losses: list[float], group: Any) -> list[float]:
    values = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(values, group=group)
    return (values / dist.get_world_size(group)).tolist()


def check_training(dp: int, tp: int, sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    plain = build()
    expected = train(plain, 0, 1)
    model = shard(parallelize(build(), mesh["tp"], sequence=sequence), mesh["dp"])
    print(fullshard.describe(model))
    part = mesh["dp"].get_local_rank()
    got = mean(train(model, part, dp), mesh["dp"].get_group())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = plain.get_parameter(name)
        assert parameter.shape == whole.shape, name
        torch.testing.assert_close(parameter.full_tensor(), whole.detach(), rtol=1e-8, atol=1e-10, msg=name)


def check_as_torchs(sequence: bool) -> None:
    """Mixed precision and norms of all orders are those of torch's `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = mesh["dp"].get_local_rank()
    policies: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    results = []
    for fully_shard, policy in (
        (torchs.fully_shard, torchs.MixedPrecisionPolicy),
        (fullshard.fully_shard, fullshard.MixedPrecisionPolicy),
    ):
        model = parallelize(build(torch.float32), mesh["tp"], sequence=sequence)
        if hasattr(torchs.FSDPModule, "finalize_backward"):
            # Since torch 2.15, its engine does not round gradients that a kernel computes in more bits than the
            # parameter has. Here only the norms have such a kernel.
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" not in name)
        shard(model, mesh["dp"], fully_shard, mp_policy=policy(**policies))
        results.append((train(model, part, 2, norm=None), [p.full_tensor() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.full
def test_mixed_precision_is_as_torchs_without_sequence_parallelism() -> None:
    run_ranks(check_as_torchs, 4, False)


def check_norms() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(), mesh["tp"], sequence=True), mesh["dp"])
    plain = build()
    tokens = data(0, 0, 1)
    F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    tokens = data(0, mesh["dp"].get_local_rank(), 2)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for order in (1.0, 2.0, 3.0, float("inf")):
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
        norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in model.parameters()], order)]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9, order))
        for norm in norms:
            torch.testing.assert_close(norm.full_tensor(), expected)
        for name, parameter in plain.named_parameters():
            gradient = model.get_parameter(name).grad
            torch.testing.assert_close(gradient.norm(order).full_tensor(), parameter.grad.norm(order), msg=name)
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad, msg=name)
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        for result, expected in (
            (gradient.sum(), parameter.grad.sum()),
            (gradient.mean(0), parameter.grad.mean(0)),
            (gradient[:3], parameter.grad[:3]),
            (gradient.view(-1), parameter.grad.view(-1)),
            (gradient.t() if gradient.dim() == 2 else gradient, parameter.grad.t()),
            (gradient * torch.tensor(2.0), parameter.grad * 2),
            (gradient + gradient.mean(0).mean(), parameter.grad + parameter.grad.mean(0).mean()),
        ):
            torch.testing.assert_close(result.full_tensor(), expected, msg=name)
        torch.testing.assert_close(gradient.max().full_tensor(), parameter.grad.max())
        torch.manual_seed(0)
        nn.init.normal_(parameter)
        torch.manual_seed(0)
        nn.init.normal_(model.get_parameter(name))
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter.detach()), name
        assert torch.equal(model.get_parameter(name), model.get_parameter(name).detach().clone())
        shards = model.get_parameter(name).detach().redistribute(placements=[Shard(0), Replicate()])
        assert torch.equal(shards.full_tensor(), parameter.detach())


def check_meta(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = build()
    with torch.device("meta"):
        empty = Words().to(torch.float64)
    model = shard(parallelize(empty, mesh["tp"], sequence=True), mesh["dp"])
    assert all(p.is_meta for p in model.parameters())
    if how == "assigned":
        model.load_state_dict(plain.state_dict(), assign=True)
    elif how == "replaced":
        for path, module in model.named_modules():
            for name, stand_in in list(module.named_parameters(recurse=False)):
                placements = [stand_in.spec.beside or Replicate()]
                whole = plain.get_parameter(f"{path}.{name}").detach()
                setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], placements)))
        model(data(0, 0, 1)[:, :-1])
    else:
        model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), plain.state_dict()[name]), name
    expected = train(plain, 0, 1)
    got = mean(train(model, mesh["dp"].get_local_rank(), 2), mesh["dp"].get_group())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def check_dcp(directory: str) -> None:
    """What torch's `fully_shard` saves over (dp, tp) is loaded here, and the other way round, optimizer and all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = mesh["dp"].get_local_rank()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own, its = get_state_dict(model, optimizer)
        return {"model": own, "optimizer": its}

    def made(fully_shard: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard(parallelize(build(), mesh["tp"]), mesh["dp"], fully_shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        for step in range(steps):
            tokens = data(step, part, 2)
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    for number, (source, target) in enumerate(((torchs, fullshard), (fullshard, torchs), (fullshard, fullshard))):
        saved, loaded = made(source.fully_shard, 2), made(target.fully_shard, 1)
        dcp.save(state(*saved), checkpoint_id=f"{directory}/{number}")
        into = state(*loaded)
        dcp.load(into, checkpoint_id=f"{directory}/{number}")
        set_state_dict(*loaded, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        whole = StateDictOptions(full_state_dict=True)
        first, second = (get_state_dict(*each, options=whole) for each in (saved, loaded))
        torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
        torch.testing.assert_close(first[1]["state"], second[1]["state"], rtol=0, atol=0)


@pytest.mark.full
def test_torchs_checkpoints_both_ways(tmp_path: Path) -> None:
    run_ranks(check_dcp, 4, str(tmp_path))


def check_hybrid() -> None:
    """Copies of what is sharded of what is split: a mesh of three axes, two of which are `fully_shard`'s."""
    plain = build()
    expected = train(plain, 0, 1)
    for sizes in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
        model = shard(parallelize(build(), mesh["tp"], sequence=True), mesh["replicate", "shard"])
        both = mesh["replicate", "shard"]
        part = both.get_local_rank(0) * sizes[1] + both.get_local_rank(1)
        got = train(model, part, 2)
        parts = [None] * 4
        dist.all_gather_object(parts, got)
        got = torch.tensor(parts, dtype=torch.float64).mean(0).tolist()
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name).detach(), msg=name)


@pytest.mark.full
def test_hybrid_sharding_above_it() -> None:
    run_ranks(check_hybrid, 4)


def over_all_axes(model: nn.Module, mesh: DeviceMesh, *, splits: bool) -> Any:
    """Every parameter a DTensor over the whole mesh; with `splits` cut along the last axis, column by column first."""
    for number, layer in enumerate(module for module in model.modules() if isinstance(module, nn.Linear)):
        for name, parameter in list(layer.named_parameters()):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if splits and (name == "weight" or number % 2 == 0):
                placements[-1] = Shard(number % 2)
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


def pair() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5)).double()


def check_all_axes(names: tuple[str, str], dims: Any, *, cuts_batch: bool) -> None:
    """Inputs are DTensors over all axes, too: "replicated" while each rank has its own, or one batch that is cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    own, size = (mesh["dp"].get_local_rank(), 2) if "tp" in names else (dist.get_rank(), 4)
    is_flattened = dims.shard == names or dims.replicate == names
    plain, model = pair(), over_all_axes(pair(), mesh, splits="tp" in names)
    for module in (model[0], model[2], model):
        fullshard.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        if cuts_batch:
            module.set_gradient_divide_factor(1)
    # Not the mesh that slicing by that name gives: to torch before 2.12 it is another.
    named = ("_".join(names),) if is_flattened else names
    assert {p.device_mesh.mesh_dim_names for p in model.parameters()} == {named}
    assert all(torch.equal(p.device_mesh.mesh.view(2, 2), mesh.mesh) for p in model.parameters())
    if dims.shard is None:  # every rank has its tile whole
        assert model[2].weight.to_local().numel() == (25 if "tp" in names else 50)
    assert fullshard.describe(model).beneath == ("tensor parallel over 2" if "tp" in names else "")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=RATE) for each in (plain, model)]
    for step in range(3):
        torch.manual_seed(step)
        batches = torch.randn(size, 2, 6, dtype=torch.float64)
        placements = [Shard(0) if cuts_batch and name != "tp" else Replicate() for name in names]
        inputs = DTensor.from_local(batches[own], mesh, placements, run_check=False)
        loss = model(inputs).square().sum()
        losses = [plain(batch).square().sum() for batch in batches]
        torch.testing.assert_close(loss.full_tensor(), sum(losses) if cuts_batch else losses[own])
        loss.backward()
        (sum(losses) / (1 if cuts_batch else size)).backward()
        norm: Any
        expected, norm = (nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (plain, model))
        torch.testing.assert_close(norm.full_tensor(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    saved = full_state_dict(model)
    torch.testing.assert_close(saved, plain.state_dict() if dist.get_rank() == 0 else {})
    with torch.device("meta"):
        later = over_all_axes(pair(), mesh, splits="tp" in names)
    fullshard.fully_shard(later, mesh=mesh, dp_mesh_dims=dims)
    later.to_empty(device="cpu")
    load_full_state_dict(later, plain.state_dict())
    torch.testing.assert_close(later(inputs).full_tensor(), model(inputs).full_tensor())


def check_each_over_all_axes() -> None:
    shard, both = (fullshard.DataParallelMeshDims(shard="dp", replicate=name) for name in (None, "copies"))
    check_all_axes(("dp", "tp"), shard, cuts_batch=False)
    check_all_axes(("dp", "tp"), shard, cuts_batch=True)
    check_all_axes(("copies", "dp"), both, cuts_batch=False)
    check_all_axes(("copies", "dp"), fullshard.DataParallelMeshDims(shard=("copies", "dp")), cuts_batch=False)
    check_all_axes(("copies", "dp"), fullshard.DataParallelMeshDims(replicate=("copies", "dp")), cuts_batch=False)
    check_all_axes(("dp", "tp"), fullshard.DataParallelMeshDims(replicate="dp"), cuts_batch=False)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(
        WrapError,
        match=r"weight: the parameter is a DTensor placed as \[Shard\(dim=0\)\] along the axes .* expected Replicate",
    ):
        fullshard.fully_shard(layer, mesh=mesh, dp_mesh_dims=shard)
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]))
    with pytest.raises(
        WrapError, match=r"weight: the parameter is a DTensor over .*, which is not another axis of the mesh"
    ):
        fullshard.fully_shard(layer, mesh=mesh)  # what a call before has said of the mesh's axes was for that call


def test_parameters_and_inputs_that_are_dtensors_over_all_axes() -> None:
    run_ranks(check_each_over_all_axes, 4)


def check_unsharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = build()
    model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    tokens = data(0, 0, 1)[:, :-1]
    with fullshard.unsharded(model, writeback=True):
        weight = model.get_parameter("blocks.0.down.weight")
        assert isinstance(weight, DTensor) and weight.placements == (Shard(1),)
        assert torch.equal(weight.full_tensor(), plain.get_parameter("blocks.0.down.weight").detach())
        with torch.no_grad():
            weight.mul_(2)
            plain.get_parameter("blocks.0.down.weight").mul_(2)
        torch.testing.assert_close(model(tokens), plain(tokens))
    torch.testing.assert_close(model(tokens), plain(tokens))
    name = "blocks.0.down.weight"
    copied = copy.deepcopy(model.get_parameter(name))
    assert torch.equal(copied.full_tensor(), plain.get_parameter(name).detach())
    model.float()
    assert torch.equal(model.get_parameter(name).full_tensor(), plain.get_parameter(name).detach().float())
    torch.testing.assert_close(model(tokens), plain.float()(tokens))
    assert fullshard.describe(model).beneath == "tensor parallel over 2"
    assert fullshard.describe(model).total_numel == sum(p.numel() for p in plain.parameters())
    own = sum(p.to_local().numel() for p in model.parameters())
    assert fullshard.describe(model).rank_numel == own


def check_not_finite() -> None:
    """One rank of the other axis has it, and every rank is told."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    if dist.get_rank() == 1:
        model.blocks[0].set_all_reduce_hook(lambda gradient: gradient.fill_(float("inf")))
    with pytest.raises(NonFiniteError, match=r"blocks\.0\."):
        train(model, 0, 1, steps=1, norm=None)


def test_gradients_that_are_not_finite_on_a_rank_of_the_other_axis() -> None:
    run_ranks(check_not_finite, 2)


def check_other_tiles() -> None:
    """A square matrix cut by rows, and one cut by columns: alike in all but what a rank has of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = []
    for style in (ColwiseParallel(), RowwiseParallel()):
        layer = parallelize_module(nn.Linear(4, 4, bias=False), mesh["tp"], style)
        layers.append(fullshard.fully_shard(layer, mesh=mesh["dp"]))
    rows, columns = (layer.weight.detach() for layer in layers)
    assert not torch.equal(rows, columns)
    whole = rows.full_tensor()
    assert torch.equal((rows + columns).full_tensor(), whole + columns.full_tensor())
    columns.copy_(rows)
    assert torch.equal(columns.full_tensor(), whole) and torch.equal(rows, columns)


def check_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(build(), mesh["tp"])
    with pytest.raises(
        WrapError, match=r"q\.weight, k\.weight, v\.weight and 5 more: the parameter is a DTensor over .*unnamed axis"
    ):
        fullshard.fully_shard(model.blocks[0])
    with pytest.raises(WrapError, match="overlapping"):
        fullshard.fully_shard(model.blocks[0], mesh=mesh["tp"])
    fullshard.fully_shard(model.blocks[0], mesh=other["dp"])  # another mesh of the same ranks and axes
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(WrapError, match="expected one axis in addition"):
        fullshard.fully_shard(layer, mesh=mesh["dp"])


def made(mesh: DeviceMesh | None, *, sequence: bool = False, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    """A model over (dp, tp), or over all ranks if there is no mesh, and an optimizer that has stepped."""
    model = build()
    if mesh is not None:
        parallelize(model, mesh["tp"], sequence=sequence)
        shard(model, mesh["dp"])
        part, parts = mesh["dp"].get_local_rank(), mesh["dp"].size()
    else:
        for block in model.blocks:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
        part, parts = 0, 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        tokens = data(step, part, parts)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def wholes(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {
            f"{name}/{key}": value.full_tensor() for key, value in optimizer.state[parameter].items() if value.ndim
        }
    return found


def check_save(directory: str, sequence: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = made(mesh, sequence=sequence)
    save_checkpoint(directory, model=model, optimizer=optimizer)
    full = full_state_dict(model, rank0_only=False)
    found = wholes(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in full.items())
    return found


def check_load(directory: str, sizes: tuple[int, int] | None, sequence: bool) -> dict[str, torch.Tensor]:
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model, optimizer = made(mesh, sequence=sequence, steps=1)
    load_checkpoint(directory, model=model, optimizer=optimizer)
    return wholes(model, optimizer)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(4, (2, 2), marks=pytest.mark.full),
        pytest.param(4, (1, 4), marks=pytest.mark.full),
        (2, (1, 2)),
        pytest.param(3, None, marks=pytest.mark.full),
    ],
)
def test_checkpoints_of_any_mesh_into_any_other(tmp_path: Path, ranks: int, sizes: tuple[int, int] | None) -> None:
    path = tmp_path / "one"
    saved = run_ranks(check_save, 4, str(path), sizes is None)[0]
    verify_checkpoint(path).raise_if_damaged()
    end_workers()
    for found in run_ranks(check_load, ranks, str(path), sizes, sizes is not None):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], value) for name, value in saved.items())


@pytest.mark.full
def test_checkpoints_are_cut_and_exported_without_ranks(tmp_path: Path) -> None:
    saved = run_ranks(check_save, 4, str(tmp_path / "one"), False)[0]
    (tmp_path / "config.json").write_text("{}")
    for command in (("reshard", "--world-size", "2"), ("export", "--to", "hf", "--config-from", str(tmp_path))):
        paths = [str(tmp_path / name) for name in ("one", command[0])]
        result = CliRunner().invoke(app, ["ckpt", command[0], *paths, *command[1:]])
        assert result.exit_code == 0, result.output
    end_workers()
    found = run_ranks(check_load, 2, str(tmp_path / "reshard"), None, False)[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in exported.items())


def check_pretrained(directory: str) -> None:
    """Each rank reads what it will own of its tile, and no more than the rows around it."""
    plain = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(), mesh["tp"], sequence=True), mesh["dp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_pretrained(directory, model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_full_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else None)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name


def check_weights(directory: str) -> None:
    for how in ("filled", "assigned", "replaced"):
        check_meta(how)
    check_pretrained(directory)


@pytest.mark.full
def test_from_the_meta_device_and_plain_weights_into_tiles(tmp_path: Path) -> None:
    save_file(build().state_dict(), tmp_path / "model.safetensors")
    run_ranks(check_weights, 4, str(tmp_path))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """22 sequences: the last round of the ranks is filled up."""

    def __init__(self) -> None:
        self.tokens = torch.randint(WORDS, (22, LENGTH + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[index], "number": torch.tensor(index)}


def accelerated(config: Any, batch_size: int, directory: str = "") -> dict[str, Any]:
    """A loop as people write it for Accelerate, whose layers are split if there is somebody to split them over."""
    accelerator = fullshard.Accelerator(cpu=True, parallelism_config=config)
    model = build()
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        parallelize(model, mesh["tp"], sequence=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, numbers = [], []
    for batch in loader:
        tokens = batch["tokens"]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses += [accelerator.gather(loss.detach()).mean().item(), float(norm)]
        numbers += accelerator.gather_for_metrics(batch["number"]).tolist()
        counted = accelerator.reduce(torch.tensor(len(tokens)), "sum").item()
        assert counted == accelerator._data_parallel_size * batch_size
    if directory:
        accelerator.save_state(directory)
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "numbers": numbers, "rate": scheduler.get_last_lr(), "weights": weights}


def check_resumed(directory: str) -> dict[str, torch.Tensor]:
    accelerator = fullshard.Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    model, *_ = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.load_state(directory)
    return dict(accelerator.get_state_dict(model))


def check_accelerator(directory: str) -> dict[str, Any]:
    return accelerated(fullshard.ParallelismConfig(tp_size=2, dp_shard_size=2), 2, directory)


def test_accelerators_parallelism_config(tmp_path: Path) -> None:
    alone = run_ranks(accelerated, 2, None, 2)[0]
    end_workers()
    together = run_ranks(check_accelerator, 4, str(tmp_path / "state"))
    for found in together:
        torch.testing.assert_close(found["losses"], alone["losses"], rtol=1e-9, atol=1e-12)
        assert found["numbers"] == alone["numbers"] == list(range(22))
        assert found["rate"] != [RATE]
    for name, value in alone["weights"].items():
        torch.testing.assert_close(together[0]["weights"][name], value, rtol=1e-8, atol=1e-10)
    end_workers()
    resumed = run_ranks(check_resumed, 3, str(tmp_path / "state"))[0]
    assert all(torch.equal(resumed[name], value) for name, value in together[0]["weights"].items())


def check_nothing_split() -> None:
    accelerator = fullshard.Accelerator(cpu=True, parallelism_config=fullshard.ParallelismConfig(tp_size=2))
    with pytest.raises(ConfigError, match="tp_size = 2, but no layer of Words is split"):
        accelerator.prepare(build())


def test_an_accelerator_whose_model_is_not_split() -> None:
    run_ranks(check_nothing_split, 2)


def check_overflow() -> None:
    """Only one rank's tile has an overflow: no rank steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(torch.float32), mesh["tp"]), mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [parameter.full_tensor() for parameter in model.parameters()]
    for overflows in (True, False):
        tokens = data(0, mesh["dp"].get_local_rank(), 2)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        if overflows and dist.get_rank() == 0:
            own = model.get_parameter("blocks.0.q.weight").grad.to_local()
            assert own.numel()
            own.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [parameter.full_tensor() for parameter in model.parameters()]
        assert all(map(torch.equal, before, after)) == overflows
        assert scaler.get_scale() == 2.0


def check_in_turn() -> None:
    """In the same processes: torch takes seconds for what it computes with DTensors for the first time."""
    check_training(2, 2, False)
    check_training(2, 2, True)
    check_as_torchs(True)
    check_norms()
    check_unsharded()
    check_other_tiles()
    check_overflow()
    check_refused()


def test_losses_weights_and_what_is_computed_of_them_are_those_of_one_process() -> None:
    run_ranks(check_in_turn, 4)


# -- experts, each of which is whole on one rank of an axis --------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """All tokens of a group to each of its ranks; back, the sum of what each has made of them, each rank's own."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: Any, gathers: bool) -> torch.Tensor:
        ctx.group, ctx.gathers = group, gathers
        return _exchange(tokens, group, gathers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient, ctx.group, not ctx.gathers), None, None


def _exchange(tokens: torch.Tensor, group: Any, gathers: bool) -> torch.Tensor:
    size = dist.get_world_size(group)
    if gathers:
        made = tokens.new_empty(len(tokens) * size, *tokens.shape[1:])
        dist.all_gather_into_tensor(made, tokens.contiguous(), group=group)
    else:
        made = tokens.new_empty(len(tokens) // size, *tokens.shape[1:])
        dist.reduce_scatter_tensor(made, tokens.contiguous(), group=group)
    return made


class Experts(nn.Module):
    """Four matrices; a token's own number says which of them it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, DIM, DIM) * 0.1)
        self.group: Any = None

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        first = 0
        if isinstance(weight, DTensor):
            weight = weight.to_local()
            first = len(weight) * dist.get_rank(self.group)
            hidden = _Exchange.apply(hidden, self.group, True)
            chosen = _exchange(chosen, self.group, True)
        made = torch.zeros_like(hidden)
        for index in range(len(weight)):
            goes = (chosen == first + index).unsqueeze(-1)
            made = made + goes * (hidden @ weight[index])
        return made if self.group is None else _Exchange.apply(made, self.group, False)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.experts = Experts()
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        hidden = hidden + self.experts(hidden, tokens.flatten() % 4)
        return self.head(hidden).unflatten(0, tokens.shape)  # type: ignore[no-any-return]


def build_mixture() -> Any:
    torch.manual_seed(2)
    return Mixture().double()


def build_expert_parallel(sizes: tuple[int, int]) -> Any:
    """Experts split over `ep` and sharded over `copies`; all else sharded over all ranks."""
    ranks = init_device_mesh("cpu", (sizes[0] * sizes[1],), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "ep"))
    model = build_mixture()
    model.experts.group = mesh["ep"].get_group()
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)]))
    fullshard.fully_shard(model.experts, mesh=mesh["copies"])
    # Each expert has seen the tokens of all ranks, and its gradient is a sum over as many batches.
    model.experts.set_gradient_divide_factor(float(sizes[0] * sizes[1]))
    fullshard.fully_shard(model, mesh=ranks)
    return model


def check_experts(directory: str) -> None:
    plain = build_mixture()
    expected = train(plain, 0, 1)
    model = build_expert_parallel((2, 2))
    got = mean(train(model, dist.get_rank(), 4), None)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name).detach(), msg=name)
    save_checkpoint(directory, model=model)
    other = build_expert_parallel((1, 4))
    load_checkpoint(directory, model=other)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name).full_tensor(), parameter.full_tensor()), name


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_expert_parallelism(tmp_path: Path, comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a gather writes into memory that autograd has saved views of."""
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_experts, 4, str(tmp_path / "one"))


# -- state in 8 bits --------------------------------------------------------------------------------------------------


def coded_layer(splits: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A matrix cut by columns, or sharded over both ranks: each rank has as many elements, and others."""
    torchao: Any = pytest.importorskip("torchao.optim", reason="needs the extra `quant`")
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(3)
    layer: Any = nn.Linear(128, 128, bias=False)
    mesh = init_device_mesh("cpu", (1, 2) if splits else (2, 1), mesh_dim_names=("dp", "tp"))
    if splits:
        parallelize_module(layer, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
    fullshard.fully_shard(layer, mesh=mesh["dp"])
    return layer, torchao.AdamW8bit(layer.parameters(), lr=1e-3)


def coded_moment(layer: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    coded, _ = coded_tensors(as_local(optimizer.state[layer.weight]))
    held = coded["exp_avg"]
    parts = held.parts
    values = decode(parts["codes"], parts["scales"], parts.get("book"), bits=held.record.bits, block=held.record.block)
    return layer.weight.wrap(values.reshape(-1).float()).full_tensor()  # type: ignore[no-any-return]


def check_coded(directory: str, splits: bool) -> torch.Tensor:
    layer, optimizer = coded_layer(splits)
    if splits:
        layer(torch.randn(4, 128, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        optimizer.step()
        save_checkpoint(directory, model=layer, optimizer=optimizer)
    else:
        load_checkpoint(directory, model=layer, optimizer=optimizer)
    return coded_moment(layer, optimizer)


@pytest.mark.full
def test_coded_state_of_tiles(tmp_path: Path) -> None:
    saved = run_ranks(check_coded, 2, str(tmp_path / "one"), True)[0]
    end_workers()
    loaded = run_ranks(check_coded, 2, str(tmp_path / "one"), False)[0]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0.02 * float(saved.abs().max()))
    assert float(saved.abs().max()) > 0


# -- layers that pack several matrices into one ---------------------------------------------------------------------


class Packed(nn.Module):
    """Two projections in one weight, of experts and of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 5).double())
        self.layer = nn.Parameter(torch.randn(12, 5).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, experts = (p.to_local() if isinstance(p, DTensor) else p for p in (self.layer, self.experts))
        first, second = (x @ layer.t()).chunk(2, -1)
        return (first * second).sum() + (x @ experts.transpose(1, 2)).unflatten(-1, (2, -1)).prod(-2).sum()  # type: ignore[no-any-return]


def packed() -> Any:
    torch.manual_seed(4)
    return Packed()


def check_packed(directory: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = packed(), packed()
    for name, placement in (("experts", _StridedShard(1, split_factor=2)), ("layer", _StridedShard(0, split_factor=2))):
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement])))
    fullshard.fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    plain(x).backward()
    model(x).backward()
    for name, parameter in plain.named_parameters():
        sharded = model.get_parameter(name)
        assert torch.equal(sharded.full_tensor(), parameter.detach())
        torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad)
        norm = torch.tensor(sharded.grad.norm().full_tensor().item(), dtype=torch.float64)
        torch.testing.assert_close(norm, parameter.grad.norm())
    state = model.state_dict()
    dcp.save(state, checkpoint_id=f"{directory}/dcp")
    into = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load(into, checkpoint_id=f"{directory}/dcp")
    assert all(torch.equal(into[name], value) for name, value in plain.state_dict().items())
    for value in state.values():
        value.zero_()
    dcp.load(state, checkpoint_id=f"{directory}/dcp")
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in plain.state_dict().items())
    save_checkpoint(f"{directory}/own", model=model)
    alone = packed()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.zero_()
    fullshard.fully_shard(alone)
    load_checkpoint(f"{directory}/own", model=alone)
    assert all(torch.equal(alone.get_parameter(n).full_tensor(), v) for n, v in plain.state_dict().items())
    save_checkpoint(f"{directory}/whole", model=alone)
    for parameter in model.parameters():
        parameter.data.zero_()
    load_checkpoint(f"{directory}/whole", model=model)
    assert all(torch.equal(model.get_parameter(n).full_tensor(), v) for n, v in plain.state_dict().items())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch cannot gather what is packed and split: an error")
def test_packed_matrices(tmp_path: Path) -> None:
    run_ranks(check_packed, 4, str(tmp_path))


def _verls_export() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    home: Any = ModuleType("verl.workers.engine.spec")
    home.ShardSpec = type("ShardSpec", (), {"from_param": lambda param: SimpleNamespace()})
    describe_intervals(home)
    with pytest.raises(LifecycleError) as error:
        home.ShardSpec.from_param(model.blocks[0].q.weight)
    return str(error.value)


@pytest.mark.full
def test_verls_export_of_changed_elements_is_refused() -> None:
    said = run_ranks(_verls_export, 4)[0]
    assert "does not support blocks.0.q.weight" in said and "use get_per_tensor_param" in said
