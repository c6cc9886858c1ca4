"""What an optimizer that steps in backward cannot do is an error, at once and with a way out.

pytest tests/features/steps_in_backward/test_step_in_backward_refused.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import LifecycleError, OptimizerError
from fullshard.features import MixedPrecisionPolicy, shard_model, unsharded
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.steps_in_backward.stepper import step_in_backward
from tests.distributed import run_ranks
from tests.optimizers import Make
from tests.stepping import make_model, run_backward, stepping
from tests.traps import BLOCKS, WIDTH, Stack, batch


def clip_norm(model: nn.Module, optimizer: optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_value(model: nn.Module, optimizer: optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def unscale(model: nn.Module, optimizer: optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def drop(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("use", [clip_norm, clip_value, unscale, drop])
def test_whoever_wants_gradients_after_it_is_told(use: Callable[[nn.Module, optim.Optimizer], None]) -> None:
    model, optimizer = stepping()
    run_backward(model, 0)
    with pytest.raises(LifecycleError, match="the backward has already consumed its gradient"):
        use(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1)


def test_a_second_backward() -> None:
    model, optimizer = stepping()
    run_backward(model, 0)
    with pytest.raises(
        LifecycleError, match=r"a second backward ran before optimizer.step\(\), but AdamW already stepped"
    ):
        run_backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1)


def test_a_backward_that_fails_half_way() -> None:
    """What has stepped has stepped, and nobody goes on from there without being told."""
    model, optimizer = stepping()
    run_backward(model, 0)
    optimizer.step()
    handle = model.get_submodule("blocks.0").register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_backward(model, 1)
    handle.remove()
    with pytest.raises(LifecycleError, match="load a checkpoint"):
        run_backward(model, 2)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 2)


def test_a_closure() -> None:
    model, optimizer = stepping()
    with pytest.raises(LifecycleError, match=r"step\(closure\)"):
        optimizer.step(lambda: float(run_backward(model, 0)))


def test_hyper_parameters_that_come_too_late() -> None:
    model, optimizer = stepping()
    optimizer.param_groups[0]["lr"] = 0.5
    run_backward(model, 0)
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(LifecycleError, match=r"lr of parameter group 0 was changed \(from 0.5 to 0.25"):
        optimizer.step()
    model = make_model("plain")
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    step_in_backward(optimizer)
    run_backward(model, 0)
    optimizer.step()
    run_backward(model, 0)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    with pytest.raises(LifecycleError, match="lr of parameter group 0"):
        optimizer.step()


def test_a_hook_before_the_step() -> None:
    model, optimizer = stepping()
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(LifecycleError, match="step pre-hook"):
        run_backward(model, 0)
    handle.remove()
    run_backward(model, 0)


def test_gradients_that_want_a_gradient() -> None:
    """Where parameters stay whole, too, so that nothing else is in the way."""
    for kind in ("plain", "NO_SHARD"):
        model, optimizer = stepping(kind)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = model(batch(0, 0).to(before[0].dtype)).square().mean()
        with pytest.raises(LifecycleError, match="AdamW steps in backward, which does not support create_graph=True"):
            loss.backward(create_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        run_backward(model, 0)
        optimizer.step()


def test_inside_unsharded() -> None:
    model, _ = stepping()
    with unsharded(model), pytest.raises(LifecycleError, match="is kept unsharded"):
        run_backward(model, 0)


def test_shared_parameters_under_reentrant_checkpointing() -> None:
    torch.manual_seed(0)
    model = Stack()
    blocks = [model.get_submodule(name) for name in BLOCKS]
    blocks[2].up.weight = blocks[0].up.weight  # type: ignore[union-attr]
    checkpoint_modules(model, blocks, reentrant=True)
    shard_model(model, unit_modules=[])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step_in_backward(optimizer)
    run_backward(model, 0)  # one unit, which is complete at the end only
    optimizer.step()


class Own(optim.AdamW):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda parameters: Own(parameters), "Own cannot step in backward"),
        (lambda parameters: optim.AdamW(parameters, differentiable=True), "differentiable"),
        (lambda parameters: optim.AdamW([nn.Parameter(torch.ones(2))]), "holds no sharded parameter"),
        (lambda parameters: optim.LBFGS(parameters), "needs complete tensors"),
    ],
)
def test_refused_optimizers(make: Make, words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        step_in_backward(make(make_model("plain").parameters()))


def test_an_optimizer_in_place_of_one_that_was_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        model, dropped = stepping()
        vars(dropped)["itself"] = dropped  # as a wrapper of its `step` does
        del dropped
        step_in_backward(optim.AdamW(model.parameters()))
    finally:
        gc.enable()


def test_refused_models() -> None:
    model = shard_model(Stack(), unit_modules=[], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    with pytest.raises(OptimizerError, match="float16 with scaled gradients"):
        step_in_backward(optim.AdamW(model.parameters()))
    other, _first = stepping()
    with pytest.raises(OptimizerError, match=r"shares parameter .* with another optimizer that steps in backward"):
        step_in_backward(optim.SGD(other.parameters(), lr=0.1))


def test_an_optimizer_that_is_gone_steps_no_more() -> None:
    model, optimizer = stepping()
    step_in_backward(optimizer)  # again: nothing
    run_backward(model, 0)
    optimizer.step()
    del optimizer
    gc.collect()
    before = [p.detach().clone() for p in model.parameters()]
    run_backward(model, 1)
    assert all(torch.equal(a, b) and b.grad is not None for a, b in zip(before, model.parameters(), strict=True))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, with_middle: bool) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(self.middle(hidden) if with_middle else hidden.tanh())  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A unit in two reentrant checkpoints, in one of which a unit within it is used, too."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(1, requires_grad=True)
        first, second = (
            checkpoint(lambda s, middle=middle: self.part(x, with_middle=middle) * s, scale, use_reentrant=True)
            for middle in (True, False)
        )
        return first + second  # type: ignore[no-any-return]


def stepped_between_two_gradients() -> str:
    """The part's optimizer steps when the unit within has its turn, with some gradients of the second use there."""
    torch.manual_seed(0)
    model = Shared()
    shard_model(model, unit_modules=[model.part, model.part.middle], device=torch.device("cpu"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step_in_backward(optimizer)
    with pytest.raises(LifecycleError) as caught:
        model(torch.ones(2, WIDTH)).square().sum().backward()
    return str(caught.value)


def test_gradients_that_come_after_the_step_are_refused_one_by_one() -> None:
    for message in run_ranks(stepped_between_two_gradients, 2):
        assert "another part of its gradient arrived in a backward that had already consumed the gradient" in message
