"""Gradients that are not finite never reach a parameter: the error names parameter, rank and step on all ranks.

pytest tests/features/nonfinite/test_nonfinite.py
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.api import Accelerator
from fullshard.comm.device import current
from fullshard.comm.mesh import init_mesh
from fullshard.config.schema import RunConfig, TrainingConfig
from fullshard.config.switches import COMM
from fullshard.core.errors import ConfigError, LifecycleError, NonFiniteError
from fullshard.engine.schedule import Schedule
from fullshard.features import MixedPrecisionPolicy, clip_grad_norm_, shard_model
from fullshard.features.nonfinite import NonFiniteGuard
from fullshard.features.steps_in_backward.stepper import step_in_backward
from tests.distributed import run_ranks
from tests.traps import BLOCKS, Stack, batch, build_sharded, rank_and_size


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def spoil(model: nn.Module, name: str, value: float, elements: int = 1) -> None:
    """From now on the gradient that this rank has of a parameter is not finite."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-elements:] = value
        return gradient

    model.get_parameter(name).register_hook(hook)


def bad_model(case: str, rank: int, **options: Any) -> nn.Module:
    """A model one gradient of which is not finite on rank 1 (of one rank: on that)."""
    torch.manual_seed(0)
    model: nn.Module = Stack().float()
    size = rank_and_size()[1]
    if rank == size - 1:
        spoil(model, "blocks.1.up.weight", {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[case])
    return shard_model(model, unit_modules=[model.get_submodule(name) for name in BLOCKS], **options)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    out = model(batch(step, rank_and_size()[0]).float()).float()
    (out.square().mean() * scale).backward()


def check_raises(case: str, strategy: str, clip: str, dtype: str) -> None:
    rank, size = rank_and_size()
    options: dict[str, Any] = {"strategy": strategy} | ({"shard_size": 2} if strategy == "HYBRID_SHARD" else {})
    if dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = bad_model(case, rank, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = whole(model)
    for micro in range(2):
        backward(model, micro)
    if clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif clip == "own":
        clip_grad_norm_(model, 1.0)
    kind = "NaN" if case == "nan" else "infinite"
    found = (
        rf"rank {rank}, step 1 of this process: gradients are not finite: blocks.1.up.weight \({kind}\); "
        rf"they came from rank {size - 1}; nothing was updated\nhint: inspect"
    )
    with pytest.raises(NonFiniteError, match=found):
        optimizer.step()
    assert not optimizer.state
    assert all(map(torch.equal, whole(model), before))


@pytest.mark.parametrize(
    ("case", "strategy", "clip", "dtype", "ranks"),
    [
        ("nan", "FULL_SHARD", "", "fp32", 2),
        ("-inf", "FULL_SHARD", "torch", "fp32", 2),
        ("inf", "NO_SHARD", "own", "fp32", 2),
        ("inf", "FULL_SHARD", "", "bf16", 2),
        ("nan", "FULL_SHARD", "", "fp32", 1),
        *(
            pytest.param(case, strategy, clip, dtype, ranks, marks=pytest.mark.full)
            for case in ("nan", "inf", "-inf")
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OPTIMIZER")
            for clip in ("", "torch")
            for dtype in ("fp32", "bf16")
            for ranks in ((4,) if strategy == "HYBRID_SHARD" else (2, 3))
        ),
    ],
)
def test_one_bad_gradient_on_one_rank(case: str, strategy: str, clip: str, dtype: str, ranks: int) -> None:
    run_ranks(check_raises, ranks, case, strategy, clip, dtype)


def check_skips() -> None:
    model, twin = build_sharded(Stack, BLOCKS), build_sharded(Stack, BLOCKS)
    rank, _ = rank_and_size()
    model.set_nonfinite_gradients("skip", limit=2)  # type: ignore[operator]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]

    def step(number: int, bad: bool) -> None:
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            if each is twin and bad:
                continue
            loss = each(batch(number, rank)).square().mean()
            (loss * (math.nan if bad and rank == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)

    for number, bad in enumerate((False, True, True, False, True, False)):
        step(number, bad)
    assert all(map(torch.equal, whole(model), whole(twin)))
    step(7, True)
    step(8, True)
    with pytest.raises(NonFiniteError, match="already skipped 2 consecutive steps"):
        step(9, True)


def test_steps_that_are_left_out_leave_no_trace_and_are_counted() -> None:
    run_ranks(check_skips, 2)


def check_mended() -> None:
    """What counts is what a gradient is when the optimizer steps; a large number is finite."""
    rank, _ = rank_and_size()
    model, twin = bad_model("nan", rank), shard_model(Stack().float(), unit_modules=())
    before = [whole(each) for each in (model, twin)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0)
    for parameter in model.parameters():
        parameter.grad.local.nan_to_num_()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-25)
    backward(twin, 0, 1e25)  # whose squares overflow
    optimizer.step()
    for each, old in zip((model, twin), before, strict=True):
        assert all(value.isfinite().all() for value in whole(each))
        assert not any(map(torch.equal, whole(each), old)), "no step is left out"


def test_gradients_that_were_mended_and_large_ones_are_stepped_with() -> None:
    run_ranks(check_mended, 2)


def check_in_backward() -> None:
    rank, _ = rank_and_size()
    model = bad_model("nan", rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_in_backward(optimizer)
    with pytest.raises(
        NonFiniteError,
        match=r"blocks.1.up.weight \(NaN\); they came from rank 1; parameters with gradients computed earlier",
    ):
        backward(model, 0)
    assert all(value.isfinite().all() for value in whole(model))
    optimizer.step()
    model.set_nonfinite_gradients("skip")  # type: ignore[operator]
    with pytest.raises(LifecycleError, match="let optimizers step after backward"):
        backward(model, 1)


def test_an_optimizer_that_steps_in_backward_never_steps_with_one() -> None:
    run_ranks(check_in_backward, 2)


def check_messages() -> None:
    """Over Gloo as over shared memory; what was rounded on its way has lost whose it was."""
    os.environ[COMM.name] = "gloo"
    rank, _ = rank_and_size()
    for reduce_as, source in ((None, "rank 1;"), (torch.bfloat16, "(rank 1|an unknown rank)")):
        model = bad_model("inf", rank, mp_policy=MixedPrecisionPolicy(reduce_as=reduce_as))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, 0)
        with pytest.raises(NonFiniteError, match=f"they came from {source}"):
            optimizer.step()


def test_messages_between_ranks() -> None:
    run_ranks(check_messages, 2)


def test_what_a_hook_and_rounding_make_of_a_gradient() -> None:
    model = build_sharded(Stack, BLOCKS)
    model.set_all_reduce_hook(lambda gradient: gradient.fill_(math.inf))  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(NonFiniteError, match=r"head\.weight"):
        optimizer.step()

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 1e-3))

        def forward(self) -> torch.Tensor:
            return (self.weight * 40000).sum()

    small = shard_model(Scale().half(), unit_modules=())
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    for _ in range(2):  # their sum is no float16
        small().backward()
    with pytest.raises(NonFiniteError, match="weight"):
        optimizer.step()


