"""Settings are validated where they are made.

pytest tests/config/test_config_schema.py
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fullshard.config.schema import PrecisionConfig, RunConfig, ShardingConfig
from fullshard.core.errors import ConfigError


def test_every_field_is_documented() -> None:
    for model in (ShardingConfig, PrecisionConfig):
        assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize("value", ["full shard", "Full-Shard", "1", 1, "FULL_SHARD"])
def test_spellings_of_a_strategy(value: Any) -> None:
    assert ShardingConfig(strategy=value).strategy == "FULL_SHARD"


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"strateg": 1}, "unknown setting 'strateg'", "did you mean 'strategy'?"),
        ({"strategy": "FUL_SHARD"}, "unknown sharding strategy 'FUL_SHARD'", "use one of FULL_SHARD (1)"),
        ({"strategy": True}, "unknown sharding strategy True", "use one of"),
        ({"shard_size": 0}, "'shard_size': input should be greater than or equal to 1, got 0", None),
        ({"cpu_offload": "maybe"}, "'cpu_offload': input should be a valid boolean, got 'maybe'", None),
        (
            {"wrap": "class"},
            "wrap = 'class' cannot be combined with wrap_classes = []",
            "use wrap_classes together with wrap: class",
        ),
        (
            {"wrap": "none", "wrap_classes": "Block"},
            "wrap = 'none' cannot be combined with wrap_classes = ['Block']",
            "use wrap_classes together with wrap: class",
        ),
        ({"wrap": "size"}, "wrap_min_numel = None", "use wrap_min_numel together with wrap: size"),
        ({"activation_checkpointing_reentrant": True}, "activation_checkpointing is not", None),
        ({"strategy": 3, "reshard_after_forward": True}, "has no effect with NO_SHARD", "FULL_SHARD"),
        ({"backward_prefetch": "BACKWARD"}, "'backward_prefetch': input should be 'BACKWARD_PRE'", None),
    ],
)
def test_wrong_settings_say_what_is_wrong(settings: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        ShardingConfig(**settings)
    assert message in str(error.value)
    assert hint is None or (error.value.hint is not None and hint in error.value.hint)


def test_reshard_after_forward_picks_the_neighboring_strategy() -> None:
    chosen = {
        (name, override): ShardingConfig(strategy=name, reshard_after_forward=override).resolved_strategy().name
        for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
        for override in (True, False)
    }
    assert chosen == {
        ("FULL_SHARD", True): "FULL_SHARD",
        ("FULL_SHARD", False): "SHARD_GRAD_OP",
        ("SHARD_GRAD_OP", True): "FULL_SHARD",
        ("SHARD_GRAD_OP", False): "SHARD_GRAD_OP",
        ("HYBRID_SHARD", True): "HYBRID_SHARD",
        ("HYBRID_SHARD", False): "HYBRID_SHARD_ZERO2",
        ("HYBRID_SHARD_ZERO2", True): "HYBRID_SHARD",
        ("HYBRID_SHARD_ZERO2", False): "HYBRID_SHARD_ZERO2",
    }
    assert ShardingConfig(strategy="NO_SHARD", reshard_after_forward=False).resolved_strategy().name == "NO_SHARD"


def test_hybrid_shards_within_a_host_unless_told_otherwise() -> None:
    assert ShardingConfig(strategy="HYBRID_SHARD").resolved_shard_size(local_world_size=8) == 8
    assert ShardingConfig(strategy="HYBRID_SHARD", shard_size=4).resolved_shard_size(local_world_size=8) == 4
    assert ShardingConfig().resolved_shard_size(local_world_size=8) is None


def test_class_names_are_split_and_stripped() -> None:
    assert ShardingConfig.of({"wrap": "class", "wrap_classes": " A , B,"}).wrap_classes == ("A", "B")


def test_of_takes_mappings_none_and_itself() -> None:
    config = ShardingConfig.of({"strategy": 2})
    assert config.strategy == "SHARD_GRAD_OP"
    assert ShardingConfig.of(config) is config
    assert ShardingConfig.of(None) == ShardingConfig()
    with pytest.raises(ConfigError, match="cannot be built from a int"):
        ShardingConfig.of(3)  # type: ignore[arg-type]


def test_precision_modes_and_overrides() -> None:
    bf16 = PrecisionConfig.of({"mode": "BF16"})
    assert (bf16.compute_dtype, bf16.reduce_dtype, bf16.result_dtype) == ("bfloat16", None, "float32")
    assert PrecisionConfig.of({"mode": False}).mode == "no"
    plain = PrecisionConfig()
    assert (plain.compute_dtype, plain.reduce_dtype, plain.result_dtype) == (None, None, None)
    mixed = PrecisionConfig.of({"mode": "bf16", "reduce_dtype": "torch.bfloat16", "output_dtype": "bf16"})
    assert (mixed.reduce_dtype, mixed.result_dtype) == ("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match="'mode'"):
        PrecisionConfig.of({"mode": "fp4"})
    with pytest.raises(ConfigError, match="'param_dtype'"):
        PrecisionConfig.of({"param_dtype": "int8"})


def test_what_is_rounded_for_the_way() -> None:
    sent = PrecisionConfig.of({"mode": "bf16", "gather_as": "int8", "reduce_as": "torch.bfloat16"})
    assert (sent.gather_as, sent.reduce_as) == ("int8", "bfloat16")
    with pytest.raises(ConfigError, match="'gather_as'"):
        PrecisionConfig.of({"gather_as": "float16"})
    with pytest.raises(
        ConfigError, match="gather_as = bfloat16 has no benefit because without it, messages are sent in bfloat16"
    ):
        PrecisionConfig.of({"mode": "bf16", "gather_as": "bf16"})
    with pytest.raises(
        ConfigError, match="reduce_as = bfloat16 has no benefit because without it, messages are sent in float16"
    ):
        PrecisionConfig.of({"reduce_dtype": "fp16", "reduce_as": "bf16"})
    with pytest.raises(ConfigError, match="along the shard axis, but NO_SHARD has no shard axis"):
        RunConfig.of({"sharding": {"strategy": "NO_SHARD"}, "precision": {"reduce_as": "int8"}})


def test_no_torch_is_imported() -> None:
    code = "import sys, fullshard.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
