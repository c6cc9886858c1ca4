"""Trains a sharded model next to an unsharded one and compares every number.

The reference is one model that sees the batches of all ranks in turn and averages their gradients, which is what data
parallel training means. Everything is float64, so that an element which is only slightly wrong is wrong by far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.events import Event
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features import ShardedParameter, shard_model
from tests.differential import own_part

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module, int, int], torch.Tensor]
"""Forward and backward of one step: `(model, step, rank)` to the loss, detached."""

WIDTH = 6
"""Not a multiple of anything the layout aligns to."""


class Block(nn.Module):
    """A residual block whose parameters are all used and none of which is a square matrix."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.up(x))
        out: torch.Tensor = x + self.dropout(self.down(hidden)) * self.scale
        return out


class Stack(nn.Module):
    """An input layer, blocks and a head."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def batch(step: int, rank: int, *shape: int) -> torch.Tensor:
    """A batch of normal numbers, float64, other ones for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator, dtype=torch.float64)


def run_squared(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The plainest step: the mean of the squared output."""
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def build(make: Build) -> nn.Module:
    """`make()` from seed 0, in float64."""
    torch.manual_seed(0)
    return make().double()


def build_sharded(make: Build, units: Sequence[str], *, events: list[Event] | None = None, **options: Any) -> nn.Module:
    """The same model, sharded, with the submodules called `units` as units."""
    model = build(make)
    sink = None if events is None else events.append
    return shard_model(model, unit_modules=[model.get_submodule(name) for name in units], event_sink=sink, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that moves a parameter with a zero gradient but not one without a gradient."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)


def rank_and_size() -> tuple[int, int]:
    """This rank and the world size; one rank alone without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def reference_step(reference: nn.Module, run: Run, step: int) -> list[torch.Tensor]:
    """Run the step of every rank and leave the mean gradient; returns every rank's loss."""
    _, size = rank_and_size()
    losses = []
    for rank in range(size):
        torch.manual_seed(100 * step + rank)
        losses.append(run(reference, step, rank))
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= size
    return losses


def sharded_step(model: nn.Module, run: Run, step: int) -> torch.Tensor:
    """Run this rank's step, with the random numbers the reference used for it."""
    rank, _ = rank_and_size()
    torch.manual_seed(100 * step + rank)
    return run(model, step, rank)


def whole_gradient(parameter: ShardedParameter) -> torch.Tensor | None:
    """The unsharded gradient, None if there is none. A collective."""
    return None if parameter.grad is None else parameter.grad.full_tensor()


def own_elements(sharded: ShardedTensor, whole: torch.Tensor) -> torch.Tensor:
    """Those of `whole`, flattened, that this rank has of a tensor that is sharded like `sharded`."""
    interval = sharded.spec.interval
    return whole.detach().reshape(-1)[interval.start : interval.stop]


def sharded_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """All parameters by name; every one must be sharded."""
    found: dict[str, ShardedParameter] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter), f"{name} is a {type(parameter).__name__}"
        found[name] = parameter
    return found


def assert_close(got: Any, expected: Any, tolerance: float, *, what: str) -> None:
    """`torch.testing.assert_close` whose message says what was compared."""

    def message(text: str) -> str:
        return f"{what}: {text}"

    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=message)


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float = 1e-9) -> None:
    """Every gradient of the sharded model equals the reference's, and is None where that is None."""
    expected = dict(reference.named_parameters())
    parameters = sharded_parameters(model)
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        want, got = expected[name].grad, parameter.grad
        assert (want is None) == (got is None), f"{name}: reference {want is not None}, sharded {got is not None}"
        if want is not None and got is not None:
            own = own_part(got).reshape(-1)
            assert_close(own, own_elements(parameter, want), tolerance, what=f"gradient of {name}")


def assert_same_parameters(model: nn.Module, reference: nn.Module, tolerance: float = 1e-9) -> None:
    """Every parameter of the sharded model equals the reference's: each rank compares its elements."""
    expected = dict(reference.named_parameters())
    for name, parameter in sharded_parameters(model).items():
        own = own_part(parameter).reshape(-1)
        assert_close(own, own_elements(parameter, expected[name]), tolerance, what=f"parameter {name}")


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module,
    run: Run,
    *,
    steps: int = 3,
    first: int = 0,
    tolerance: float = 1e-9,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
) -> None:
    """Train both for some steps; every loss, gradient and parameter agrees on the way."""
    optimizer, expected_optimizer = optimizers or (adamw(model.parameters()), adamw(reference.parameters()))
    rank, _ = rank_and_size()
    for step in range(first, first + steps):
        losses = reference_step(reference, run, step)
        loss = sharded_step(model, run, step)
        torch.testing.assert_close(loss, losses[rank], rtol=tolerance, atol=tolerance)
        assert_same_gradients(model, reference, tolerance)
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
        assert_same_parameters(model, reference, tolerance)


def train_beside_reference(make: Build, run: Run, units: Sequence[str] = (), **options: Any) -> None:
    """Body of a rank: build `make` twice, shard one, and train both."""
    steps, tolerance = options.pop("steps", 3), options.pop("tolerance", 1e-9)
    reference = build(make)
    model = build_sharded(make, units, **options)
    assert_trains_alike(model, reference, run, steps=steps, tolerance=tolerance)
    assert_at_rest(model)


def unsharded_nbytes(model: nn.Module) -> dict[str, int]:
    """Bytes of unsharded parameter memory that each unit holds right now."""
    from fullshard.features import units_of

    return {unit.name: sum(bucket.buffer.nbytes for bucket in unit.buckets) for unit in units_of(model)}


def assert_at_rest(model: nn.Module) -> None:
    """No unit holds unsharded parameters or gradients."""
    from fullshard.features import units_of

    held = {name: nbytes for name, nbytes in unsharded_nbytes(model).items() if nbytes}
    assert not held, f"still unsharded: {held}"
    for unit in units_of(model):
        for bucket in unit.buckets:
            assert not bucket.has_gradient or not bucket.gradient.unsharded.exists, f"{unit.name}: gradient is held"
