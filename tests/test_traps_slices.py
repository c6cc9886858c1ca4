"""What a script's own lines do with sharded parameters at rest: right, said to be local, or refused on all ranks.

pytest tests/test_traps_slices.py
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils

from fullshard.core.errors import LifecycleError
from fullshard.engine import slices
from fullshard.engine.slices import Slice
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


# -- in a loss ------------------------------------------------------------------------------------------------------


def norms(model: Any, _out: torch.Tensor) -> Any:
    return sum(torch.norm(p) for p in model.parameters())


def uncertainty(model: Any, out: torch.Tensor) -> Any:
    losses = torch.stack([out.square().mean(), out.abs().mean()])
    return (losses * torch.exp(-model.pair) + model.pair).sum()


WRONG: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "torch.norm(p)": (norms, r"a loss made of (vector_)?norm of this rank's slice"),
    "p.norm()": (lambda m, _: sum(p.norm() for p in m.parameters()), "a loss made of (vector_)?norm"),
    "vector_norm": (
        lambda m, _: sum(torch.linalg.vector_norm(p) for p in m.parameters()),
        "a loss made of vector_norm",
    ),
    "(p - q).abs().mean()": (lambda m, _: (m.head.weight - 1).abs().mean(), "a loss made of mean.*head.weight"),
    "torch.max(p)": (lambda m, _: torch.logsumexp(m.embed.weight, 0), "a loss made of logsumexp"),
    "two losses' weights": (uncertainty, r"`mul` of sharded parameter pair \(2,\)"),
    "one loss's weight": (lambda m, out: out.mean() * torch.exp(-m.scalar) + m.scalar, "`backward` of .* scalar"),
    "a temperature": (lambda m, out: (out * m.single.exp()).mean(), r"`mul` of sharded parameter single \(1,\)"),
    "a row": (lambda m, out: (out + m.table.weight[1]).mean(), r"`\[\.\.\.\]` of sharded parameter table.weight"),
    "a tied head": (
        lambda m, out: functional.linear(out, m.table.weight).mean(),
        "`t` of sharded parameter table.weight",
    ),
    "an anchor": (lambda m, _: ((m.head.weight - torch.zeros(3, WIDTH)) ** 2).sum(), "`sub` of sharded .*head.weight"),
    "autograd.grad": (
        lambda m, out: torch.autograd.grad(out.sum(), [*m.parameters()], allow_unused=True),
        "no graph has",
    ),
    "backward(inputs=)": (lambda m, out: out.sum().backward(inputs=[*m.parameters()]), "no graph has sharded .*scalar"),
}


def refuse_losses() -> dict[str, str]:
    """Every rank refuses, whether it owns all of a parameter or nothing; the model trains on."""
    wrong = {}
    for name, (make, message) in WRONG.items():
        model = build_sharded(Weighted, BLOCKS)
        rank, _ = rank_and_size()
        try:
            loss = make(model, model(batch(0, rank)))
            loss.backward()
        except (LifecycleError, RuntimeError) as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if not re.search(message, text) and "of which rank" not in text:
                wrong[name] = text
        else:
            wrong[name] = "silent"
        model.zero_grad()
        run_squared(model, 1, rank)
    return wrong


@pytest.mark.filterwarnings("ignore:.*slice")
def test_losses_of_slices_that_would_be_wrong_are_refused() -> None:
    assert run_ranks(refuse_losses, 2) == [{}, {}]


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "p.pow(2).sum()": lambda m: sum(p.pow(2).sum() for p in m.parameters()),
    "torch.sum(p * p)": lambda m: sum(torch.sum(p * p) for p in m.parameters()),
    "torch.square(p).sum()": lambda m: sum(torch.square(p).sum() for p in m.parameters()),
    "torch.abs(p).sum()": lambda m: sum(torch.abs(p).sum() for p in m.parameters()),
}


def check_penalties() -> None:
    """A sum over elements has the right gradient, also of what was frozen when it was sharded; its value is said."""
    for name, penalty in PENALTIES.items():
        model, plain = build_sharded(frozen, BLOCKS), build(frozen)
        for each in (model, plain):
            each.requires_grad_(True)
        penalised = functools.partial(run_penalised, penalty=penalty)
        slices._has_warned = False
        with pytest.warns(UserWarning, match="this rank's slice"):
            sharded_step(model, penalised, 0)
        reference_step(plain, penalised, 0)
        assert_same_gradients(model, plain)
        model.requires_grad_(False)
        slices._has_warned = False
        with pytest.warns(UserWarning, match="this rank's slice"):
            assert penalty(model) is not None, name


def frozen() -> nn.Module:
    return Stack().requires_grad_(False)


def run_penalised(model: nn.Module, step: int, rank: int, *, penalty: Callable[[nn.Module], Any]) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean() + 0.1 * penalty(model)
    loss.backward()
    return loss.detach()


def test_penalties_that_are_sums_have_the_right_gradient() -> None:
    run_ranks(check_penalties, 2)


# -- numbers, and what is right ---------------------------------------------------------------------------------------

LOCAL: dict[str, Callable[[Any], Any]] = {
    "torch.norm": torch.norm,
    "torch.linalg.vector_norm": torch.linalg.vector_norm,
    "torch.linalg.norm": torch.linalg.norm,
    "torch.sum": torch.sum,
    "torch.isnan(p).any()": lambda p: torch.isnan(p).any(),
    "torch.equal": lambda p: torch.equal(p, p.clone()),
    "torch.cat": lambda p: torch.cat([p, p]),
    "torch.exp(p).sum()": lambda p: torch.exp(p).sum(),
    "p.view(-1).norm()": lambda p: p.view(-1).norm(),
    "p.flatten().norm()": lambda p: p.flatten().norm(),
    "torch._foreach_norm": lambda p: torch._foreach_norm([p]),
}


def check_numbers() -> None:
    parameter: Any = build_sharded(Stack, BLOCKS).get_parameter("embed.weight")
    for name, function in LOCAL.items():
        for without in (torch.no_grad(), contextlib.nullcontext()):
            slices._has_warned = False
            with pytest.warns(UserWarning, match="this rank's slice") as seen, without:
                function(parameter)
            assert seen[0].filename == __file__, name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (torch.exp(parameter), torch.zeros_like(parameter), 2 * parameter, -parameter, parameter > 0):
            assert isinstance(made, Slice)
            made.full_tensor()
        with torch.no_grad():
            nn.init.constant_(parameter, 0.5)
        assert parameter.full_tensor().eq(0.5).all()
        assert parameter.requires_grad_() is parameter.clamp_(0, 1) if not parameter.requires_grad else True
        alone: Any = build_sharded(Stack, BLOCKS, strategy="NO_SHARD").get_parameter("embed.weight")
        assert torch.norm(alone) > 0


def test_functions_of_a_parameter_say_that_they_are_local() -> None:
    run_ranks(check_numbers, 2)


class Normalised(torch.optim.Optimizer):
    """A script's own optimizer, element by element."""

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
                p.mul_(1 - group["lr"]).add_(state["average"].sign(), alpha=-group["lr"])


