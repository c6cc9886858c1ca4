"""Sharded parameters, gradients and state are DTensors: what is computed with them is of the whole, or refused.

pytest tests/engine/test_sharded_tensor.py
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, full
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional
from torch.optim import swa_utils

from fullshard.checkpoint import full_state_dict, load_full_state_dict
from fullshard.comm.torch_dist import NativeCollectives
from fullshard.core.errors import LifecycleError
from fullshard.features import ShardedParameter, ShardedTensor, shard_model
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Stack,
    assert_same_gradients,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    run_squared,
    sharded_step,
)


class Weighted(Stack):
    """With weights that a script uses past forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.single = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(1))
        self.pair, self.table = nn.Parameter(torch.zeros(2)), nn.Embedding(2, 3)
        self.cube = nn.Parameter(torch.arange(60.0).view(3, 4, 5) / 60)


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, (list, tuple)):
        return [whole(item) for item in value]
    return value


# -- what it is -------------------------------------------------------------------------------------------------------


def check_identity() -> None:
    model, plain = build_sharded(Weighted, BLOCKS), build(Weighted)
    held = 0
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(own, DTensor) and isinstance(own, nn.Parameter) and isinstance(own, ShardedParameter)
        assert own.shape == other.shape and own.numel() == other.numel() and own.stride() == other.stride()
        assert own.dim() == own.ndim == other.dim() and own.dtype == other.dtype and own.name == name
        assert own.device_mesh.size() == 2 and len(own.placements) == 1
        [placement] = own.placements
        assert not (placement.is_shard() or placement.is_shard(0) or placement.is_replicate() or placement.is_partial())
        assert placement == copy.deepcopy(placement) and "RaggedShard" in repr(placement)
        assert torch.equal(own.full_tensor(), other)
        start, stop = own.interval.start, own.interval.stop
        assert torch.equal(own.to_local(), other.flatten()[start:stop]) and own.to_local().requires_grad
        held += own.to_local().numel()
    assert 0 < held < sum(p.numel() for p in plain.parameters())
    alone = build_sharded(Weighted, BLOCKS, strategy="NO_SHARD")
    for own, other in zip(alone.parameters(), plain.parameters(), strict=True):
        assert isinstance(own, DTensor) and torch.equal(own.to_local(), other)


def test_a_parameter_is_a_dtensor() -> None:
    run_ranks(check_identity, 2)


# -- functions --------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.norm": torch.norm,
    "norm 1": lambda p: p.norm(1),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "norm 0": lambda p: torch.linalg.vector_norm(p, 0),
    "norm -inf": lambda p: torch.linalg.vector_norm(p, float("-inf")),
    "norm -2": lambda p: p.norm(-2),
    "norm 3": lambda p: torch.linalg.vector_norm(p, 3),
    "norms of rows": lambda p: p.norm(dim=-1),
    "foreach norm": lambda p: torch._foreach_norm([p, p * 2]),
    "sum": torch.sum,
    "sum of a dim": lambda p: p.sum(0),
    "sum of all dims": lambda p: p.sum((0, 1, 2), keepdim=True),
    "mean": torch.mean,
    "std": lambda p: p.std(),
    "max": torch.max,
    "amin": lambda p: p.amin(),
    "argmax": torch.argmax,
    "any": lambda p: (p > 0.9).any(),
    "isfinite": lambda p: torch.isfinite(p).all(),
    "count": torch.count_nonzero,
    "equal": lambda p: torch.equal(p, p.clone()),
    "not equal": lambda p: torch.equal(p, p + 1),
    "allclose": lambda p: torch.allclose(p, p * 1.0),
    "not allclose": lambda p: torch.allclose(p, p + 1),
    "item": lambda p: p[1, 2, 3].item(),
    "exp": torch.exp,
    "p * p - 1": lambda p: p * p - 1,
    "by a number": lambda p: (2 * p + 0.5) / 3,
    "by a scalar tensor": lambda p: p * torch.tensor(2.0, dtype=p.dtype),
    "where": lambda p: torch.where(p > 0.5, p, torch.zeros_like(p)),
    "cast": lambda p: p.to(torch.bfloat16).float(),
    "lerp": lambda p: torch.lerp(p, p * 2, 0.25),
    "broadcast of its own": lambda p: p * p[:1],
    "broadcast of two": lambda p: p[0].view(4, 5, 1) * p[1, 0],
    "a row": lambda p: p[1],
    "a row of a row": lambda p: p[2, 3],
    "rows": lambda p: p[1:],
    "a column": lambda p: p[:, 1],
    "every second": lambda p: p[::2],
    "split": lambda p: p.split(2),
    "split across rows": lambda p: p.split([0, 2, p.shape[1] - 2], 1),
    "unbind": lambda p: p.unbind(),
    "view": lambda p: p.view(-1, 5),
    "flatten": lambda p: p.flatten(),
    "unsqueeze": lambda p: p.unsqueeze(1).squeeze(1),
    "transpose": lambda p: p.transpose(0, 2),
    "permute and add": lambda p: p.permute(2, 0, 1) + 1,
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p], 1),
    "matmul": lambda p: p[0] @ p[1].t(),
    "sort": lambda p: p.sort(dim=-1).values,
    "svd": lambda p: torch.linalg.svdvals(p[0]),
    "like": lambda p: [torch.zeros_like(p), torch.ones_like(p, dtype=torch.int64), torch.full_like(p, 2.5)],
    "new": lambda p: [p.new_zeros(2, 2), p.new_ones(p.shape), p.new_full((3,), 1.5)],
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "clone, detach": lambda p: p.clone().detach(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "redistribute": lambda p: p.redistribute(placements=[Shard(1)]) if isinstance(p, DTensor) else p,
    "foreach": lambda p: torch._foreach_mul([p, p + 1], 2.0),
    "foreach max": lambda p: torch._foreach_max([p]),
    "rand_like": lambda p: [seed(), torch.rand_like(p)],
    "dropout": lambda p: [seed(), functional.dropout(p, 0.5)],
}


