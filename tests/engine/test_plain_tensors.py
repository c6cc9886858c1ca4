"""torch's optimizers on plain tensors: one process's bits, whatever a script does between its steps.

pytest tests/engine/test_plain_tensors.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.plain_tensors import ELEMENT_WISE
from fullshard.features import fully_shard, no_sync
from tests.differential import own_part
from tests.distributed import run_ranks
from tests.optimizers import Make, makers
from tests.traps import (
    BLOCKS,
    Stack,
    build,
    build_sharded,
    own_elements,
    run_squared,
    sharded_parameters,
    sharded_step,
    whole_gradient,
)

STEPS = 5
Between = Callable[[int, nn.Module, optim.Optimizer], None]


MAKE: dict[str, Make] = {
    **makers(ELEMENT_WISE),
    "RMSprop centered": lambda parameters: optim.RMSprop(parameters, lr=1e-2, momentum=0.9, centered=True),
}


def nothing(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Between backward and the optimizer step, nothing."""


def clip(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Gradients are scaled in place."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def drop_one(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """One parameter takes no part in the third step, so its step count lags behind from there."""
    if step == 2:
        next(model.parameters()).grad = None


def start_late(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """One parameter takes no part in the first step."""
    if step == 0:
        list(model.parameters())[1].grad = None


def drop_all(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Nothing has a gradient in the second step."""
    if step == 1:
        optimizer.zero_grad()


def replace_one(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """A script puts a gradient of its own in place of ours."""
    parameter = next(model.parameters())
    if step == 1 and parameter.grad is not None:
        parameter.grad = parameter.grad * 2


def reload(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """The state goes through `state_dict` and back."""
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def fall_behind(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Neighbors whose step counts differ are loaded."""
    if step == 0:
        list(model.parameters())[1].grad = None
    reload(step, model, optimizer)


def replace_state(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """A script changes a state behind the optimizer's back."""
    if step == 2:
        parameter = next(p for p in model.parameters() if p.shape.numel() > 1)
        for key, value in optimizer.state[parameter].items():
            if value.dim():
                optimizer.state[parameter][key] = value + 1


def restart(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """A script forgets the state."""
    if step == 2:
        optimizer.state.clear()


def regroup(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """A parameter moves to a group of its own with another learning rate."""
    if step == 2:
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [moved], "lr": 1e-4})


def scatter(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Neighbors are torn apart: every second parameter moves to another group."""
    if step == 2:
        parameters = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = parameters[::2]
        optimizer.add_param_group({"params": parameters[1::2], "lr": 1e-4})


BETWEEN = (
    nothing,
    clip,
    drop_one,
    start_late,
    drop_all,
    replace_one,
    reload,
    fall_behind,
    replace_state,
    restart,
    regroup,
    scatter,
)


def check_alike(cases: list[tuple[str, Between, bool]]) -> None:
    """Train a sharded model, and one process's with the same gradients, by the same optimizer: the same bits."""
    for make, between, accumulate in cases:
        model, whole = build_sharded(Stack, BLOCKS), build(Stack)
        optimizer, reference = MAKE[make](model.parameters()), MAKE[make](whole.parameters())
        seen: list[int] = []
        # torch's fused kernels round the last elements differently, and a norm adds its terms in another order.
        is_exact = "fused" not in make and between is not clip
        for step in range(STEPS):
            if accumulate:
                with no_sync(model):
                    sharded_step(model, run_squared, step + 10)
            sharded_step(model, run_squared, step)
            for parameter, twin in zip(sharded_parameters(model).values(), whole.parameters(), strict=True):
                twin.grad = whole_gradient(parameter)
            torch.manual_seed(step)
            between(step, model, optimizer)
            between(step, whole, reference)
            with counting(optimizer, seen):
                optimizer.step()
            reference.step()
            for zeroed in (optimizer, reference):
                zeroed.zero_grad(set_to_none=step % 2 == 0)
            for held, twin in zip(model.parameters(), whole.parameters(), strict=True):
                _assert_same(held, twin, is_exact=is_exact)
                state, expected = optimizer.state[held], reference.state[twin]
                assert state.keys() == expected.keys(), (make, between.__name__)
                for key, value in state.items():
                    _assert_same(torch.as_tensor(value), torch.as_tensor(expected[key]), is_exact=is_exact)
            assert set(map(id, optimizer.state)) <= {id(p) for p in model.parameters()}
        optimizer.state_dict()
        assert sum(seen) == 0, "sharded tensors in the optimizer's loop"


def _assert_same(sharded: torch.Tensor, whole: torch.Tensor, *, is_exact: bool) -> None:
    own = own_elements(sharded, whole) if isinstance(sharded, ShardedTensor) else whole.detach().view(-1)
    tolerance = 0.0 if is_exact else 1e-12  # of float64
    torch.testing.assert_close(own_part(sharded).view(-1), own, rtol=tolerance, atol=tolerance)


class counting:
    """Record how many sharded tensors the optimizer collects inside."""

    def __init__(self, optimizer: optim.Optimizer, seen: list[int]) -> None:
        self.cls, self.seen = type(optimizer), seen

    def __enter__(self) -> None:
        self.plain = self.cls._init_group  # type: ignore[attr-defined]

        def count(optimizer: optim.Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
            result = self.plain(optimizer, group, *lists)
            self.seen.append(sum(isinstance(tensor, ShardedTensor) for tensor in lists[0]))
            return result

        self.cls._init_group = count  # type: ignore[attr-defined]

    def __exit__(self, *args: object) -> None:
        self.cls._init_group = self.plain  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_optimizer_gives_the_same_bits(world_size: int) -> None:
    cases: list[tuple[str, Between, bool]] = [(make, nothing, False) for make in MAKE]
    run_ranks(check_alike, world_size, cases)


def test_whatever_a_script_does_between_steps() -> None:
    cases: list[tuple[str, Between, bool]] = [("AdamW", between, False) for between in BETWEEN]
    cases += [("SGD momentum", between, False) for between in (drop_one, start_late, reload)]
    cases += [("AdamW in groups", between, True) for between in (nothing, regroup)]
    run_ranks(check_alike, 2, cases)


def check_exception() -> None:
    model = build_sharded(Stack, BLOCKS)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        sharded_step(model, run_squared, step)
        if step:
            optimizer.param_groups[0]["betas"] = (0.9, "broken")
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["betas"] = (0.9, 0.999)
            assert set(map(id, optimizer.state)) == {id(p) for p in model.parameters()}
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        optimizer.step()


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    run_ranks(check_exception, 1)


class Own(optim.AdamW):
    """A subclass may do anything with its tensors."""


def check_subclass() -> None:
    model = build_sharded(Stack, BLOCKS)
    optimizer = Own(model.parameters(), lr=1e-2)
    sharded_step(model, run_squared, 0)
    seen: list[int] = []
    with counting(optimizer, seen):
        optimizer.step()
    assert seen == [len(list(model.parameters()))]


def test_subclasses_get_sharded_tensors() -> None:
    run_ranks(check_subclass, 1)


def around_init_group() -> bool:
    """Whether `state` is of parameters alone after a step, with something of a script's around what lists them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        listing = optimizer._init_group
        optimizer._init_group = lambda *args, listing=listing: listing(*args)
    return {*optimizer.state} == {*model.parameters()}


def test_the_state_is_of_parameters_whatever_is_around_the_list_of_them() -> None:
    assert run_ranks(around_init_group, 1) == [True]
