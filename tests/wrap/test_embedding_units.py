"""The input embedding and the head as units of their own: numbers, events, memory, and the plan of it.

pytest tests/wrap/test_embedding_units.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetModel

from fullshard import Accelerator
from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.core.events import Event, EventKind
from fullshard.engine.lookup import unit_of
from fullshard.features import MixedPrecisionPolicy, keep_unsharded, shard_model
from fullshard.features.auto_reshard import keep_head
from fullshard.features.unit_selection import embedding_modules, unit_modules
from fullshard.plan.evaluate import evaluate, notes_of
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.distributed import run_ranks
from tests.plan_check import PlanCheck
from tests.trainers import build
from tests.traps import rank_and_size, sharded_parameters

APART = ("model.embed_tokens", "lm_head")


def make(apart: bool, events: list[Event], **options: Any) -> nn.Module:
    model: nn.Module = build()
    for name in options.pop("frozen", ()):
        model.get_submodule(name).requires_grad_(False)
    extra = embedding_modules(model) if apart else ()
    shard_model(model, unit_modules=[*unit_modules(model), *extra], event_sink=events.append, **options)
    if extra:
        keep_head(extra[1])
    return model


def test_what_is_no_unit_cannot_stay_unsharded() -> None:
    with pytest.raises(LifecycleError, match="Linear is not a unit"):
        keep_head(nn.Linear(2, 2))


def step(model: nn.Module, number: int, inside: bool) -> torch.Tensor:
    """Forward and backward, with the loss taken inside the model's forward or outside of it."""
    ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(9 * number + rank_and_size()[0]))
    if inside:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    else:
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def train(apart: bool, inside: bool, **options: Any) -> tuple[list[torch.Tensor], list[Event], list[str]]:
    """Losses and weights; events of the last step; differences from the plan."""
    events: list[Event] = []
    model = make(apart, events, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    precision = "bf16" if "mp_policy" in options else "fp32"
    job = Job.of({"precision": precision, "strategy": options.get("strategy", "FULL_SHARD"), "seq_len": 8})
    check = PlanCheck(model, optimizer, job)
    losses = []
    for number in range(3):
        events.clear()
        losses.append(step(model, number, inside))
        optimizer.step()
        optimizer.zero_grad()
    wrong = [str(difference) for difference in check.report() if not difference.is_as_planned]
    return [*losses, *(p.full_tensor() for p in sharded_parameters(model).values())], events, wrong


def check_numbers_and_events(options: dict[str, Any]) -> None:
    for inside in (True, False):
        expected, _, _ = train(False, inside, **options)
        found, events, wrong = train(True, inside, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert wrong == []
        names = [event.unit for event in events if event.kind is EventKind.FORWARD_BEGIN]
        assert (names[1], names[-1]) == APART
        if options.get("strategy", "FULL_SHARD") == "FULL_SHARD":
            gathers = [event.unit for event in events if event.kind is EventKind.UNSHARD_ISSUED]
            assert gathers.count("lm_head") == 1  # kept from forward to backward
            assert gathers.count("model.layers.0") == 2


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("frozen", [(), ("model.embed_tokens",), ("model.norm",), ("lm_head",)], ids=str)
def test_numbers_and_events(frozen: tuple[str, ...]) -> None:
    check_numbers_and_events({"mp_policy": HALF, "frozen": frozen})


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_ranks(strategy: str) -> None:
    run_ranks(check_numbers_and_events, 2, {"strategy": strategy})


def test_the_head_is_kept_beside_what_a_budget_keeps() -> None:
    said: list[str] = []
    model = make(True, [], mp_policy=HALF)
    keep_unsharded(model, budget_nbytes=0, ranks_on_host=1, say=said.append)
    assert "0 of 3 units" in said[0]
    head = unit_of(model.get_submodule("lm_head"))
    assert head is not None
    assert not head.reshards_after_forward


def test_the_setting_reaches_the_engine() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin={"wrap_embeddings": True})
    model = accelerator.prepare(build())
    assert [name for name, module in model.named_modules() if unit_of(module) is not None][1:] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head",
    ]  # fmt: skip


def test_the_plan_needs_less() -> None:
    """Root and its gradient, most of them embedding and head, do not stay through the step any more."""
    shape, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xH100")
    job = Job.of({"seq_len": 2048, "checkpointing": "full"})
    base, apart = (evaluate(shape, job.model_copy(update={"wrap_embeddings": on}), cluster) for on in (False, True))
    table = 128256 * 4096
    assert len(apart.setting.layout.units) == len(base.setting.layout.units) + 2
    assert apart.parameters == base.parameters
    assert apart.time.model_flops == pytest.approx(base.time.model_flops)
    assert base.memory.peak - apart.memory.peak > 2 * table  # the embedding, at least, in two bytes
    auto = job.model_copy(update={"wrap_embeddings": True, "reshard_after_forward": "auto"})
    assert any(note.startswith("33 of 33 units") for note in notes_of(evaluate(shape, auto, cluster)))


def test_what_cannot_be_apart_is_refused() -> None:
    with pytest.raises(WrapError, match="share a weight"):
        embedding_modules(build("tied"))
    with pytest.raises(WrapError, match="does not identify its input embedding"):
        embedding_modules(nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)))
    with pytest.raises(WrapError, match="does not identify its input embedding"):
        embedding_modules(ResNetModel(ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1])))
    with pytest.raises(WrapError, match="is already a unit"):
        embedding_modules(make(True, []))
    shape, _ = load_model("GPT-2")
    with pytest.raises(ConfigError, match="they share a weight"):
        evaluate(shape, Job.of({"wrap_embeddings": True}), parse_cluster("8xH100"))
