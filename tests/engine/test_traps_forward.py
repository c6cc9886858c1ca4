"""What goes in and out of a unit, and how often it runs: numbers against an unsharded reference.

pytest tests/engine/test_traps_forward.py
"""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.config.switches import COMM
from tests.distributed import run_ranks
from tests.traps import BLOCKS, WIDTH, Block, Stack, batch, run_squared, train_beside_reference


@dataclass
class Record:
    """An output that torch knows nothing about."""

    hidden: torch.Tensor
    note: str = "kept"


Pair = namedtuple("Pair", ["hidden", "extra"])


class Opaque:
    """An output no code can look into."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def reveal(self) -> torch.Tensor:
        return self._hidden


class Returning(nn.Module):
    """Blocks whose output is packed in a container, which the next one unpacks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Packing(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        value: Any = pack(self.kind, x)
        for block in self.blocks:
            value = block(value)
        return value


class Packing(Block):
    """One of those blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value: Any) -> Any:
        return pack(self.kind, super().forward(unpack(value)))


def pack(kind: str, x: torch.Tensor) -> Any:
    if kind == "model_output":
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=x)
    makers: dict[str, Any] = {
        "dict": lambda: {"hidden": x, "count": 3, "nothing": None},
        "tuple": lambda: (x, None, "text"),
        "nested": lambda: [{"deep": (x,)}],
        "namedtuple": lambda: Pair(x, 1),
        "dataclass": lambda: Record(x),
        "opaque": lambda: Opaque(x),
    }
    return makers[kind]()


def unpack(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        if isinstance(value, Record):
            value = value.hidden
        elif isinstance(value, Opaque):
            value = value.reveal()
        elif isinstance(value, dict):
            value = next(iter(value.values()))
        else:
            value = value[0]
    return value


def run_unpacked(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    output = model(batch(step, rank))
    assert type(output) is type(pack(model.kind, torch.zeros(())))  # type: ignore[arg-type]
    loss = unpack(output).square().mean()
    loss.backward()
    return loss.detach()


def make_returning(kind: str) -> Any:
    return lambda: Returning(kind)


def check_container(kind: str) -> None:
    train_beside_reference(make_returning(kind), run_unpacked, BLOCKS)


@pytest.mark.parametrize("kind", ["dict", "tuple", "nested", "namedtuple", "dataclass", "model_output", "opaque"])
def test_output_containers(kind: str) -> None:
    run_ranks(check_container, 2, kind)


def run_input_wants_gradient(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    # The gradient of the input is part of what is compared.
    assert x.grad is not None
    both: torch.Tensor = torch.cat([loss.detach()[None], x.grad.flatten()])
    return both


def run_keyword(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(x=batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def run_twice_one_backward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank)
    loss: torch.Tensor = (model(x) * model(x + 0.5)).mean() + model(x).square().mean()
    loss.backward()
    return loss.detach()


def run_siamese(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    left = model(batch(step, rank))
    right = model(batch(step + 50, rank).requires_grad_())
    loss: torch.Tensor = (left - right).square().mean() + (left * right).mean()
    loss.backward()
    return loss.detach()


def run_first_graph_thrown_away(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    model(batch(step + 9, rank)).sum()
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def run_later_forward_backward_first(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    first, second = model(batch(step, rank)).square().mean(), model(batch(step + 50, rank)).square().mean()
    second.backward()
    third = model(batch(step + 70, rank)).abs().mean()
    first.backward()
    third.backward()
    return torch.stack([first, second, third]).detach()


@pytest.mark.parametrize(
    "run",
    [
        run_squared,
        run_input_wants_gradient,
        run_keyword,
        run_twice_one_backward,
        run_siamese,
        run_first_graph_thrown_away,
        run_later_forward_backward_first,
    ],
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=pytest.mark.full)])
def test_forwards_per_backward(run: Any, strategy: str) -> None:
    run_ranks(check_stack, 2, run, strategy)


def check_stack(run: Any, strategy: str) -> None:
    train_beside_reference(Stack, run, BLOCKS, strategy=strategy)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_more_ranks_than_two(world_size: int) -> None:
    run_ranks(check_stack, world_size, run_siamese, "FULL_SHARD")


class Albert(nn.Module):
    """One block used several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.other(self.block(x))
        out: torch.Tensor = self.block(x)
        return out


class Towers(nn.Module):
    """A shared encoder between two heads, of which each sees another input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.query, self.key = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.split(2)
        product: torch.Tensor = self.query(self.encoder(first)) @ self.key(self.encoder(second)).T
        return product


class Nested(nn.Module):
    """Units in units in units; every level has parameters of its own before and after the inner ones."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module = Nested(depth - 1) if depth > 1 else Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))
        return out


class TwoStreams(nn.Module):
    """Blocks that take and return two tensors, the second of which skips every second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, x * 2
        for block in self.blocks:
            left, right = block(left, memory=right)
        return left


class Mixing(nn.Module):
    """One of those blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.a(x) + memory), self.b(memory)


