"""DeepSpeed's dialect: the keys of its JSON files, and the short form in an Accelerate file.

A ZeRO stage becomes a strategy. Keys about buckets and overlap have no effect. Features that would change the training
and that the engine does not have (optimizers, data, profilers) are refused unless they are switched off.
"""

from functools import partial
from typing import Any

from fullshard.config import values
from fullshard.config.accelerate import AUTO, STEP_KEYS, is_auto, shard_size
from fullshard.config.dialect import Dialect, Key, Note, Read, Reading, Settings, Status, refused, rows, switch
from fullshard.config.fsdp import make_hybrid
from fullshard.config.origin import Entry
from fullshard.core.errors import ConfigError

STAGES = ("NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OPTIMIZER", "FULL_SHARD")
"""The strategy for each ZeRO stage."""


def _stage(value: Any) -> Settings:
    stage = values.integer(value)
    if not 0 <= stage < len(STAGES):
        raise ConfigError(f"expected a stage from 0 to 3, got {value!r}", hint="use stage 3 for FULL_SHARD")
    return {"sharding.strategy": STAGES[stage]}


_PARAMETERS, _OPTIMIZER = "sharding.cpu_offload", "sharding.offload_main_weights"
"""The settings for DeepSpeed's offload of parameters and of the optimizer."""
_SAVED = "sharding.offload_activations"
_WITH_PARAMETERS = "the gather inputs are made from main weights, which are offloaded too"
_WITH_OPTIMIZER = "main weights are offloaded together with the optimizer state"


def _offload_device(target: str, value: Any) -> Settings:
    device = values.text(value).lower()
    if device == "nvme":
        raise ConfigError(
            "nvme is not supported, because optimizer state cannot be offloaded to disk",
            hint="use cpu, or use more ranks",
        )
    if device not in ("cpu", "none"):
        raise ConfigError(f"expected cpu or none, got {value!r}", hint="use cpu")
    return {target: True} if device == "cpu" else {}


def _mode(mode: str) -> Any:
    def read(value: Any) -> Settings | str:
        if is_auto(value):
            return AUTO
        return {"precision.mode": mode} if values.boolean(value) else {}

    return read


def _loss_scale(value: Any) -> Settings:
    if values.number(value) != 0:
        raise ConfigError(
            f"a constant loss scale of {value} is not supported", hint="use 0, which selects a dynamic scale"
        )
    return {}


def _batch(value: Any) -> str:
    if is_auto(value):
        return AUTO
    if values.integer(value) < 1:
        raise ValueError(f"expected 1 or more, got {value!r}")
    return "the script's data loader sets the batch size"


_KINDS = ("type", "torch_adam", "adam_w_mode")
"""The keys that select the optimizer and its implementation. The other keys of the section are numeric settings."""


def _made_by_script(value: Any) -> str:
    """Accept an optimizer or scheduler only if its numeric settings are all `auto`, because the script sets them."""
    numbers = [entry for entry in _leaves(value) if entry.key.lower() not in _KINDS and not is_auto(entry.value)]
    if numbers:
        names = ", ".join(entry.key for entry in numbers)
        raise ConfigError(f"the script creates it and would ignore {names}", hint="set the values in the script")
    return "the script creates it"


def _leaves(value: Any) -> list[Entry]:
    if not isinstance(value, tuple):
        return []
    return [leaf for entry in value for leaf in (_leaves(entry.value) if entry.is_mapping else [entry])]


def _off(because: str, *names: str) -> tuple[Key, ...]:
    """Return rows for features of DeepSpeed that are refused if they are enabled."""

    def read(value: Any) -> Settings:
        enabled = value
        if isinstance(value, tuple):
            # A section without `enabled` is enabled if it is present.
            flags = [entry.value for entry in value if entry.key.lower().endswith("enabled")]
            enabled = any(values.boolean(flag) for flag in flags) if flags else bool(value)
        if enabled not in (False, None, {}, []):
            raise ConfigError(
                f"the feature is not supported: {because}", hint="remove the section, or set enabled: false in it"
            )
        return {}

    return refused(because, *names, read=read)


def _translated(name: str, target: str, because: str, read: Read) -> Key:
    return Key(name, Status.TRANSLATED, target, because=because, read=read)


_STAGE_NAMES = "each stage corresponds to a strategy"


def _offload_section(target: str, because: str) -> Dialect:
    return Dialect(
        "an offload section",
        (_translated("device", target, because, partial(_offload_device, target)), *rows("offload")),
    )