def seed() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.ones(())


def check_functions() -> dict[str, str]:
    wrong = {}
    own, other = (m.get_parameter("cube") for m in (build_sharded(Weighted, BLOCKS), build(Weighted)))
    for name, function in FUNCTIONS.items():
        with torch.no_grad():
            try:
                torch.testing.assert_close(whole(function(own)), function(other), rtol=1e-9, atol=1e-9)
            except Exception as error:
                wrong[name] = repr(error)
    assert type(torch.rand_like(own)) is ShardedTensor, "this rank's part alone"
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_functions_are_of_the_whole(world_size: int) -> None:
    assert run_ranks(check_functions, world_size) == [{}] * world_size


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "constant_": lambda p: nn.init.constant_(p, 0.25),
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": lambda p: nn.init.orthogonal_(p.view(12, 5)),
    "dirac_": nn.init.dirac_,
    "a row": lambda p: p[1].zero_(),
    "rows": lambda p: p[1:].fill_(2),
    "p[1] =": lambda p: p.__setitem__(1, 7.0),
    "an element": lambda p: p[2, 1, 3].fill_(5),
    "through a view": lambda p: p.view(-1).mul_(3),
    "through .data": lambda p: p.data.add_(1),
    "through a copy": lambda p: copy.copy(p).add_(1),
    "copy_": lambda p: p.copy_(p * 2),
    "copy_ of another layout": lambda p: p.copy_(whole_of(p, 0.5)),
    "masked_fill_": lambda p: p.masked_fill_(p > 0.5, 0.0),
    "triu_": lambda p: p.triu_(),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "foreach": lambda p: torch._foreach_add_([p], [p], alpha=0.5),
    "foreach by a tensor": lambda p: torch._foreach_mul_([p], torch.tensor(0.5, dtype=p.dtype)),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
    ".data =": lambda p: setattr(p, "data", p * 2),
}