def test_an_accelerator_leaves_steps_out_with_their_schedule() -> None:
    accelerator = Accelerator(fsdp_plugin=RunConfig(training=TrainingConfig(nonfinite_gradients="skip")))
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for factor, rate in ((1.0, 0.5), (math.nan, 0.5), (1.0, 0.25)):
        is_bad = math.isnan(factor)
        with pytest.warns(UserWarning, match="is skipped") if is_bad else contextlib.nullcontext():
            accelerator.backward(model(batch(0, 0).float()).square().mean() * factor)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        assert accelerator.optimizer_step_was_skipped == is_bad
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.zero_grad()


def check_closure() -> None:
    rank, _ = rank_and_size()
    model = bad_model("inf", rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model)

    def closure() -> float:
        backward(model, 0)
        return 0.0

    with pytest.raises(NonFiniteError, match="they came from rank 1"):
        optimizer.step(closure)
    assert all(map(torch.equal, whole(model), before))
    model.set_nonfinite_gradients("off")  # type: ignore[operator]
    optimizer.zero_grad()
    optimizer.step(closure)
    assert not all(value.isfinite().all() for value in whole(model))


def test_a_closure_and_no_guard() -> None:
    run_ranks(check_closure, 2)


def test_policies_are_checked() -> None:
    model = build_sharded(Stack, BLOCKS)
    with pytest.raises(ConfigError, match="use raise, skip or off"):
        model.set_nonfinite_gradients("ignore")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="use 1 or more"):
        model.set_nonfinite_gradients("skip", limit=0)  # type: ignore[operator]


@pytest.mark.gpu
def test_more_elements_than_a_dot_product_takes_there() -> None:
    device = current()
    if device.type == "cpu":
        pytest.fail("no accelerator: this test is for machines that have one")
    guard = NonFiniteGuard(Schedule(init_mesh()))
    part = torch.ones(2**31, device=device)
    guard.reduced(part, {})
    assert not guard.doubts_gradients()
    part[-1] = math.inf
    guard.reduced(part, {})
    assert guard.doubts_gradients()
