"""Views of the schema: the options of `fullshard train` and the planner's job say what a run's settings say.

pytest tests/config/test_config_view.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fullshard.config.schema import SETTINGS, PrecisionConfig, RunConfig, ShardingConfig, TrainingConfig
from fullshard.config.view import View
from fullshard.core.errors import ConfigError
from fullshard.plan.job import Job
from fullshard.recipes.arguments import TrainArguments

VIEWS: tuple[type[View], ...] = (TrainArguments, Job)
OWN_DEFAULTS = {"precision", "reshard_after_forward", "checkpointing", "wrap"}
"""Fields that do not begin where the schema does, or in other words."""
OWN_WORDS: dict[type[View], set[str]] = {
    TrainArguments: OWN_DEFAULTS | {"step_in_backward"},
    Job: OWN_DEFAULTS | {"cp", "sp"},
}


@pytest.mark.parametrize("view", VIEWS)
def test_fields_of_the_run_are_the_schemas(view: type[View]) -> None:
    shared = view.of_the_run()
    assert len(shared) > 15
    for name, row in shared.items():
        field, setting = view.model_fields[name], SETTINGS[row.target]
        assert field.description
        if name not in OWN_DEFAULTS:
            assert field.default == setting.default
        if name not in OWN_WORDS[view]:
            assert field.description.split()[:3] == (setting.description or "").replace("`", "").split()[:3], name


def test_the_norm_that_train_clips_to_may_be_infinite() -> None:
    """The ranks get it as JSON."""
    arguments = TrainArguments.of({"max_grad_norm": "inf"})
    assert TrainArguments.model_validate_json(arguments.model_dump_json()).max_grad_norm == math.inf
    for wrong in ({"max_grad_norm": "nan"}, {"lr": "inf"}):
        with pytest.raises(ConfigError, match="Input should be"):
            TrainArguments.of(wrong)


@pytest.mark.parametrize("view", VIEWS)
def test_no_field_says_anything_by_itself(view: type[View]) -> None:
    """A command that is told nothing asks for nothing, but for its precision."""
    config = view.of({}).run_config()
    assert config == RunConfig(precision=PrecisionConfig(mode=config.precision.mode))


@pytest.mark.parametrize(
    ("view", "values", "words"),
    [
        (TrainArguments, {"shard_size": 0}, "--shard-size: Input should be greater than or equal to 1 (got 0)"),
        (Job, {"accumulation": 0, "seq_len": 0}, "seq_len: Input should be greater than or equal to 1 (got 0)"),
        (Job, {"accumulation": 0}, "accumulation: Input should be greater than or equal to 1 (got 0)"),
        (TrainArguments, {"stepz": 3}, "a training run has no setting 'stepz'\nhint: did you mean 'steps'?"),
        (TrainArguments, {"cpu_offload": True, "strategy": 3}, "--cpu-offload, --strategy: cpu_offload moves shards"),
        (Job, {"offload": True, "strategy": "no shard"}, "offload, strategy: cpu_offload moves shards to the host"),
        (
            Job,
            {"reentrant": True},
            "is not (reentrant sets activation_checkpointing_reentrant)",
        ),
        (TrainArguments, {"wrap": "none", "activation_checkpointing": True}, "--activation-checkpointing, --wrap: "),
        (TrainArguments, {"wrap": "none", "offload_activations": True}, "wrap = 'none' makes the model a single unit"),
        (Job, {"step_in_backward": True, "precision": "fp16"}, "before overflows in float16 are known"),
        (Job, {"gather_as": "int8", "strategy": "NO_SHARD"}, "gather_as rounds messages along the shard axis"),
        (Job, {"checkpointing": "selective", "reentrant": True}, "which activation_checkpointing_reentrant hides"),
    ],
)
def test_what_does_not_go_together_is_the_schemas_matter(view: type[View], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        view.of(values)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "sharding"),
    [
        ({"wrap": "A, B"}, {"wrap_classes": ("A", "B")}),
        ({"wrap": " None "}, {"wrap": "none"}),
        ({"wrap": "auto"}, {}),
        ({"reshard_after_forward": "auto"}, {"reshard_after_forward": "auto"}),
        ({"strategy": "shard-grad-op"}, {"strategy": "SHARD_GRAD_OP"}),
    ],
)
def test_options_in_other_words(values: dict[str, Any], sharding: dict[str, Any]) -> None:
    assert TrainArguments.of(values).run_config().sharding == ShardingConfig(**sharding)


def test_a_job_of_a_run_describes_that_run() -> None:
    config = RunConfig(
        sharding=ShardingConfig(
            reshard_after_forward="auto",
            unsharded_memory_gib=1.0,
            activation_checkpointing=True,
            activation_checkpointing_mode="selective",
            offload_main_weights=True,
            backward_prefetch="NO_PREFETCH",
        ),
        precision=PrecisionConfig(mode="bf16", reduce_as="int8"),
        training=TrainingConfig(gradient_accumulation_steps=4),
    )
    job = Job.from_run(config, seq_len=7)
    assert (job.checkpointing, job.accumulation, job.seq_len) == ("selective", 4, 7)
    assert job.run_config() == config
    neighbor = Job.from_run(RunConfig(sharding=ShardingConfig(reshard_after_forward=False)))
    assert (neighbor.strategy, neighbor.reshard_after_forward) == ("SHARD_GRAD_OP", "strategy")


def test_what_is_planned_for_comparison_only() -> None:
    job = Job.of({"checkpointing": "selective", "compile": True})
    with pytest.raises(ConfigError, match="which compile hides"):
        job.run_config()


def test_an_accelerator_takes_a_run_whole() -> None:
    from fullshard import Accelerator

    config = TrainArguments.of({"precision": "bf16", "strategy": "SHARD_GRAD_OP", "device": "cpu"}).run_config()
    accelerator = Accelerator(fsdp_plugin=config)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator._config.sharding == config.sharding