def whole_of(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A tensor like it, if that is a DTensor one that every rank has whole."""
    made = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) * value
    return distribute_tensor(made, tensor.device_mesh, [Replicate()]) if isinstance(tensor, DTensor) else made


def check_in_place() -> dict[str, str]:
    """What is changed in place is changed for the next forward and the next step, too."""
    wrong = {}
    for name, function in IN_PLACE.items():
        model, plain = build_sharded(Computes, []), build(Computes)
        outputs = []
        try:
            for each in (model, plain):
                each(torch.ones(1, dtype=torch.float64))
                seed()
                with torch.no_grad():
                    function(each.get_parameter("cube"))
                outputs.append((whole(each.cube), each(torch.ones(1, dtype=torch.float64))))
            torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
        except Exception as error:
            wrong[name] = repr(error)
    return wrong


class Computes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.arange(60.0).view(3, 4, 5) / 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.cube * self.cube).sum() * x


def test_changes_in_place_are_those_of_one_process() -> None:
    assert run_ranks(check_in_place, 2) == [{}, {}]


def check_data() -> None:
    """Who has taken values before `.data =`, by `.data`, `detach` or a state dict, has those, and puts them back."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    for each in (model, plain):
        states, backups = each.state_dict(), [p.data for p in each.parameters()]
        detached = [p.detach() for p in each.parameters()]
        for each_detached in detached:
            each_detached.mul_(2)  # it is the same memory
        for p in each.parameters():
            p.data = p.data * 0.5
        for taken in (backups, detached):
            assert all(torch.equal(whole(b), whole(p) * 2) for b, p in zip(taken, each.parameters(), strict=True))
        assert all(torch.equal(whole(states[n]), whole(p) * 2) for n, p in each.named_parameters())
        for p, backup in zip(each.parameters(), detached if each is model else backups, strict=True):
            p.data = backup
    assert_trains_alike(model, plain, run_squared)


def test_what_data_was_before_is_kept() -> None:
    run_ranks(check_data, 2)


def check_placed_as_it_is() -> None:
    """Redistributed to where it is, it is a view, as torch's tensors are."""
    model: Any = build_sharded(Stack, BLOCKS)
    weight = model.embed.weight.data
    same = weight.redistribute(placements=weight.placements)
    assert isinstance(same, ShardedTensor)
    weight.fill_(3.0)
    assert torch.equal(same.local, weight.local) and bool((same.local == 3).all())


def test_redistributed_to_where_it_is() -> None:
    run_ranks(check_placed_as_it_is, 2)


PLACED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "distribute_tensor": lambda p, value: distribute_tensor(value, p.device_mesh, p.placements),
    "distribute_tensor again": lambda p, value: distribute_tensor(
        distribute_tensor(value, p.device_mesh, p.placements), p.device_mesh, p.placements
    ),
    "from rows": lambda p, value: distribute_tensor(value, p.device_mesh, [Shard(0)]).redistribute(
        placements=p.placements
    ),
    "from what all have": lambda p, value: distribute_tensor(value, p.device_mesh, [Replicate()]).redistribute(
        p.device_mesh, p.placements
    ),
    "there and back": lambda p, value: (
        p.copy_(distribute_tensor(value, p.device_mesh, [Replicate()]))
        .redistribute(placements=[Replicate()])
        .redistribute(placements=p.placements)
    ),
    "from_local": lambda p, value: DTensor.from_local(
        distribute_tensor(value, p.device_mesh, p.placements).to_local(),
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    ),
    "full": lambda p, value: (
        full(p.shape, 1.0, device_mesh=p.device_mesh, placements=p.placements)
        * distribute_tensor(value, p.device_mesh, p.placements)
    ),
}
"""Lines with which optimizers that others wrote lay out an update, or its parts, as the parameter."""


def check_laid_out_as_a_parameter() -> dict[str, str]:
    wrong = {}
    model: Any = build_sharded(Stack, BLOCKS)
    parameter = model.embed.weight
    value = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    for name, place in PLACED.items():
        try:
            with torch.no_grad():
                placed = place(parameter, value)
                assert placed.placements == parameter.placements
                assert placed.to_local().shape == parameter.to_local().shape
                torch.testing.assert_close(whole(placed), value)
                parameter.zero_().add_(placed, alpha=0.5)
            torch.testing.assert_close(whole(parameter), value * 0.5)
        except Exception as error:
            wrong[name] = repr(error)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_tensors_can_be_laid_out_as_a_parameter(world_size: int) -> None:
    assert run_ranks(check_laid_out_as_a_parameter, world_size) == [{}] * world_size


def test_without_a_process_group_as_well() -> None:
    assert check_laid_out_as_a_parameter() == {}


