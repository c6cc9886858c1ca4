"""Compilers and function transforms around and inside units.

pytest tests/engine/test_traps_compile.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fullshard.core.errors import FullshardError, LifecycleError
from fullshard.features import ShardedTensor, fully_shard, shard_model
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_at_rest,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    run_squared,
)


class Counter:
    """A compiler backend that counts graphs and the parameters given to each."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, module: Any, inputs: list[Any]) -> Any:
        self.graphs.append(len(module.graph.nodes))
        return module.forward


def check_per_unit(backend: str) -> None:
    torch._dynamo.reset()
    reference, model = build(Stack), build(Stack)
    blocks = [model.get_submodule(name) for name in BLOCKS]
    counter = Counter()
    for block in blocks:
        block.forward = torch.compile(
            block.forward, backend=counter if backend == "counter" else backend, fullgraph=True
        )
    model = shard_model(model, unit_modules=blocks)
    assert_trains_alike(model, reference, run_squared, steps=3)
    if backend == "counter":
        # One graph per block at most: the hooks around it neither break nor repeat it.
        assert 1 <= len(counter.graphs) <= len(blocks)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(7, 0)), reference(batch(7, 0)), rtol=1e-9, atol=1e-9)
    assert_at_rest(model)


@pytest.mark.parametrize("backend", ["counter", "aot_eager"])
def test_compiled_units(backend: str) -> None:
    run_ranks(check_per_unit, 2, backend)


@pytest.mark.full
def test_compiled_units_with_inductor() -> None:
    run_ranks(check_per_unit, 2, "inductor", timeout=280)


def check_whole(how: str) -> None:
    torch._dynamo.reset()
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    if how == "wrapper":
        compiled: Any = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
        compiled = model

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = (compiled if module is model else module)(batch(step, rank)).square().mean()
        loss.backward()
        return loss.detach()

    assert_trains_alike(model, reference, run, steps=3)
    assert_at_rest(model)


@pytest.mark.parametrize("how", [pytest.param("wrapper", marks=pytest.mark.full), "in place"])
def test_compiled_model(how: str) -> None:
    run_ranks(check_whole, 2, how)


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def tied_losses(how: str, counter: CompileCounterWithBackend) -> list[float]:
    """Of ten steps of AdamW. `how`: what is compiled, and whether before or after it is sharded."""
    torch._dynamo.reset()
    model = build(Tied)
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks if how == "blocks before" else ():
        block.compile(backend=counter, fullgraph=True)
    for block in () if how == "one unit" else blocks:
        fully_shard(block)
    fully_shard(model)
    for block in blocks if how == "blocks after" else ():
        block.compile(backend=counter, fullgraph=True)
    if how in ("whole", "one unit"):
        model.compile(backend=counter, fullgraph=how == "one unit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        tokens = batch(step, rank_and_size()[0]).mul(5).long() % 20
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_at_rest(model)
    return losses


def check_graphs(how: str, most: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    expected = tied_losses("", counter)
    assert counter.frame_count == 0
    assert tied_losses(how, counter) == expected
    assert 1 <= counter.frame_count <= most, f"{counter.frame_count} graphs"


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ("blocks before", 1),
        pytest.param("blocks after", 1, marks=pytest.mark.full),
        ("whole", 3),
        pytest.param("one unit", 1, marks=pytest.mark.full),
    ],
)
def test_one_graph_for_all_units_of_a_class(how: str, most: int) -> None:
    """Equal to the bit to the model that is not compiled; `whole`: the embedding's, the blocks' and the head's."""
    run_ranks(check_graphs, 2, how, most)


