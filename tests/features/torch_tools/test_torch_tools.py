"""torch's own tools on sharded parameters: clipping, loss scaling, accumulation, optimizers.

pytest tests/features/torch_tools/test_torch_tools.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

import fullshard.features as engine
from fullshard.core.errors import LifecycleError, OptimizerError
from fullshard.features import MixedPrecisionPolicy, check_optimizer, no_sync, repoint, units_of, unsharded
from fullshard.features.torch_tools.install import describe_intervals
from tests.differential import CLOSE, rounding
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    adamw,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    run_squared,
    sharded_parameters,
    sharded_step,
    whole_gradient,
)

# -- clipping ---------------------------------------------------------------------------------------------------


def prepare(make: Any = Stack, units: Any = BLOCKS, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a reference after one backward."""
    reference, model = build(make), build_sharded(make, units, **options)
    reference_step(reference, run_squared, 0)
    sharded_step(model, run_squared, 0)
    return model, reference


def whole_norm(norm: Any) -> torch.Tensor:
    """Torch's clipping returns a DTensor, as of its own sharded parameters."""
    return norm.full_tensor()  # type: ignore[no-any-return]


def check_clip(order: Any, max_norm: float, strategy: str, shard_size: int | None) -> float:
    model, reference = prepare(strategy=strategy, shard_size=shard_size)
    expected = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), max_norm, order)
    for foreach in (None, False):
        other, _ = prepare(strategy=strategy, shard_size=shard_size)
        # This name was bound before fullshard was imported.
        got = whole_norm(torch_clip_grad_norm_(other.parameters(), max_norm, order, foreach=foreach))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
        assert_same_gradients(other, reference, 1e-12)
    got = engine.clip_grad_norm_(model, max_norm, order)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
    assert_same_gradients(model, reference, 1e-12)
    return got.item()


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 0.5, 3.0, "inf", -1.0, -math.inf])
def test_clip_grad_norm_is_global(order: Any) -> None:
    norms = run_ranks(check_clip, 2, order, 0.01, "FULL_SHARD", None)
    assert norms[0] == norms[1]


@pytest.mark.parametrize(("strategy", "shard_size"), [("NO_SHARD", None), ("HYBRID_SHARD", 2)])
def test_clip_grad_norm_with_copies(strategy: str, shard_size: int | None) -> None:
    norms = run_ranks(check_clip, 4, 2.0, 0.01, strategy, shard_size)
    assert len(set(norms)) == 1


def test_clip_grad_norm_that_is_small_enough() -> None:
    run_ranks(check_clip, 2, 2.0, 1e6, "FULL_SHARD", None)


class Tiny(nn.Module):
    """So few elements that most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def check_empty_ranks(order: float) -> bool:
    model, reference = prepare(Tiny, ())
    expected = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.1, order)
    got = whole_norm(torch_clip_grad_norm_(model.parameters(), 0.1, order))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
    assert_same_gradients(model, reference, 1e-12)
    adamw(model.parameters()).step()
    return all(p.interval.numel == 0 for p in sharded_parameters(model).values())


@pytest.mark.parametrize("order", [2.0, math.inf, -2.0])
def test_clip_grad_norm_with_empty_ranks(order: float) -> None:
    assert run_ranks(check_empty_ranks, 3, order) == [False, True, True]


def check_mixed_parameters() -> None:
    """Ordinary parameters, equal on all ranks, count once."""
    model, reference = prepare()
    extra = [nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(2)]
    for parameter in extra:
        parameter.grad = torch.full((3, 2), 0.25, dtype=torch.float64)
    expected = torch.nn.utils.clip_grad_norm_([*reference.parameters(), extra[0]], 0.1)
    got = whole_norm(torch_clip_grad_norm_([*model.parameters(), extra[1]], 0.1))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(extra[0].grad, extra[1].grad, rtol=1e-6, atol=0.0)
    assert_same_gradients(model, reference, 1e-6)


def test_clip_grad_norm_of_mixed_parameters() -> None:
    run_ranks(check_mixed_parameters, 2)


def check_replaced_gradients() -> None:
    """A gradient the user put in place of the engine's is sharded all the same."""
    model, reference = prepare()
    for parameter in (*model.parameters(), *reference.parameters()):
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone() * 3.0
    expected = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.1)
    got = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).full_tensor()  # type: ignore[attr-defined]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
    got = whole_norm(torch_clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)
    assert_same_gradients(model, reference, 1e-6)