def refuse_to_lay_out() -> None:
    model: Any = build_sharded(Stack, BLOCKS)
    parameter = model.embed.weight
    mesh, placements = parameter.device_mesh, parameter.placements
    leaf = torch.zeros(parameter.shape, dtype=parameter.dtype, requires_grad=True)
    assert distribute_tensor(leaf, mesh, placements).requires_grad  # as torch's
    with pytest.raises(LifecycleError, match=r"an interval of 4 elements does not determine the shape"):
        DTensor.from_local(torch.zeros(4), mesh, placements)
    with pytest.raises(LifecycleError, match=r"rank \d should hold \d+ elements of a tensor .* but got 1\b"):
        DTensor.from_local(torch.zeros(1), mesh, placements, shape=parameter.shape)
    with pytest.raises(LifecycleError, match="nothing is sharded over"):
        DTensor.from_local(torch.zeros(1), DeviceMesh("cpu", mesh.mesh.flip(0)), placements, shape=parameter.shape)
    with pytest.raises(LifecycleError, match=r"that requires gradients cannot be distributed like"):
        (parameter.redistribute(placements=[Replicate()]) * 2).redistribute(placements=placements)


def test_what_cannot_be_laid_out_as_a_parameter_is_an_error() -> None:
    run_ranks(refuse_to_lay_out, 2)


def check_views() -> None:
    """A view that is a copy follows no change, so it is an error to read it after one; a row is a view."""
    model: Any = build_sharded(Stack, BLOCKS)
    weight = model.embed.weight.data
    transposed, row = weight.T, weight[1]
    before = whole(transposed)
    assert torch.equal(whole(transposed), before)
    weight.mul_(2)
    assert torch.equal(whole(row), before.T[1] * 2)
    uses: list[Callable[[Any], Any]] = [whole, torch.sum, lambda t: t[0], lambda t: t.to_local()]
    for use in uses:
        with pytest.raises(LifecycleError, match=r"a view of embed.weight .* out of date"):
            use(transposed)
    with torch.inference_mode():
        assert torch.equal(whole((weight * 2).T), before * 4)


def test_copies_for_views_are_not_read_after_a_change() -> None:
    run_ranks(check_views, 2)


def check_compiled() -> None:
    """A compiled function leaves what is done for sharded tensors as it is."""
    own, other = (m.get_parameter("cube").detach() for m in (build_sharded(Weighted, BLOCKS), build(Weighted)))
    functions: list[Callable[[Any], Any]] = [
        torch.norm,
        lambda p: p.norm() + p.abs().mean(),
        lambda p: torch._foreach_norm([p, p * 2]),
    ]
    for function in functions:
        for backend in ("eager", "aot_eager"):
            compiled: Any = torch.compile(function, backend=backend)
            torch.testing.assert_close(whole(compiled(own)), function(other), rtol=1e-9, atol=1e-9)


def test_compiled_functions_are_of_the_whole() -> None:
    run_ranks(check_compiled, 2)


# -- in a loss --------------------------------------------------------------------------------------------------------

RIGHT: dict[str, Callable[[Any], Any]] = {
    "p.pow(2).sum()": lambda m: sum(p.pow(2).sum() for p in m.parameters()),
    "torch.abs(p).sum()": lambda m: sum(torch.abs(p).sum() for p in m.parameters()),
    "norms": lambda m: sum(torch.norm(p) for p in m.parameters()),
    "mean": lambda m: (m.head.weight - 1).abs().mean(),
    "logsumexp": lambda m: torch.logsumexp(m.embed.weight, (0, 1)),
    "a row": lambda m: m.head.weight[1].square().sum(),
    "a full tensor": lambda m: sum((whole(p) ** 3).sum() for p in m.parameters()),
    "a sum alone": lambda m: m.head.weight.sum(),
    "entropy": lambda m: -(m.head.weight.softmax(-1) * m.head.weight.log_softmax(-1)).sum(),
    "a product": lambda m: (m.head.weight @ m.head.weight.T).square().sum(),
    "transposed": lambda m: m.head.weight.T.square().sum(),
    "a matrix norm": lambda m: torch.linalg.matrix_norm(m.head.weight, 2),
    "one vector": lambda m: torch.cat([p.view(-1) for p in m.parameters()]).norm(),
    "near the identity": lambda m: (m.head.weight @ m.head.weight.T - torch.eye(3).double()).square().sum(),
    "added up in a plain tensor": lambda m: added_up(p.norm() for p in m.parameters()),
}