_ZERO = Dialect(
    "zero_optimization",
    (
        _translated("stage", "sharding.strategy", _STAGE_NAMES, _stage),
        Key("offload_param", section=_offload_section(_PARAMETERS, _WITH_PARAMETERS)),
        Key("offload_optimizer", section=_offload_section(_OPTIMIZER, _WITH_OPTIMIZER)),
        _translated("cpu_offload", _OPTIMIZER, _WITH_OPTIMIZER, switch(_OPTIMIZER, True)),
        _translated("cpu_offload_params", _PARAMETERS, _WITH_PARAMETERS, switch(_PARAMETERS, True)),
        _translated(
            "zero_hpz_partition_size",
            "sharding.shard_size",
            "gradients and optimizer state are also sharded within the group",
            shard_size,
        ),
        _translated("mics_shard_size", "sharding.shard_size", "", shard_size),
        *rows("zero_optimization"),
    ),
)


def _finish(reading: Reading) -> None:
    """Make the strategy hybrid if a group size is set (ZeRO++, MiCS), and add notes on missing keys."""
    size = reading.setting("sharding.shard_size")
    if size is not None:
        make_hybrid(reading, size)
    elif reading.entries and "stage" not in reading.entries:
        at = reading.entries.get("zero_optimization") or next(iter(reading.entries.values()))
        text = "has no stage, which means 0 (NO_SHARD) in DeepSpeed but the default strategy here; set a stage"
        reading.notes.append(Note(at.origin, "zero_optimization", Status.TRANSLATED, text))
    whole, micro = (reading.entries.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    said = "gradient_accumulation_steps" in reading.entries
    if whole is not None and micro is not None and not (said or is_auto(whole.value) or is_auto(micro.value)):
        text = f"and {micro.key} do not set gradient_accumulation_steps here; set it, or a step has one micro-batch"
        reading.notes.append(Note(whole.origin, whole.key, Status.NO_EFFECT, text))


def _finish_fp16(reading: Reading) -> None:
    """Remove problems with the loss scale if fp16 is disabled, because the loss scale is then unused."""
    enabled, scale = reading.entries.get("enabled"), reading.entries.get("loss_scale")
    if enabled is not None and scale is not None and enabled.value is False:
        reading.problems = [problem for problem in reading.problems if scale.origin not in problem.origins]


_FP16 = Dialect(
    "fp16",
    (
        Key("enabled", Status.TRANSLATED, "precision.mode", read=_mode("fp16")),
        Key("loss_scale", read=_loss_scale),
        *rows("fp16"),
    ),
    finish=_finish_fp16,
)
_BF16 = Dialect("bf16", (Key("enabled", Status.TRANSLATED, "precision.mode", read=_mode("bf16")), *rows("bf16")))
_ACTIVATIONS = Dialect(
    "activation_checkpointing",
    (
        _translated(
            "cpu_checkpointing",
            _SAVED,
            "with activation checkpointing, the inputs of units are offloaded",
            switch(_SAVED, True),
        ),
        *rows("activation_checkpointing"),
    ),
)
_DTYPES = Dialect("data_types", rows("data_types"))
_REPORTS = ("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler")
_DIVISIONS = ("elasticity", "tensor_parallel", "pipeline", "sparse_attention", "hybrid_engine")
_OTHER_PARTS = (
    *("amp", "torch_autocast", "compression_training", "quantize_training", "data_efficiency"),
    *("curriculum_learning", "autotuning", "nebula"),
)

DEEPSPEED = Dialect(
    "a DeepSpeed configuration",
    (
        Key("zero_optimization", section=_ZERO),
        Key("fp16", section=_FP16),
        Key("bf16", section=_BF16, spellings=("bfloat16",)),
        *STEP_KEYS,
        *rows("deepspeed_batch", _batch),
        *rows("deepspeed_script", _made_by_script),
        Key("activation_checkpointing", section=_ACTIVATIONS),
        Key("data_types", section=_DTYPES),
        *rows("deepspeed"),
        *_off("the script must write its metrics", *_REPORTS),
        *_off("the launcher sets the number of ranks, and only data parallelism is supported", *_DIVISIONS),
        *_off("data, autocasting and compression are up to the script", *_OTHER_PARTS),
        *_off("use sharding.compile, which compiles every unit", "compile"),
    ),
    finish=_finish,
)

DEEPSPEED_SHORT = Dialect(
    "deepspeed_config",
    (
        _translated("zero_stage", "sharding.strategy", _STAGE_NAMES, _stage),
        _translated("offload_param_device", _PARAMETERS, _WITH_PARAMETERS, partial(_offload_device, _PARAMETERS)),
        _translated("offload_optimizer_device", _OPTIMIZER, _WITH_OPTIMIZER, partial(_offload_device, _OPTIMIZER)),
        *STEP_KEYS,
        Key("deepspeed_config_file", because="its settings are read"),
        *rows("deepspeed_config"),
    ),
)
