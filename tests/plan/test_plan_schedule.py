"""The step the planner imagines is the step the engine makes: the same events, and the same bytes on the wire.

pytest tests/plan/test_plan_schedule.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.api.planning import model_shape
from fullshard.core.dtypes import Dtypes
from fullshard.core.events import Event
from fullshard.core.sizes import all_reduce_nbytes
from fullshard.core.strategy import STRATEGIES
from fullshard.features import FSDPModule, MixedPrecisionPolicy, no_sync, shard_model
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.steps_in_backward.stepper import step_in_backward
from fullshard.plan.layout import ModelLayout, lay_out
from fullshard.plan.schedule import ScheduleOptions, predict_step
from fullshard.plan.traffic import traffic_of
from tests.distributed import run_ranks
from tests.traps import Block, batch

WIDTH = 6
QUICK = [("FULL_SHARD", 2), ("SHARD_OPTIMIZER", 2)]


class Adapted(Block):
    """A block with a low-rank adapter, as LoRA adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + self.lora_b(self.lora_a(x))
        return out


class Tower(nn.Module):
    """An input layer, blocks, a norm and a head."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True)
class Variant:
    """One way to train a `Tower`."""

    accumulation: int = 1
    no_sync: bool = False
    checkpointing: str = "none"
    forward_prefetch: bool = True
    backward_prefetch: str = "BACKWARD_PRE"
    frozen: str = "none"
    mixed: bool = False
    first_step: bool = False
    in_backward: bool = False


VARIANTS = {
    "plain": Variant(),
    "first step": Variant(first_step=True),
    "accumulation": Variant(accumulation=3),
    "accumulation without sync": Variant(accumulation=3, no_sync=True),
    "checkpointing": Variant(checkpointing="non-reentrant"),
    "checkpointing, reentrant": Variant(checkpointing="reentrant"),
    "checkpointing, selective": Variant(checkpointing="selective"),
    "no prefetch": Variant(forward_prefetch=False, backward_prefetch="NO_PREFETCH"),
    "prefetch after": Variant(forward_prefetch=False, backward_prefetch="BACKWARD_POST"),
    "forward prefetch only": Variant(backward_prefetch="NO_PREFETCH"),
    "mixed precision": Variant(mixed=True, accumulation=2),
    "frozen input": Variant(frozen="input"),
    "frozen half": Variant(frozen="half"),
    "frozen but the head": Variant(frozen="all but the head"),
    "frozen block": Variant(frozen="one block"),
    "lora": Variant(frozen="lora"),
    "lora, checkpointing, no prefetch": Variant(
        frozen="lora", checkpointing="non-reentrant", forward_prefetch=False, backward_prefetch="BACKWARD_POST"
    ),
    "lora, accumulation": Variant(frozen="lora", accumulation=2),
    "step in backward": Variant(in_backward=True),
    "step in backward, accumulation": Variant(in_backward=True, accumulation=2, backward_prefetch="BACKWARD_POST"),
    "step in backward, no sync": Variant(in_backward=True, accumulation=2, no_sync=True, mixed=True),
    "step in backward, lora": Variant(in_backward=True, frozen="lora", checkpointing="non-reentrant"),
    "step in backward, frozen block": Variant(in_backward=True, frozen="one block", first_step=True),
}


def build(variant: Variant) -> Tower:
    torch.manual_seed(0)
    model = Tower(Adapted if variant.frozen == "lora" else Block)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name, variant.frozen))
    return model


def _is_trained(name: str, frozen: str) -> bool:
    match frozen:
        case "input":
            return not name.startswith("embed")
        case "half":
            return not name.startswith(("embed", "blocks.0", "blocks.1"))
        case "all but the head":
            return name.startswith("head")
        case "one block":
            return not name.startswith("blocks.2")
        case "lora":
            return "lora" in name
    return True


def predicted(
    variant: Variant, strategy: str, world_size: int, shard_size: int | None
) -> tuple[list[Event], ModelLayout]:
    with torch.device("meta"):
        model = build(variant)
    dtypes = Dtypes("bfloat16") if variant.mixed else Dtypes()
    shape = model_shape(model)
    layout = lay_out(shape, strategy=STRATEGIES[strategy], world_size=world_size, shard_size=shard_size, dtypes=dtypes)
    options = ScheduleOptions(
        accumulation=variant.accumulation,
        prefetches_in_forward=variant.forward_prefetch,
        backward_prefetch=variant.backward_prefetch,
        sync_each_micro_batch=not variant.no_sync,
        steps_in_backward=variant.in_backward,
        is_first_step=variant.first_step,
    )
    return predict_step(layout, options), layout


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes this rank hands to torch.distributed, by what for."""
    sent = {"point to point": 0, "all-reduce": 0}
    isend, all_reduce = dist.isend, dist.all_reduce

    def counting_isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["point to point"] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    def counting_all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():  # gradients; the flags at the end of backward are bytes
            sent["all-reduce"] += all_reduce_nbytes(tensor.nbytes, dist.get_world_size(kwargs["group"]))
        return all_reduce(tensor, *args, **kwargs)

    dist.isend, dist.all_reduce = counting_isend, counting_all_reduce
    try:
        yield sent
    finally:
        dist.isend, dist.all_reduce = isend, all_reduce


