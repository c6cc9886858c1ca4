"""State dicts, copies, moves and buffers of a sharded model.

pytest tests/engine/test_traps_state.py
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.core.errors import CommunicationError, FullshardError, LifecycleError
from fullshard.features import ShardedTensor, unsharded
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    run_squared,
    sharded_parameters,
)


def check_state_dict() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    assert_trains_alike(model, reference, run_squared, steps=1)
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert isinstance(value, ShardedTensor) and value.name == name
        assert value.shape == expected[name].shape
        torch.testing.assert_close(value.full_tensor(), expected[name], rtol=1e-9, atol=1e-9)
    # In the middle of a step the values are the same.
    loss = model(batch(0, 0)).sum()
    assert all(isinstance(value, ShardedTensor) for value in model.state_dict().values())
    assert model.state_dict(keep_vars=True)["head.weight"] is sharded_parameters(model)["head.weight"]
    loss.backward()
    for keeps in (True, False):
        for name, value in model.state_dict(keep_vars=keeps).items():
            assert (value is model.get_parameter(name)) == isinstance(value, nn.Parameter) == keeps


def test_state_dict_values_are_dtensors() -> None:
    run_ranks(check_state_dict, 2)


def check_load() -> None:
    torch.manual_seed(5)
    source = Stack().double()
    for kind in ("full", "own", "slices"):
        model = build_sharded(Stack, BLOCKS)
        before = {name: p.detach().clone() for name, p in sharded_parameters(model).items()}
        addresses = {name: p.local.data_ptr() for name, p in sharded_parameters(model).items()}
        if kind == "full":
            result = model.load_state_dict(source.state_dict())
            assert_same_parameters(model, source)
        else:
            state = model.state_dict()
            if kind == "slices":
                state = {name: value.detach() + 1 for name, value in state.items()}
            result = model.load_state_dict(state)
            for name, parameter in sharded_parameters(model).items():
                expected = before[name] + 1 if kind == "slices" else before[name]
                assert torch.equal(parameter.detach(), expected)
        assert not result.missing_keys and not result.unexpected_keys
        assert addresses == {name: p.local.data_ptr() for name, p in sharded_parameters(model).items()}
    # What was loaded is what is computed with, and trained.
    model = build_sharded(Stack, BLOCKS)
    run_squared(model, 0, 0)
    model.zero_grad()
    model.load_state_dict(source.state_dict())
    assert_trains_alike(model, source, run_squared, steps=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_load_state_dict(world_size: int) -> None:
    run_ranks(check_load, world_size)


def check_load_errors() -> None:
    model, whole = build_sharded(Stack, BLOCKS), build(Stack).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        model.load_state_dict({name: value for name, value in whole.items() if name != "head.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*head\.other"):
        model.load_state_dict({**whole, "head.other": torch.zeros(1)})
    result = model.load_state_dict({"head.bias": whole["head.bias"], "odd": torch.zeros(1)}, strict=False)
    assert "blocks.0.up.weight" in result.missing_keys and result.unexpected_keys == ["odd"]
    for wrong in (torch.zeros(4), torch.zeros(3, WIDTH + 1), torch.zeros(())):
        with pytest.raises(RuntimeError, match=r"head\.weight.*shape in current model is torch\.Size\(\[3, 6\]\)"):
            model.load_state_dict({**whole, "head.weight": wrong})
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({**whole, "head.weight": whole["head.weight"].t().contiguous()})
    with unsharded(model), pytest.raises(LifecycleError, match="assign"):
        model.load_state_dict(whole, assign=True)
    assert_trains_alike(model, build(Stack), run_squared, steps=1)


def test_load_state_dict_errors() -> None:
    run_ranks(check_load_errors, 2)


def check_load_on_one_rank() -> None:
    rank, _ = rank_and_size()
    whole = build(Stack).state_dict()
    model = build_sharded(Stack, BLOCKS)
    if rank == 0:
        model.load_state_dict(whole)
    with pytest.raises(CommunicationError, match=r"weights loaded into 4 units.*weights loaded into 0 units"):
        run_squared(model, 0, rank)
    model = build_sharded(Stack, BLOCKS)
    run_squared(model, 0, rank)
    if rank == 0:
        model.load_state_dict(whole)
    model.zero_grad()
    with pytest.raises(
        CommunicationError, match=rf"rank {rank}.*{4 * (1 - rank)} units on this rank.*only partly loaded"
    ):
        run_squared(model, 1, rank)
    assert all(p.grad is None for p in model.parameters())
    if rank == 1:
        model.load_state_dict(whole)
    run_squared(model, 1, rank)


def test_load_state_dict_on_one_rank_is_noticed() -> None:
    run_ranks(check_load_on_one_rank, 2)


class Shared(nn.Module):
    """One module under two names, which `state_dict` lists twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first
        self.head = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.head(self.second(self.first(x))))
        return out


def check_shared(units: tuple[str, ...]) -> None:
    reference, model = build(Shared), build_sharded(Shared, units)
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert isinstance(value, ShardedTensor), name
        assert torch.equal(value.full_tensor(), expected[name])
    assert state["head.weight"] is state["tied.weight"] and state["head.weight"].names == ("head.weight", "tied.weight")
    torch.manual_seed(5)
    other = Shared().double()
    model.load_state_dict(other.state_dict())
    assert_same_parameters(model, other)
    assert_trains_alike(model, other, run_squared, steps=2)


@pytest.mark.parametrize("units", [(), ("first",), ("first", "head", "tied")], ids=str)
def test_state_dict_of_shared_modules(units: tuple[str, ...]) -> None:
    run_ranks(check_shared, 2, units)


