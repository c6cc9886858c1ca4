"""Planning for a model object, and checking a running job against its plan.

pytest tests/test_plan_model.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import fullshard
from fullshard.api.plan_check import Deviation, PlanCheck, planned_optimizer
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.engine import shard_model
from fullshard.plan.evaluate import evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.wrap.policies import unit_modules
from tests.distributed import run_ranks

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
    with pytest.raises(ConfigError, match="method: the model decides it"):
        fullshard.plan(model, "2xA100", method="lora")


def train_with_check(strategy: str, accumulation: int, planned_accumulation: int) -> list[tuple[str, int | None, int]]:
    torch.manual_seed(0)
    model = build()
    shard_model(model, unit_modules=unit_modules(model), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job.of({"strategy": strategy, "precision": "no", "accumulation": planned_accumulation})
    check = PlanCheck(model, optimizer, job)
    for _ in range(4):
        with pytest.raises(LifecycleError) if not check.is_done else _nothing():
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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_job_that_keeps_to_its_plan(strategy: str) -> None:
    for found in run_ranks(train_with_check, 2, strategy, 2, 2):
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
    assert str(Deviation("optimizer state", None, 1024)) == "optimizer state: not planned, found 1.00 KiB"