def test_clip_grad_norm_of_replaced_gradients() -> None:
    run_ranks(check_replaced_gradients, 2)


def check_clip_while_unsharded() -> None:
    """With the parameters kept whole after backward, `model.parameters()` must not be clipped to a norm of 0."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    reference_step(reference, run_squared, 0)
    sharded_step(model, run_squared, 0)
    expected = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.01)
    got = whole_norm(torch_clip_grad_norm_(model.parameters(), 0.01))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)


def test_clip_grad_norm_without_reshard_after_backward() -> None:
    run_ranks(check_clip_while_unsharded, 2)


def check_clip_rest() -> None:
    model, reference = prepare()
    torch.nn.utils.clip_grad_value_(list(reference.parameters()), 0.01)
    engine.clip_grad_value_(model, 0.01)
    assert_same_gradients(model, reference)
    model.zero_grad()
    assert torch_clip_grad_norm_(model.parameters(), 1.0).item() == 0.0
    model, _ = prepare()
    if rank_and_size()[0] == 0:
        gradient = next(p.local_grad for p in sharded_parameters(model).values() if p.interval.numel)
        assert gradient is not None
        gradient[0] = math.nan
    with pytest.raises(RuntimeError, match="nan"):
        torch_clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clip_by_value_none_and_nan() -> None:
    run_ranks(check_clip_rest, 2)


# -- loss scaling -----------------------------------------------------------------------------------------------


def check_scaler(fused: bool, overflow: bool) -> float:
    """An overflow on the last rank only: every rank skips the step and halves the scale."""
    rank, size = rank_and_size()
    reference, model = build(Single), build_sharded(Single, BLOCKS)
    # An epsilon as large as the gradients: without it Adam would step the same with gradients that are still scaled.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1, fused=fused)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    before = {name: p.full_tensor() for name, p in sharded_parameters(model).items()}
    x = batch(0, rank).float()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    if overflow and rank == size - 1:
        gradient = next(p.local_grad for p in sharded_parameters(model).values() if p.interval.numel)
        assert gradient is not None
        gradient[-1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    for each in range(size):
        (reference(batch(0, each).float()).square().mean() / size).backward()
    expected.step()
    for name, parameter in sharded_parameters(model).items():
        want = before[name] if overflow else reference.get_parameter(name).detach()
        torch.testing.assert_close(parameter.full_tensor(), want, **CLOSE)
    return scaler.get_scale()


class Single(Stack):
    """The same in float32, which fused optimizers and the scaler are made for."""

    def double(self) -> Single:
        return self.float()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("overflow", "scale"), [(False, 1024.0), (True, 512.0)], ids=["fine", "overflow"])
def test_grad_scaler(fused: bool, overflow: bool, scale: float) -> None:
    assert run_ranks(check_scaler, 2, fused, overflow) == [scale, scale]


# -- accumulation -----------------------------------------------------------------------------------------------


class Half(Stack):
    """A model stored in bfloat16."""

    def double(self) -> Half:
        return self.bfloat16()


def check_exact_accumulation(cleared_in_place: bool) -> None:
    """Eight micro-batches of bfloat16 gradients are summed in float32 and rounded once, at the end."""
    rank, size = rank_and_size()
    model, reference = build_sharded(Half, BLOCKS), build(Half)
    if cleared_in_place:
        model(batch(99, rank).bfloat16()).float().square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
        model.zero_grad(set_to_none=False)
    sums = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for micro in range(8):
        model(batch(micro, rank).bfloat16()).float().square().mean().backward()
        mean = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
        for each in range(size):
            reference.zero_grad()
            reference(batch(micro, each).bfloat16()).float().square().mean().backward()
            for name, own in reference.named_parameters():
                assert own.grad is not None
                mean[name] += own.grad.float()
        for name, value in mean.items():
            sums[name] += value / size
    for name, sharded in sharded_parameters(model).items():
        gradient = whole_gradient(sharded)
        assert gradient is not None and gradient.dtype is torch.bfloat16
        assert torch.equal(gradient, sums[name].bfloat16()), name


@pytest.mark.parametrize("cleared_in_place", [False, True], ids=["fresh", "zeroed in place"])
def test_accumulation_in_reduced_precision_is_exact(cleared_in_place: bool) -> None:
    run_ranks(check_exact_accumulation, 2, cleared_in_place)


def check_scaled_between(dtype: torch.dtype) -> None:
    """What the user does to `.grad` between micro-batches stays done."""
    make = Half if dtype is torch.bfloat16 else Stack
    model = build_sharded(make, BLOCKS)
    rank, _ = rank_and_size()

    def backward(step: int) -> dict[str, torch.Tensor]:
        model(batch(step, rank).to(dtype)).float().square().mean().backward()
        return {name: whole_gradient(p).clone() for name, p in sharded_parameters(model).items()}  # type: ignore[union-attr]

    second = backward(2)
    model.zero_grad()
    first = backward(1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    total = backward(2)
    tolerance = rounding(dtype, 4) if dtype is torch.bfloat16 else 1e-9
    for name, value in total.items():
        torch.testing.assert_close(value, first[name] * 0.5 + second[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_changed_between_micro_batches(dtype: torch.dtype) -> None:
    run_ranks(check_scaled_between, 2, dtype)


def check_partly_cleared() -> None:
    """Two optimizers that clear only their own half."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    for step in range(3):
        reference_step_added(reference, step)
        sharded_step(model, run_squared, step)
        assert_same_gradients(model, reference)
        for each in (model, reference):
            half = list(each.parameters())[step % 2 :: 2]
            torch.optim.SGD(half, lr=0.0).zero_grad()


