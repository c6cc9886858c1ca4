"""Optimizers and schedulers that belong to nothing that was prepared: they would train nothing, without a word.

pytest tests/optim/test_optimizers_of_others.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from fullshard.api import Accelerator, accelerate
from fullshard.core.errors import OptimizerError
from tests.distributed import run_ranks

FOREIGN = "do not belong to any prepared model"


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def of(*modules: nn.Module) -> SGD:
    return SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def _step(accelerator: Accelerator, optimizer: Any, *models: nn.Module) -> None:
    x = torch.ones(2, 4)
    accelerator.backward(sum((model(x).sum() for model in models), start=torch.zeros(())))
    optimizer.step()


def test_an_optimizer_of_another_model_is_refused_as_it_is_given() -> None:
    for prepare in (accelerate, accelerator().prepare):
        with pytest.raises(
            OptimizerError,
            match=rf"2 of the . trainable parameters of SGD {FOREIGN}, .* parameter 0 of group 0, shape \(4, 4\)",
        ):
            prepare(linear(), of(linear()))
    named = AdamW([{"params": list(linear().named_parameters())}])
    with pytest.raises(OptimizerError, match=f"AdamW {FOREIGN}, for example weight of group 0"):
        accelerate(linear(), named)


def test_an_optimizer_of_another_model_is_refused_at_its_first_step_if_models_are_prepared_apart() -> None:
    own, (model, other) = accelerator(), (linear(), linear())
    optimizer = own.prepare(of(other))  # whose model might still come
    own.prepare(model)
    with pytest.raises(OptimizerError, match=FOREIGN):
        _step(own, optimizer, model)
    own.prepare(other)
    _step(own, optimizer, model, other)
    optimizer.add_param_group({"params": list(linear().parameters())})
    _step(own, optimizer, model, other)  # on one rank there is nothing to average


def test_parameters_that_belong() -> None:
    own, (first, second, frozen) = accelerator(), (linear(), linear(), linear())
    frozen.requires_grad_(False)
    own.prepare(first, of(first))
    optimizer = own.prepare(second, of(second, first, frozen))[1]  # of an earlier call; without gradients
    _step(own, optimizer, first, second)
    accelerate(linear(), of(linear().requires_grad_(False)))
    kept = nn.Sequential(linear(), linear())
    ignoring = Accelerator(cpu=True, fsdp_plugin={"ignored_modules": "1"})
    ignoring.prepare(kept, of(kept[1]))
    kept.add_module("2", linear())
    ignoring.prepare(kept, of(kept[2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DummyOptim(linear().parameters()), "DummyOptim is a placeholder"),
        (lambda: DummyScheduler(of(linear())), "DummyScheduler is a placeholder"),
        (
            lambda: SimpleNamespace(zero_grad=print, step=print),
            r"types\.SimpleNamespace is not a torch\.optim\.Optimizer",
        ),
    ],
)
def test_stand_ins_for_optimizers_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        accelerator().prepare(linear(), make())


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    own, model = accelerator(), linear()
    inner = of(model)
    model, optimizer = own.prepare(model, inner)
    own_step = of(model)  # which the script steps itself
    stray, direct, raw = (StepLR(o, 1) for o in (of(linear()), inner, own_step))
    stray, direct, raw = own.prepare(stray, direct, raw)
    _step(own, optimizer, model)
    own_step.step()
    direct.step()
    raw.step()
    with pytest.raises(OptimizerError, match="StepLR schedules an SGD that was not prepared"):
        stray.step()


def _loss_with_weights() -> None:
    own, model, loss = accelerator(), linear(), linear()
    held = of(model, loss)
    model, optimizer = own.prepare(model), own.prepare(held)
    with pytest.raises(OptimizerError, match=f"2 of the 4 .*{FOREIGN}.*\\n.*also prepare the module that owns them"):
        own.prepare(model, optimizer)
    with pytest.raises(OptimizerError, match=FOREIGN):
        _step(own, optimizer, model, loss)  # each rank would train weights of its own
    _step(own, optimizer, model, own.prepare(loss))


def test_weights_of_a_loss_that_is_not_prepared_are_refused_on_several_ranks() -> None:
    run_ranks(_loss_with_weights, 2)