def check_own_lines() -> None:
    """An optimizer of one's own, a step by hand, averages, a perturbation: no warning, and the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, plain = build_sharded(Stack, BLOCKS), build(Stack)
        assert_trains_alike(
            model, plain, run_squared, optimizers=(Normalised(model.parameters()), Normalised(plain.parameters()))
        )
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


def test_own_lines_that_treat_elements_alike_are_right() -> None:
    run_ranks(check_own_lines, 2)


# -- whole tensors, collectives, tools ---------------------------------------------------------------------------------


def average_unsharded(model: Any) -> None:
    averages = swa_utils.AveragedModel(build(Stack))
    averages.update_parameters(model)


def take_weights(model: Any) -> None:
    with torch.no_grad():
        for own, other in zip(model.parameters(), build(Weighted).parameters(), strict=True):
            own.copy_(other)


class Upper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def parametrize_upper(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.embed, "weight", Upper())


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "all_reduce of gradients": (lambda m: dist.all_reduce(m.embed.weight.grad), "a collective of the slice"),
    "broadcast of weights": (lambda m: dist.broadcast(m.embed.weight.data, 0), "a collective of the slice"),
    "broadcast of parameters": (lambda m: dist.broadcast(m.embed.weight, 0), "a collective of the slice"),
    "all_gather": (lambda m: dist.all_gather([m.embed.weight] * 2, m.embed.weight), "a collective of the slice"),
    "weights of a plain model": (take_weights, "`copy_` of sharded parameter"),
    "an unsharded average": (
        lambda _: average_unsharded(build_sharded(Stack, BLOCKS)),
        "`(copy_|_foreach_lerp_)` of sharded parameter",
    ),
    "remove_weight_norm": (lambda m: nn.utils.remove_weight_norm(m.normed), "of sharded parameter normed.weight_"),
    "a parametrization": (parametrize_upper, "`set_` of sharded parameter embed.weight"),
}


class Normed(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.normed(x))


def refuse_all() -> dict[str, str]:
    wrong = {}
    model = build_sharded(Normed, BLOCKS)
    run_squared(model, 0, rank_and_size()[0])
    for name, (use, message) in REFUSED.items():
        try:
            use(model)
        except LifecycleError as error:
            if not re.search(message, str(error)):
                wrong[name] = str(error)
        except Exception as error:
            wrong[name] = repr(error)
        else:
            wrong[name] = "silent"
    return wrong


def test_whole_tensors_and_collectives_are_refused() -> None:
    assert run_ranks(refuse_all, 2) == [{}, {}]
