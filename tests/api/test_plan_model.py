"""Planning for a model object, and checking a running job against its plan.

pytest tests/api/test_plan_model.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import fullshard
from fullshard.api.planning import planned_optimizer
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.features import shard_model
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.evaluate import evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from tests.distributed import run_ranks
from tests.plan_check import PlanCheck

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


def build() -> PreTrainedModel:
    config = AutoConfig.for_model(**CONFIG)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def test_a_model_is_planned_like_its_configuration() -> None:
    with torch.device("meta"):
        model = build()
    plan = fullshard.plan(model, "8xA100", micro_batch=2, seq_len=64)
    shape, _ = from_config(CONFIG, where="x")
    expected = evaluate(shape, Job.of({"micro_batch": 2, "seq_len": 64}), parse_cluster("8xA100"))
    assert plan.memory.phases == expected.memory.phases
    assert plan.traffic == expected.traffic
    assert plan.time.total == pytest.approx(expected.time.total)
    assert fullshard.plan_model(model, "8xA100").fits


@pytest.mark.parametrize(
    ("model", "devices", "what"),
    [
        ("Llama-2-7B", "8xH100", r"expected a model, got 'Llama-2-7B'\nhint: for a name, use fullshard plan --model"),
        (torch.nn.ReLU(), "8xH100", "expected a model, got one without parameters"),
        (torch.nn.Linear(2, 2), 8, r"is a number without a kind of device\nhint: add the kind, for example 8xH100"),
    ],
)
def test_what_cannot_be_planned(model: Any, devices: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fullshard.plan_model(model, devices)


def test_a_model_shows_what_is_trained() -> None:
    with torch.device("meta"):
        model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name)
    plan = fullshard.plan(model.to(torch.bfloat16), "2xA100")
    assert plan.trainable < plan.parameters / 3
    rest = plan.memory.phases["load"]
    # Frozen in bfloat16, trained in float32.
    assert rest["sharded parameters"] == pytest.approx(2 * (plan.parameters - plan.trainable) / 2, rel=0.01)
    assert rest["main weights"] == pytest.approx(4 * plan.trainable / 2, rel=0.01)
    with pytest.raises(ConfigError, match="the settings method cannot be passed"):
        fullshard.plan(model, "2xA100", method="lora")


def test_weights_stored_in_half_precision() -> None:
    """With precision `no` weights, gradients and the optimizer's state are all in it; a configuration can say so."""
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    plan = fullshard.plan(model, "2xA100", precision="no", seq_len=64)
    rest = plan.memory.phases["load"]
    assert rest["main weights"] == pytest.approx(2 * plan.parameters / 2, rel=0.01)
    assert rest["optimizer state"] == pytest.approx(2 * rest["main weights"], rel=0.01)
    shape, _ = from_config(CONFIG, where="x")
    job = Job.of({"base_dtype": "bfloat16", "precision": "no", "seq_len": 64})
    assert evaluate(shape, job, plan.cluster).memory.phases == plan.memory.phases


def train_with_check(
    strategy: str, accumulation: int, planned_accumulation: int, dtype: str = "float32"
) -> list[tuple[str, int | None, int]]:
    torch.manual_seed(0)
    model = build().to(getattr(torch, dtype))
    shard_model(model, unit_modules=unit_modules(model), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"precision": "no", "accumulation": planned_accumulation, "base_dtype": dtype}
    job = Job.of({"strategy": strategy, **settings})
    check = PlanCheck(model, optimizer, job)
    for _ in range(4):
        with pytest.raises(LifecycleError) if check.found is None else _nothing():
            check.report()
        for _ in range(accumulation):
            tokens = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(d.category, d.planned, d.found) for d in check.report()]


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(
    ("strategy", "dtype"), [("FULL_SHARD", "float32"), ("SHARD_GRAD_OP", "float32"), ("FULL_SHARD", "bfloat16")]
)
def test_a_job_that_keeps_to_its_plan(strategy: str, dtype: str) -> None:
    for found in run_ranks(train_with_check, 2, strategy, 2, 2, dtype):
        for category, planned, got in found:
            assert got == planned, (category, planned, got)
        assert {category for category, planned, _ in found if planned} >= {"events", "main weights", "optimizer state"}


def test_a_job_that_does_not() -> None:
    for found in run_ranks(train_with_check, 2, "FULL_SHARD", 3, 1):
        wrong = {category for category, planned, got in found if got != planned}
        assert wrong == {"events", "sent to unshard", "sent to reduce"}


def test_optimizers_are_known_by_what_they_keep() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    kinds = {
        "adamw": torch.optim.AdamW(weights),
        "adamw-fused": torch.optim.Adam(weights, fused=True),
        "sgd": torch.optim.SGD(weights, lr=0.1),
        "sgd-momentum": torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        None: torch.optim.AdamW(weights, amsgrad=True),
    }
    for kind, optimizer in kinds.items():
        assert planned_optimizer(optimizer) == kind
    assert planned_optimizer(torch.optim.RMSprop(weights)) is None