def record(variant: Variant, strategy: str, shard_size: int | None) -> tuple[list[Event], dict[str, int]]:
    """Events and bytes of the first step, or of the second."""
    events: list[Event] = []
    model = build(variant)
    blocks = list(model.blocks)
    if variant.checkpointing != "none":
        mode = variant.checkpointing
        checkpoint_modules(model, blocks, reentrant=mode == "reentrant", selective=mode == "selective")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if variant.mixed else None
    shard_model(
        model,
        unit_modules=blocks,
        strategy=strategy,
        shard_size=shard_size,
        mp_policy=policy,
        forward_prefetch=variant.forward_prefetch,
        backward_prefetch=variant.backward_prefetch,
        event_sink=events.append,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if variant.in_backward:
        step_in_backward(optimizer)
    steps = 1 if variant.first_step else 2
    totals: dict[str, int] = {}
    for step in range(steps):
        events.clear()
        with counted() as sent:
            for number in range(variant.accumulation):
                cast(FSDPModule, model).set_is_last_backward(number == variant.accumulation - 1)
                silent = variant.no_sync and number < variant.accumulation - 1
                with no_sync(model) if silent else nullcontext():
                    model(batch(step, dist.get_rank()).float()).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        totals = sent
    return events, totals


def record_all(strategy: str, shard_size: int | None) -> dict[str, tuple[list[Event], dict[str, int]]]:
    os.environ["FULLSHARD_COMM"] = "gloo"  # so that every byte goes through torch.distributed, where it is counted
    return {name: record(variant, strategy, shard_size) for name, variant in VARIANTS.items()}


CASES = [
    pytest.param(strategy, world_size, marks=[] if (strategy, world_size) in QUICK else [pytest.mark.full])
    for strategy in STRATEGIES
    for world_size in (2, 4)
]


@pytest.mark.parametrize(("strategy", "world_size"), CASES)
def test_predicted_events_are_the_recorded_ones(strategy: str, world_size: int) -> None:
    shard_size = 2 if strategy.startswith("HYBRID") else None
    for rank, recorded in enumerate(run_ranks(record_all, world_size, strategy, shard_size)):
        for name, (events, sent) in recorded.items():
            expected, layout = predicted(VARIANTS[name], strategy, world_size, shard_size)
            assert events == expected, f"{name}, rank {rank}:\n{_difference(events, expected)}"
            traffic = traffic_of(expected, layout)
            assert sent["point to point"] == traffic.gather_nbytes + traffic.reduce_nbytes, name
            assert sent["all-reduce"] == traffic.replicate_nbytes, name


def _difference(got: list[Event], expected: list[Event]) -> str:
    for index, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return f"event {index}: got {got[index - 1 : index + 4]}, expected {expected[index - 1 : index + 4]}"
    return f"{len(got)} events, expected {len(expected)}"


def test_variants_differ() -> None:
    """No variant is another one by mistake, or the test above would prove less than it says."""
    base = predicted(VARIANTS["plain"], "FULL_SHARD", 2, None)[0]
    for name, variant in VARIANTS.items():
        if variant != Variant() and variant != replace(Variant(), checkpointing=variant.checkpointing):
            assert predicted(variant, "FULL_SHARD", 2, None)[0] != base, name