class Recurrent(nn.Module):
    """An LSTM, which keeps references to its parameters of its own, and attention, which reads them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x[None])
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]  # type: ignore[no-any-return]


class Parametrized(nn.Module):
    """Weights computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Odd(nn.Module):
    """Parameters a layout could trip over: scalar, empty, one element, non-contiguous, large beside small."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t())
        self.large = nn.Parameter(torch.randn(5, 37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.transposed @ self.large) * self.scalar + self.single + self.empty.sum()


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (Albert, ("block", "other")),
        (Towers, ("encoder",)),
        (Towers, ("encoder", "encoder.0", "encoder.1")),
        (Nested, ("inner", "inner.inner", "inner.inner.inner")),
        (TwoStreams, BLOCKS),
        (Recurrent, ("lstm", "attention")),
        (Parametrized, ("first", "second")),
        (Odd, ()),
    ],
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.full)])
def test_model_shapes(make: Any, units: tuple[str, ...], strategy: str) -> None:
    run_ranks(check_make, 2, make, units, strategy)


def check_make(make: Any, units: tuple[str, ...], strategy: str = "FULL_SHARD") -> None:
    train_beside_reference(make, run_squared, units, strategy=strategy)


class Appending(nn.Module):
    """Blocks that also leave their output in a list the caller gave them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendingBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        history: list[torch.Tensor] = [x.clone().requires_grad_()]
        for block in self.blocks:
            x = block(x, history)
        assert len(history) == 4, "the unit was given a copy of the list"
        return x + torch.stack(history).sum(0)


class AppendingBlock(Block):
    """One of those blocks."""

    def forward(self, x: torch.Tensor, history: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        out = super().forward(x)
        history.append(out)
        return out


def test_input_container_is_not_copied() -> None:
    run_ranks(check_make, 2, Appending, BLOCKS)


class SideEffect(nn.Module):
    """A router whose auxiliary loss is left on the module, computed after the output (mixture-of-experts style)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SideEffectBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        auxiliary = [block.auxiliary for block in self.blocks if isinstance(block, SideEffectBlock)]
        return x.square().mean() + 0.1 * torch.stack(auxiliary).sum()


class SideEffectBlock(Block):
    """One of those blocks."""

    auxiliary: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.auxiliary = self.second(torch.tanh(self.gate(x))).square().mean()
        return out


def test_loss_left_on_the_module() -> None:
    run_ranks(check_make, 2, SideEffect, BLOCKS, "SHARD_GRAD_OP")


def check_over_gloo(*arguments: Any) -> None:
    os.environ[COMM.name] = "gloo"
    try:
        check_make(*arguments)
    finally:
        del os.environ[COMM.name]


def test_loss_left_on_the_module_when_parameters_are_freed() -> None:
    """Backward reaches it before any output of its unit, while the gather that is ahead is under way.

    Where ranks share memory nothing is taken away, and main weights do not change before all gradients are there.
    """
    run_ranks(check_make, 2, SideEffect, BLOCKS, "FULL_SHARD")
    with pytest.raises(RuntimeError, match="before any of its outputs, while they were still being gathered"):
        run_ranks(check_over_gloo, 2, SideEffect, BLOCKS, "FULL_SHARD")


class Cached(nn.Module):
    """Units whose output is a container that autograd can be followed through, beside one that hides a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            x, cache = block(x)
            total = total + cache.reveal().square().mean()
        return total  # the last output itself is unused


class CachedBlock(Block):
    """One of those blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.key2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Opaque]:  # type: ignore[override]
        return super().forward(x), Opaque(self.key2(torch.tanh(self.key(x))))


def test_tensor_hidden_beside_visible_output() -> None:
    """The same for a tensor inside an object that cannot be looked into; without freeing it is right."""
    run_ranks(check_make, 2, Cached, BLOCKS, "SHARD_GRAD_OP")
    run_ranks(check_make, 2, Cached, BLOCKS, "FULL_SHARD")
    with pytest.raises(RuntimeError, match="storage of size 0"):
        run_ranks(check_over_gloo, 2, Cached, BLOCKS, "FULL_SHARD")


class Detached(nn.Module):
    """A unit whose output wants no gradient although its parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x).detach() if index == 0 else block(x)
        return x


class FrozenTeacher(nn.Module):
    """A block run under `no_grad` first and with gradients after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.blocks[2](self.blocks[0](x))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = x - target
        return out


@pytest.mark.parametrize("make", [Detached, FrozenTeacher])
def test_gradients_off_inside_the_model(make: Any) -> None:
    run_ranks(check_make, 2, make, BLOCKS)


def check_dropout(strategy: str) -> None:
    train_beside_reference(lambda: Stack(dropout=0.4), run_squared, BLOCKS, strategy=strategy)


def test_dropout_draws_the_same_numbers() -> None:
    run_ranks(check_dropout, 2, "FULL_SHARD")


class Subclass(torch.Tensor):
    """A tensor subclass as an input."""


def run_subclass(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank).as_subclass(Subclass).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    value: torch.Tensor = loss.detach().as_subclass(torch.Tensor)
    return value


def test_subclass_input() -> None:
    run_ranks(check_stack, 2, run_subclass, "FULL_SHARD")