def added_up(values: Iterable[Any]) -> torch.Tensor:
    total = torch.zeros(2, dtype=torch.float64)
    for value in values:
        total += value
        total[1] = value.detach()
    return total[0]


def check_penalties() -> None:
    """A penalty has one process's value and gradient, also of what was frozen when it was sharded."""
    for penalty in RIGHT.values():
        for make, added in ((Stack, lambda value: value), (frozen, whole)):
            model, plain = build_sharded(make, BLOCKS), build(make)
            for each in (model, plain):
                each.requires_grad_(True)
            penalized = functools.partial(run_penalized, penalty=penalty, added=added)
            value = sharded_step(model, penalized, 0)
            expected = reference_step(plain, penalized, 0)
            assert_same_gradients(model, plain)
            assert value is None or expected is None or torch.isfinite(whole(value))
            torch.testing.assert_close(whole(penalty(model)).detach(), penalty(plain).detach())


def run_weighed(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """What is computed of the weights is scaled by, and multiplied with, what each rank has of its own."""
    inputs = batch(step, rank)
    loss: torch.Tensor = model(inputs).square().mean()
    norms: Any = sum(p.norm() for p in model.parameters())
    weight: Any = model.get_parameter("head.weight")
    product = (weight @ weight.T) @ inputs[:3, :2]
    (loss + loss.detach() * (norms + whole(norms.square())) + product.square().mean()).backward()
    return loss.detach()


def check_weighed() -> None:
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    sharded_step(model, run_weighed, 0)
    reference_step(plain, run_weighed, 0)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("world_size", [2, 3])
def test_penalties_may_be_each_ranks_own(world_size: int) -> None:
    """Gradients are the mean over the ranks, as those of the losses are."""
    run_ranks(check_weighed, world_size)


def frozen() -> nn.Module:
    return Stack().requires_grad_(False)


def run_penalized(
    model: nn.Module, step: int, rank: int, *, penalty: Callable[[nn.Module], Any], added: Callable[[Any], Any]
) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean() + 0.1 * added(penalty(model))
    assert not isinstance(loss, DTensor)
    loss.backward()
    return loss.detach()


def test_penalties_have_the_right_gradient() -> None:
    run_ranks(check_penalties, 2)


def check_norms_in_place() -> None:
    """As torch has it: a norm changes where it is changed, and not where a plain tensor is made of it."""
    one = torch.ones((), dtype=torch.float64)
    for each in (build_sharded(Stack, BLOCKS), build(Stack)):
        norm: Any = each.get_parameter("head.weight").detach().norm()
        before, kept = float(norm), norm
        norm += one
        norm.add_(one)
        norm[()] = norm * one
        norm **= one
        assert float(kept) == pytest.approx(before + 2)
        made: Any = norm + one
        made.add_(one)
        assert float(norm) == float(kept) and float(made) == pytest.approx(float(norm) + 2)
    with pytest.raises(
        LifecycleError, match=r"computed from head\.weight in place, with a plain tensor that requires a gradient"
    ):
        build_sharded(Stack, BLOCKS).get_parameter("head.weight").norm().add_(one.clone().requires_grad_())


def check_lists() -> None:
    """Functions of lists, some of whose tensors each rank has a part of, some whole, and some plain."""
    weight, count = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).weight, torch.tensor(2.0)
    reference = weight.detach().clone()
    model = build_sharded(Stack, BLOCKS)
    sharded: Any = next(p for p in model.parameters() if p.shape == weight.shape).detach().clone()
    sharded.copy_(distribute_tensor(reference, sharded.device_mesh, sharded.placements))
    rows: Any = sharded.sum(0, keepdim=True).expand(WIDTH, WIDTH) + 0
    expected = reference.sum(0, keepdim=True).expand(WIDTH, WIDTH).clone()
    torch._foreach_mul_([rows, sharded], [sharded.clone(), rows.clone()])  # what is whole by what is sharded, too
    reference, expected = reference * expected, expected * reference
    torch.testing.assert_close([whole(rows), whole(sharded)], [expected, reference])
    norms: Any = torch._foreach_norm([sharded, sharded])
    torch._foreach_div_(norms, [count, count])
    torch._foreach_add_(norms, 1.0)
    torch.testing.assert_close(whole(norms[1]), reference.norm() / 2 + 1)
    torch.mul(norms[0], count, out=norms[1])
    assert float(norms[1]) == 2 * float(norms[0])
    one: Any = sharded[:1, :1].clone()  # of which one rank has all and the other nothing
    own = one.to_local().shape
    torch.mul(norms[0].reshape(1, 1), norms[0].reshape(1, 1), out=one)
    assert one.to_local().shape == own and float(whole(one)) == pytest.approx(float(norms[0]) ** 2)
    check_vouched_for(sharded, reference)