def check_compiler_after_a_failure() -> None:
    """A hook that raises leaves the compiler as it was."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    block = Block()
    model = nn.Sequential(block).double()
    fully_shard(model)
    model.compile(backend=counter, fullgraph=True)
    weight = block.up._parameters["weight"]
    block.up.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(LifecycleError, match="was replaced"):
        model(batch(0, 0))
    block.up._parameters["weight"] = weight
    model(batch(0, 0))
    assert counter.frame_count == 1


def test_compiled_unit_after_a_failure() -> None:
    run_ranks(check_compiler_after_a_failure, 1)


def check_classes() -> None:
    class Local(Block):
        def other(self) -> int:
            return 1

    def shard() -> Any:
        module = Local()
        fully_shard(module)
        return module

    first, second = shard(), shard()
    assert type(first) is type(second) is not Local
    Local.other = lambda self: 2  # type: ignore[method-assign]
    assert shard().other() == 2, "methods are those that the user's class has at the sharding"
    Local.forward = lambda self, x: Block.forward(self, 2 * x)  # type: ignore[method-assign]
    assert type(shard()) is not type(first), "a compiler makes a graph for each class"


def test_units_of_a_class_share_one_for_each_forward() -> None:
    run_ranks(check_classes, 1)


def check_compiled_child_state() -> None:
    """A submodule wrapped by `torch.compile` carries `_orig_mod` in its keys; its values are sharded like the rest."""
    reference = build(Stack)
    plain: Any = build(Stack)
    plain.head = torch.compile(plain.get_submodule("head"), backend="eager")
    model = shard_model(plain, unit_modules=[plain.get_submodule(name) for name in BLOCKS])
    state = model.state_dict()
    assert "head._orig_mod.weight" in state
    for name, value in state.items():
        assert isinstance(value, ShardedTensor), name
        assert torch.equal(value.full_tensor(), reference.state_dict()[name.replace("._orig_mod", "")])
    model.load_state_dict({name: value.full_tensor() * 2 for name, value in state.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), 2 * reference.state_dict()[name.replace("._orig_mod", "")])


def test_state_dict_with_a_compiled_submodule() -> None:
    run_ranks(check_compiled_child_state, 2)


def penalty(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A gradient penalty: backward through the gradient of the input."""
    x = batch(step, rank).requires_grad_()
    out = model(x).square().mean()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    loss: torch.Tensor = out + gradient.square().sum()
    loss.backward()
    return loss.detach()


def penalty_of_weights(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Gradients that want a gradient themselves cannot be kept in slices."""
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward(create_graph=True)
    return loss.detach()


def check_double_backward(run: Any, strategy: str) -> None:
    """The right numbers or an error of ours; nothing else, and the model works afterwards."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS, strategy=strategy)
    rank, _ = rank_and_size()
    try:
        run(model, 0, rank)
    except FullshardError:
        model.zero_grad()
    else:
        from tests.traps import reference_step

        reference_step(reference, run, 0)
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert_trains_alike(model, reference, run_squared, steps=2)


@pytest.mark.parametrize("run", [penalty, penalty_of_weights])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_double_backward(run: Any, strategy: str) -> None:
    run_ranks(check_double_backward, 2, run, strategy)


def check_functional() -> None:
    """Other parameters given to a sharded model are used or refused, never ignored."""
    model = build_sharded(Stack, BLOCKS)
    torch.manual_seed(9)
    other = Stack().double()
    x = batch(0, 0)
    try:
        got = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
    except FullshardError:
        pass
    else:
        torch.testing.assert_close(got, other(x))
    assert_trains_alike(model, build(Stack), run_squared, steps=1)


def test_functional_call() -> None:
    run_ranks(check_functional, 2)


def check_func_grad() -> None:
    """`torch.func.grad` with respect to the input gives the right numbers or an error of ours."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    x = batch(0, 0)
    expected = torch.func.grad(lambda t: reference(t).square().mean())(x)
    try:
        got = torch.func.grad(lambda t: model(t).square().mean())(x)
    except FullshardError:
        pass
    else:
        torch.testing.assert_close(got, expected)
    assert_trains_alike(model, reference, run_squared, steps=1)
    assert_same_parameters(model, reference)


def test_func_grad() -> None:
    run_ranks(check_func_grad, 2)


def check_parallel_width() -> None:
    """`torch.func.vmap` over a sharded model in evaluation."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    x = batch(0, 0, 3, 4, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model)(x), reference(x))


def test_vmap() -> None:
    run_ranks(check_parallel_width, 2)