def reference_step_added(reference: nn.Module, step: int) -> None:
    """`reference_step`, added to the gradients that are there."""
    kept = [p.grad for p in reference.parameters()]
    reference.zero_grad()
    reference_step(reference, run_squared, step)
    for parameter, earlier in zip(reference.parameters(), kept, strict=True):
        if earlier is not None:
            assert parameter.grad is not None
            parameter.grad += earlier


def test_gradients_cleared_in_part() -> None:
    run_ranks(check_partly_cleared, 2)


def accumulate_unsynchronized(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Three micro-batches of which only the last communicates."""
    sharded = bool(units_of(module))
    losses = []
    for micro in range(3):
        loss = module(batch(10 * step + micro, rank)).square().mean()
        if sharded and micro < 2:
            with no_sync(module):
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def accumulate_with_switch(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The same with torch's methods, resharding only at the end."""
    sharded = bool(units_of(module))
    losses = []
    for micro in range(3):
        if sharded:
            module.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
            module.set_reshard_after_backward(micro == 2)  # type: ignore[operator]
        loss = module(batch(10 * step + micro, rank)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def accumulate_replicated_later(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The replicate axis is reduced once, with the last micro-batch."""
    losses = []
    for micro in range(3):
        if units_of(module):
            module.set_requires_all_reduce(micro == 2)  # type: ignore[operator]
        loss = module(batch(10 * step + micro, rank)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_accumulation(run: Any, strategy: str, shard_size: int | None) -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS, strategy=strategy, shard_size=shard_size)
    assert_trains_alike(model, reference, run)


@pytest.mark.parametrize("run", [accumulate_unsynchronized, accumulate_with_switch])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_accumulation_without_communication(run: Any, strategy: str) -> None:
    run_ranks(check_accumulation, 2, run, strategy, None)


@pytest.mark.parametrize("run", [accumulate_unsynchronized, accumulate_replicated_later])
def test_accumulation_in_hybrid(run: Any) -> None:
    run_ranks(check_accumulation, 4, run, "HYBRID_SHARD", 2)


class Optional(nn.Module):
    """A unit that only some micro-batches run."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.extra = Block(), Block()

    def forward(self, x: torch.Tensor, *, extra: bool = False) -> torch.Tensor:
        x = self.block(x)
        return self.extra(x) if extra else x


def accumulate_optional(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The unit runs only in the micro-batch that does not communicate; its gradient belongs to this step still."""
    first = module(batch(2 * step, rank), extra=step != 1).square().mean()
    if units_of(module):
        with no_sync(module):
            first.backward()
    else:
        first.backward()
    second = module(batch(2 * step + 1, rank), extra=False).square().mean()
    second.backward()
    return torch.stack([first, second]).detach()


def check_optional_unit() -> None:
    reference, model = build(Optional), build_sharded(Optional, ("block", "extra"))
    assert_trains_alike(model, reference, accumulate_optional)


def test_unit_that_only_an_unsynchronized_micro_batch_runs() -> None:
    run_ranks(check_optional_unit, 2)


def check_divide_factor() -> None:
    model, reference = build_sharded(Stack, BLOCKS), build(Stack)
    _, size = rank_and_size()
    for unit in units_of(model):
        for module in unit.modules:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    reference_step(reference, run_squared, 0)
    sharded_step(model, run_squared, 0)
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad *= size  # the sum instead of the mean
    assert_same_gradients(model, reference)


def test_gradient_divide_factor() -> None:
    run_ranks(check_divide_factor, 2)


# -- optimizers -------------------------------------------------------------------------------------------------


def check_early_optimizer(state: str) -> None:
    """An optimizer made before sharding is refused, and works once re-pointed, with its state cut to the interval."""
    torch.manual_seed(0)
    reference, plain = build(Stack), build(Stack)
    groups: list[dict[str, Any]] = [{"params": list(m.parameters())[:3], "lr": 0.05} for m in (reference, plain)]
    rest = [{"params": list(m.parameters())[3:]} for m in (reference, plain)]
    expected, early = (torch.optim.AdamW([g, dict(r)], lr=0.02) for g, r in zip(groups, rest, strict=True))
    if state == "used":
        for each, optimizer in ((reference, expected), (plain, early)):
            reference_step(each, run_squared, 0)
            optimizer.step()
            optimizer.zero_grad()
    model = engine.shard_model(plain, unit_modules=[plain.get_submodule(name) for name in BLOCKS])
    sharded_step(model, run_squared, 1)
    reference_step(reference, run_squared, 1)
    with pytest.raises(OptimizerError, match="as it was before sharding"):
        early.step()
    with pytest.raises(OptimizerError, match="as it was before sharding"):
        check_optimizer(early)
    repoint(early, model)
    assert early.param_groups[0]["lr"] == 0.05 and len(early.param_groups[0]["params"]) == 3
    for step in (1, 2, 3):
        for optimizer in (early, expected):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
        sharded_step(model, run_squared, step + 1)
        reference_step(reference, run_squared, step + 1)
    with pytest.raises(OptimizerError, match="holds no parameter"):
        repoint(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), model)


@pytest.mark.parametrize("state", ["new", "used"])
def test_optimizer_made_before_sharding(state: str) -> None:
    run_ranks(check_early_optimizer, 2, state)


def check_made_in_the_middle() -> None:
    """An optimizer made while the root is unsharded (after a trial forward) is not quietly without gradients."""
    model = build_sharded(Stack, BLOCKS)
    model(batch(0, 0))
    optimizer = adamw(model.parameters())
    run_squared(model, 0, 0)
    before = {name: p.full_tensor() for name, p in sharded_parameters(model).items()}
    try:
        optimizer.step()
    except OptimizerError:
        repoint(optimizer, model)
        optimizer.step()
    for name, parameter in sharded_parameters(model).items():
        assert not torch.equal(parameter.full_tensor(), before[name]), f"{name} did not move"


def test_optimizer_made_after_a_trial_forward() -> None:
    run_ranks(check_made_in_the_middle, 2)


def check_refused() -> None:
    model = build_sharded(Stack, BLOCKS)
    run_squared(model, 0, 0)
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS):
        optimizer: Any = cls(model.parameters())
        with pytest.raises(OptimizerError, match=cls.__name__):
            optimizer.step(lambda: torch.zeros(()))

    class Mine(torch.optim.Adafactor):
        """A subclass is refused as well."""

    with pytest.raises(OptimizerError, match=r"complete.*\n.*OnOwners\(model, Mine, whole_parameters=True"):
        Mine(model.parameters(), lr=0.1).step()

    class Lomo(torch.optim.SGD):
        """Named as one that updates whole parameters in hooks."""

    class GaLoreAdafactor(torch.optim.SGD):
        """One with arguments of its own."""

    fakes: tuple[tuple[Any, str, str], ...] = (
        (Lomo, "lomo_optim", "step_in_backward"),
        (GaLoreAdafactor, "galore_torch", "elementwise"),
        (type("CAME", (torch.optim.SGD,), {}), "came_pytorch", r"OnOwners\(model, CAME, "),
        (type("Adafactor", (torch.optim.SGD,), {}), "torch_optimizer", r"OnOwners\(model, Adafactor, whole_"),
    )
    for cls, package, hint in fakes:
        cls.__module__ = f"{package}.optim"
        with pytest.raises(OptimizerError, match=rf"{cls.__name__} needs complete tensors.*\n.*{hint}"):
            cls(model.parameters(), lr=0.1).step()
    # On ordinary parameters nothing changes.
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    torch.optim.Adafactor([weight]).step()
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    run_ranks(check_refused, 2)


class Lamb(torch.optim.Optimizer):
    """Layer-wise, by hand: steps of a size that follows from the norms of whole tensors, one by one or all at once."""

    def __init__(self, parameters: Any, *, foreach: bool) -> None:
        super().__init__(parameters, {"foreach": foreach})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move by a tenth of each tensor's norm; `count` is a plain tensor, as such optimizers keep them."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients, count = [p.grad for p in parameters], torch.tensor(2.0)
            if not group["foreach"]:
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.add_(gradient, alpha=-float(p.norm() / gradient.norm().div_(count)) / 10)
                continue
            norms: Any = torch._foreach_norm(gradients)
            torch._foreach_div_(norms, [count] * len(norms))
            torch._foreach_clamp_min_(norms, 1e-9)
            sizes = torch._foreach_div(torch._foreach_norm(parameters), norms)
            torch._foreach_addcmul_(parameters, gradients, sizes, value=-0.1)


class Muon(torch.optim.SGD):
    """Called like another one."""


class SOAP(torch.optim.SGD):
    """Called like one of matrices, for which there is no class here."""


def check_by_hand() -> None:
    for foreach in (False, True):
        model, reference = build_sharded(Stack, BLOCKS), build(Stack)
        for each in (model, reference):
            run_squared(each, 0, 0)
            Lamb(each.parameters(), foreach=foreach).step()
        assert_same_parameters(model, reference)
    with pytest.warns(UserWarning, match=r"Muon: every rank gathers all matrices.*write fullshard\.optim\.Muon\("):
        Muon(model.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match=r"SOAP: every rank gathers .*write fullshard\.optim\.OnOwners\(model, SOAP,"):
        SOAP(model.parameters(), lr=0.1).step()


def test_optimizers_written_by_hand_compute_of_whole_tensors() -> None:
    """Whatever they are called."""
    run_ranks(check_by_hand, 2)


def check_added_later() -> None:
    """A parameter group with original parameters that is added after the first step is refused too."""
    plain = build(Stack)
    originals = list(plain.parameters())
    model = engine.shard_model(plain, unit_modules=[])
    optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    run_squared(model, 0, 0)
    optimizer.step()
    optimizer.add_param_group({"params": originals[2:]})
    with pytest.raises(OptimizerError):
        optimizer.step()


def test_parameters_added_after_the_first_step() -> None:
    run_ranks(check_added_later, 2)


def check_implementations(options: dict[str, Any]) -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.02, amsgrad="amsgrad" in options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **options)
    for step in range(2):
        reference_step(reference, run_squared, step)
        sharded_step(model, run_squared, step)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}], ids=str
)
def test_implementations_of_adamw(options: dict[str, Any]) -> None:
    run_ranks(check_implementations, 3, options)


def check_mixed_precision_main_weights() -> None:
    """bfloat16 compute, float32 main weights: a change too small for bfloat16 is not lost."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = build_sharded(Single, BLOCKS, mp_policy=policy)
    rank, _ = rank_and_size()
    out = model(batch(0, rank).float())
    assert out.dtype is torch.bfloat16
    out.float().square().mean().backward()
    before = {name: p.full_tensor() for name, p in sharded_parameters(model).items()}
    assert all(p.dtype is torch.float32 and p.grad is not None for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1e-5).step()
    for name, parameter in sharded_parameters(model).items():
        assert not torch.equal(parameter.full_tensor(), before[name]), name
        torch.testing.assert_close(parameter.full_tensor(), before[name], rtol=1e-3, atol=1e-4)
    with unsharded(model):
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())


def test_main_weights_keep_small_changes() -> None:
    run_ranks(check_mixed_precision_main_weights, 2)


def check_views_of_dimensions() -> None:
    """Rules such as "decay matrices only" see the dimensions of the whole."""
    model, reference = build_sharded(Stack, BLOCKS), build(Stack)
    for name, parameter in sharded_parameters(model).items():
        whole = reference.get_parameter(name)
        assert parameter.ndim == parameter.dim() == whole.ndim and parameter.shape == whole.shape
        assert parameter.local.shape == (parameter.interval.numel,)
    assert sum(p.local.numel() for p in sharded_parameters(model).values()) < sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    with pytest.raises(LifecycleError):
        engine.describe(nn.Linear(WIDTH, WIDTH))


def test_dimensions_of_sharded_parameters() -> None:
    run_ranks(check_views_of_dimensions, 2)


# -- other libraries --------------------------------------------------------------------------------------------


@dataclass
class Described:
    """What verl's `ShardSpec` has of this."""

    full_shape: tuple[int, ...]
    place: int | None = None
    gather_group: Any = None
    contributes: bool = True

    @classmethod
    def from_param(cls, param: torch.Tensor) -> Any:
        return cls(tuple(param.shape))


def check_description() -> None:
    model = build_sharded(Stack, BLOCKS, strategy="HYBRID_SHARD", shard_size=2)
    home: Any = ModuleType("verl.workers.engine.spec")
    home.ShardSpec = type("ShardSpec", (Described,), {})
    describe_intervals(home)
    for parameter in sharded_parameters(model).values():
        described, local = home.ShardSpec.from_param(parameter), parameter.to_local().reshape(-1)
        whole = parameter.full_tensor().reshape(-1)
        assert torch.equal(whole[described.place :][: local.numel()], local)
        assert described.full_shape == tuple(parameter.shape)
        assert dist.get_process_group_ranks(described.gather_group) == [[0, 1], [2, 3]][dist.get_rank() // 2]
        assert described.contributes == (dist.get_rank() < 2)
    assert home.ShardSpec.from_param(torch.ones(3)).place is None


def test_verl_is_told_where_an_interval_lies() -> None:
    run_ranks(check_description, 4)