def check_vouched_for(sharded: Any, reference: torch.Tensor) -> None:
    """A script says that every rank has the same plain tensors."""
    mask, row = (reference > 0).to(reference.dtype), torch.arange(float(WIDTH), dtype=reference.dtype)
    with implicit_replication(), torch.no_grad():
        sharded.mul_(mask).add_(row)
        torch._foreach_add_([sharded, sharded.sum(0)], [mask, row])
        product, total = sharded @ mask, sharded.norm() + row
    reference = reference * mask + row + mask
    expected = [reference, reference @ mask, reference.norm() + row]
    torch.testing.assert_close([whole(sharded), whole(product), whole(total)], expected)
    with implicit_replication(), pytest.raises(LifecycleError, match="plain tensor"):
        sharded * mask.requires_grad_()


def test_lists_of_which_some_are_whole() -> None:
    run_ranks(check_lists, 2)


def test_norms_that_are_changed_in_place() -> None:
    run_ranks(check_norms_in_place, 2)


def uncertainty(model: Any, out: torch.Tensor) -> Any:
    losses = torch.stack([out.square().mean(), out.abs().mean()])
    return (losses * torch.exp(-model.pair) + model.pair).sum()


MIXED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "two losses' weights": uncertainty,
    "a row": lambda m, out: (out + m.table.weight[1]).mean(),
    "a tied head": lambda m, out: functional.linear(out, m.table.weight).mean(),
    "an anchor": lambda m, _: ((m.head.weight - torch.zeros(3, WIDTH)) ** 2).sum(),
    "autograd.grad": lambda m, out: torch.autograd.grad(out.sum(), [*m.parameters()], allow_unused=True),
    "backward(inputs=)": lambda m, out: out.sum().backward(inputs=[*m.parameters()]),
}


def refuse_mixtures() -> dict[str, str]:
    """With a tensor of which a rank has its own, every rank refuses, whatever it owns; the model trains on."""
    wrong = {}
    for name, make in MIXED.items():
        model = build_sharded(Weighted, BLOCKS)
        rank, _ = rank_and_size()
        try:
            make(model, model(batch(0, rank))).backward()
        except LifecycleError as error:
            if not re.search("plain tensor|autograd graph contains", str(error)):
                wrong[name] = str(error)
        except Exception as error:
            wrong[name] = repr(error)
        else:
            wrong[name] = "silent"
        model.zero_grad()
        run_squared(model, 1, rank)
    return wrong


def test_mixtures_with_plain_tensors_are_refused() -> None:
    assert run_ranks(refuse_mixtures, 2) == [{}, {}]


# -- an optimizer's and a script's own lines --------------------------------------------------------------------------


class Normalized(torch.optim.Optimizer):
    """A script's own optimizer, that looks at whole tensors, too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].lerp_(p.grad, 0.1)
                trust = (p.norm() / (state["average"].norm() + 1)).clamp(0.5, 2)
                p.mul_(1 - group["lr"]).add_(state["average"].sign() * trust, alpha=-group["lr"])


def check_own_lines() -> None:
    """An optimizer of one's own, a step by hand, averages: no warning, and the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, plain = build_sharded(Stack, BLOCKS), build(Stack)
        optimizers = Normalized(model.parameters()), Normalized(plain.parameters())
        assert_trains_alike(model, plain, run_squared, optimizers=optimizers)
        assert all(isinstance(s["average"], ShardedTensor) for s in optimizers[0].state.values())
        optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        reference_step(plain, run_squared, 5)
        sharded_step(model, run_squared, 5)
        teacher, plain_teacher = build_sharded(Stack, BLOCKS), build(Stack)
        for student, average in ((model, teacher), (plain, plain_teacher)):
            with torch.no_grad():
                for p, q in zip(student.parameters(), average.parameters(), strict=True):
                    p -= 0.1 * p.grad  # type: ignore[operator, misc]
                    p.add_(p.grad * 0.05)  # type: ignore[operator]
                    q.mul_(0.9).add_(p, alpha=0.1)
                    p.grad = None
                torch._foreach_lerp_(list(average.parameters()), list(student.parameters()), 0.1)
        assert_trains_alike(teacher, plain_teacher, run_squared, steps=1)
        assert_trains_alike(model, plain, run_squared, steps=1)