def check_copies() -> None:
    model = build_sharded(Stack, BLOCKS)
    parameter = next(iter(model.parameters()))
    for copied in (model, model.get_submodule("blocks.0")):
        with pytest.raises(LifecycleError, match="does not support deepcopy"):
            copy.deepcopy(copied)
    for pickled in (parameter, model, model.get_submodule("blocks.0"), model.state_dict()):
        with pytest.raises(LifecycleError, match="pickl"):
            pickle.dumps(pickled)
        with pytest.raises(LifecycleError, match="pickl"):
            torch.save(pickled, io.BytesIO())
    # While the root is unsharded too, where the model holds ordinary parameters.
    loss = model(batch(0, 0)).sum()
    with pytest.raises(LifecycleError):
        copy.deepcopy(model)
    with pytest.raises(LifecycleError):
        pickle.dumps(model)
    loss.backward()


def test_copies_are_refused() -> None:
    run_ranks(check_copies, 2)


def check_moves() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    assert_trains_alike(model, reference, run_squared, steps=1)
    assert model.to("cpu") is model and model.double() is model and model.cpu() is model
    for inner in (model, nn.Sequential(model), model.get_submodule("blocks.0"), model.get_submodule("blocks.0.up")):
        for move in ("half", "bfloat16", "float"):
            with pytest.raises(FullshardError, match="sharded"):
                getattr(inner, move)()
    with pytest.raises(FullshardError, match="sharded"):
        model.to_empty(device="meta")
    assert_trains_alike(model, reference, run_squared, steps=2, first=1)


def test_moves_that_change_nothing_and_moves_that_do() -> None:
    run_ranks(check_moves, 2)


def check_replaced() -> None:
    """Replacing a parameter after sharding must not be ignored in silence."""
    model = build_sharded(Stack, BLOCKS)
    model.get_submodule("blocks.1.up").weight = nn.Parameter(torch.zeros(2 * WIDTH + 1, WIDTH, dtype=torch.float64))
    with pytest.raises(FullshardError, match=r"blocks\.1\.up\.weight"):
        model(batch(0, 0))


def test_replaced_parameter_is_noticed() -> None:
    run_ranks(check_replaced, 2)


def check_retied() -> None:
    """Tying again what is tied already, as `tie_weights()` of Transformers does whenever it is asked, is fine."""
    reference, model = build(Shared), build_sharded(Shared, ("first",))
    model.get_submodule("tied").weight = model.get_parameter("head.weight")
    assert_trains_alike(model, reference, run_squared, steps=2)


def test_tying_again_is_fine() -> None:
    run_ranks(check_retied, 2)


def check_hooks() -> None:
    model = build_sharded(Stack, BLOCKS)
    parameter = next(iter(model.parameters()))
    with pytest.raises(LifecycleError, match="register_hook"):
        parameter.register_hook(lambda value: value)


def test_hooks_that_would_never_fire_are_refused() -> None:
    run_ranks(check_hooks, 2)


def check_hook_before() -> None:
    """A gradient hook registered before sharding sees the whole local gradient and may change it."""

    def make() -> nn.Module:
        model = Stack()
        model.embed.weight.register_hook(lambda gradient: 2 * gradient)
        return model

    # `.double()` keeps the parameter object and its hooks.
    assert_trains_alike(build_sharded(make, BLOCKS), build(make), run_squared, steps=2)


def test_hook_registered_before_sharding() -> None:
    run_ranks(check_hook_before, 2)


class Buffered(nn.Module):
    """Persistent and non-persistent buffers, of floats and integers, some of which forward changes."""

    scale: torch.Tensor
    hidden: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("hidden", torch.linspace(-1, 1, WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        out: torch.Tensor = self.linear(x) * self.scale + self.hidden
        return out


class BufferedStack(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Buffered(), Buffered()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def check_buffers() -> None:
    reference, model = build(BufferedStack), build_sharded(BufferedStack, ("blocks.0", "blocks.1"))
    names = [name for name, _ in reference.named_buffers()]
    assert [name for name, _ in model.named_buffers()] == names
    assert list(model.state_dict()) == list(reference.state_dict())
    assert_trains_alike(model, reference, run_squared, steps=2)
    assert model.get_buffer("blocks.0.count").item() == 2
    whole = {name: value.clone() for name, value in reference.state_dict().items()}
    whole["blocks.0.scale"] = whole["blocks.0.scale"] + 1
    model.load_state_dict(whole)
    assert torch.equal(model.get_buffer("blocks.0.scale"), whole["blocks.0.scale"])


def test_buffers() -> None:
    run_ranks(check_buffers, 2)


class Normed(nn.Module):
    """BatchNorm, whose statistics are local to a rank, as in DDP without `broadcast_buffers`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def check_batch_norm() -> None:
    rank, _ = rank_and_size()
    model = build_sharded(Normed, ("blocks.0", "blocks.1"))
    reference: Any = DistributedDataParallel(build(Normed), forward_sync_buffers=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(3):
        losses = [run_squared(m, step, rank) for m in (model, reference)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference.module)
    for name, buffer in reference.module.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9, rank)), reference(batch(9, rank)), rtol=1e-9, atol=1e-9)


def test_batch_norm_like_ddp() -> None:
    run_ranks(check_batch_norm, 2)


def check_class() -> None:
    """The class keeps its name and stays a subclass, and a unit in a container is found by type."""
    model = build_sharded(Stack, BLOCKS)
    assert isinstance(model, Stack) and type(model).__name__ == "Stack"
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in model.blocks)
    assert type(model).__module__ == Stack.__module__


def test_class_keeps_its_name() -> None:
    run_ranks(check_class, 1)


def check_freed() -> None:
    model = build_sharded(Stack, BLOCKS)
    model(batch(0, 0)).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_model_that_nobody_holds_is_freed() -> None:
    run_ranks(check_freed, 2)