def test_own_lines_are_right() -> None:
    run_ranks(check_own_lines, 2)


def check_moved_state() -> None:
    """State is where somebody has put it between steps: in copies with memory of their own."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    optimizers = torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        assert_trains_alike(model, plain, run_squared, steps=2, optimizers=optimizers)
        for state in optimizers[0].state.values():
            for key, value in state.items():
                if isinstance(value, ShardedTensor):
                    state[key] = moved = copy.copy(value)
                    moved._local_tensor = value.to_local().clone()
                    value.fill_(math.nan)


def test_state_may_be_moved() -> None:
    run_ranks(check_moved_state, 2)


def check_averages() -> None:
    """An average of the parameters alone: a deep copy of each is a DTensor of its own."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    averages = [copy.deepcopy(p) for p in model.parameters()], [copy.deepcopy(p) for p in plain.parameters()]
    assert all(isinstance(p, nn.Parameter) and isinstance(p, ShardedTensor) for p in averages[0])
    assert_trains_alike(model, plain, run_squared)
    for average, each in zip(averages, (model, plain), strict=True):
        with torch.no_grad():
            for old, new in zip(average, each.parameters(), strict=True):
                old.lerp_(new, 0.5)
    for own, other in zip(*averages, strict=True):
        torch.testing.assert_close(whole(own), other.detach(), rtol=1e-9, atol=1e-9)


def test_averages_of_deep_copies() -> None:
    run_ranks(check_averages, 2)


# -- refused ----------------------------------------------------------------------------------------------------------


def average_unsharded(model: Any) -> None:
    swa_utils.AveragedModel(build(Stack)).update_parameters(model)
    averages = swa_utils.AveragedModel(build(Stack))
    averages.n_averaged += 1
    averages.update_parameters(model)


def take_weights(model: Any) -> None:
    with torch.no_grad():
        for own, other in zip(model.parameters(), build(Normed).parameters(), strict=True):
            own.copy_(other)


def change_a_column(model: Any) -> None:
    with torch.no_grad():
        model.embed.weight[:, 0].zero_()


def sort_into(model: Any) -> None:
    weight = model.embed.weight.data
    torch.sort(weight, out=(torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.int64)))


def remove_norm(model: Any) -> None:
    changed: Any = build_sharded(Normed, BLOCKS)
    nn.utils.remove_weight_norm(changed.normed)
    run_squared(changed, 0, 0)


class Normed(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.normed(x))


def add_to_replicated(model: Any) -> None:
    weight = model.embed.weight
    ones = distribute_tensor(torch.ones_like(weight.full_tensor()), weight.device_mesh, [Replicate()])
    torch._foreach_add_([ones], [weight.detach()])


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "all_reduce of gradients": (
        lambda m: dist.all_reduce(m.embed.weight.grad),
        "a collective was called with embed.weight",
    ),
    "broadcast of weights": (
        lambda m: dist.broadcast(m.embed.weight.data, 0),
        "a collective was called with embed.weight",
    ),
    "broadcast of parameters": (
        lambda m: dist.broadcast(m.embed.weight, 0),
        "a collective was called with embed.weight",
    ),
    "all_gather": (
        lambda m: dist.all_gather([m.embed.weight] * 2, m.embed.weight),
        "a collective was called with embed.weight",
    ),
    "weights of a plain model": (take_weights, "plain tensor"),
    "an unsharded average": (lambda _: average_unsharded(build_sharded(Stack, BLOCKS)), "plain tensor"),
    "remove_weight_norm": (remove_norm, "normed.weight.*was added to the model"),
    "a column": (change_a_column, "would change a copy of embed.weight"),
    "an element of a column": (lambda m: m.embed.weight.data[:, 0][1].zero_(), "would change a copy of embed.weight"),
    "a transposed row": (lambda m: m.embed.weight.data.T[0].zero_(), "would change a copy of embed.weight"),
    "a copy among several": (lambda m: torch._foreach_zero_([m.embed.weight.data.T]), "would change a copy of embed"),
    "several that are laid out otherwise": (add_to_replicated, r"would change a DTensor .* together with embed.weight"),
    "transposed in place": (lambda m: m.embed.weight.data.t_(), "`t_` of embed.weight would change more than"),
    "two results": (sort_into, "`sort` of embed.weight would change more than"),
    "noise": (lambda m: functional.rrelu(m.embed.weight.data, training=True), "rrelu.* of embed.weight would change"),
    "gradients from autograd": (
        lambda m: torch.autograd.grad(m(batch(0, 0)).sum(), [*m.parameters()]),
        "autograd graph contains",
    ),
    "dlpack": (lambda m: torch.from_dlpack(m.embed.weight.data), "embed.weight has no storage"),
    "other data": (lambda m: setattr(m.embed.weight, "data", torch.zeros(WIDTH, WIDTH)), "cannot assign data"),
    "another gradient": (
        lambda m: setattr(m.embed.weight, "grad", torch.zeros(2)),
        "gradient of embed.weight: expected a",
    ),
    "pickle": (lambda m: pickle.dumps(m.embed.weight), "cannot pickle embed.weight"),
    "pickle of a gradient": (lambda m: pickle.dumps(m.embed.weight.grad), "cannot pickle embed.weight"),
    "pickle of a state dict": (lambda m: torch.save(m.state_dict(), "weights.pt"), "cannot pickle"),
    "safetensors": (lambda m: save_file(m.state_dict(), "weights.safetensors"), "has no storage"),
    "memory": (lambda m: m.embed.weight.untyped_storage(), "embed.weight has no storage"),
}


def refuse_all(folder: str) -> dict[str, str]:
    wrong = {}
    model = build_sharded(Normed, BLOCKS)
    run_squared(model, 0, rank_and_size()[0])
    for name, (use, message) in REFUSED.items():
        try:
            with contextlib.chdir(folder):
                use(model)
        except LifecycleError as error:
            if not re.search(message, str(error)):
                wrong[name] = str(error)
        except Exception as error:
            wrong[name] = repr(error)
        else:
            wrong[name] = "silent"
    return wrong


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    assert run_ranks(refuse_all, 2, str(tmp_path)) == [{}, {}]
    assert not list(tmp_path.glob("*.safetensors"))


def _gathered_bytes() -> list[bool]:
    codes = torch.arange(64, dtype=torch.uint8)
    same = []
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16):
        model = nn.Linear(4, 4)
        model.codes = nn.Parameter(codes.view(dtype), requires_grad=False)
        shard_model(model, unit_modules=[], device=torch.device("cpu"))
        whole = model.codes.full_tensor()  # type: ignore[attr-defined]
        same.append(torch.equal(whole.view(torch.uint8), codes))
        full, half = torch.zeros(64, dtype=torch.uint8), slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
        full[half] = codes[half]
        assert dist.group.WORLD is not None
        NativeCollectives(dist.group.WORLD).all_gather(full.view(dtype), tag=0).wait()
        same.append(torch.equal(full, codes))
        state = full_state_dict(model, rank0_only=False)
        with torch.no_grad():
            model.codes.local.view(torch.uint8).zero_()  # type: ignore[attr-defined]
        load_full_state_dict(model, state if dist.get_rank() == 0 else None)
        same.append(torch.equal(model.codes.full_tensor().view(torch.uint8), codes))  # type: ignore[attr-defined]
        own = codes if dist.get_rank() == 0 else torch.zeros_like(codes)
        other = nn.Linear(4, 4)
        other.register_buffer("codes", own.view(dtype))
        shard_model(other, unit_modules=[], sync_module_states=True, device=torch.device("cpu"))
        same.append(torch.equal(other.codes.view(torch.uint8), codes))  # type: ignore[operator]
    return same


def test_dtypes_that_a_backend_does_not_know_are_gathered_and_sent() -> None:
    assert all(map(all, run_ranks(_gathered_bytes, 2)))
