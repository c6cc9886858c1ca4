"""What is written reads back; the JSON schema.

Run: pytest tests/config/test_config_write.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from fullshard.config.axes import AxesConfig
from fullshard.config.load import load_file
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.schema import (
    GROUPS,
    CheckpointConfig,
    LaunchConfig,
    PrecisionConfig,
    RunConfig,
    ShardingConfig,
    TrainingConfig,
)
from fullshard.config.settings import SettingsError
from fullshard.config.write import json_schema, scalar, write_native
from fullshard.core.strategy import STRATEGIES

DTYPES = st.sampled_from([None, "float32", "bfloat16", "float16"])
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
# Readers drop spaces around a text, and take these words for no value at all, quoted or not.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and text.lower() not in ("none", "null", "~")
)


def groups(model: type[Any], **given_values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A group of settings: any subset of the given ones, and the defaults."""
    fields = st.fixed_dictionaries({}, optional=given_values)

    def build(values: dict[str, Any]) -> Any:
        try:
            return model(**values)
        except SettingsError:
            assume(False)

    return fields.map(build)


BOOL = st.booleans()
LAUNCH = groups(
    LaunchConfig,
    num_processes=st.none() | st.sampled_from([1, 2, 4, 6, 8, 64]),
    num_machines=st.sampled_from([1, 1, 2, 4]),
    min_machines=st.none() | st.integers(1, 4),
    machine_rank=st.none() | st.integers(0, 3),
    main_process_ip=st.none() | st.ip_addresses().map(str) | NAMES,
    main_process_port=st.none() | st.integers(0, 65535),
    rdzv_backend=st.sampled_from([None, "c10d", "static"]),
    rdzv_id=st.none() | TEXTS,
    rdzv_conf=st.sampled_from(["", "timeout=900", "read_timeout=60,timeout=900"]),
    max_restarts=st.integers(0, 9),
    monitor_interval=st.floats(min_value=0, exclude_min=True, allow_nan=False),
    grace_period=st.floats(min_value=0, exclude_min=True, allow_nan=False),
    timeout=st.none() | st.floats(min_value=0, exclude_min=True, allow_nan=False),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    gpu_ids=st.none() | st.lists(st.integers(0, 7).map(str), min_size=1, max_size=8).map(tuple),
    num_cpu_threads_per_process=st.none() | st.integers(1, 64),
    log_dir=st.none() | TEXTS,
    role=TEXTS,
    debug=BOOL,
)
SHARDING = groups(
    ShardingConfig,
    strategy=st.sampled_from(sorted(STRATEGIES)),
    shard_size=st.none() | st.sampled_from([1, 2, 4, 8]),
    reshard_after_forward=st.none() | BOOL | st.just("auto"),
    unsharded_memory_gib=st.none() | st.floats(0, 1e3),
    wrap_classes=st.lists(NAMES, max_size=3).map(tuple),
    wrap_min_numel=st.none() | st.integers(1, 10**12),
    quantize=st.sampled_from([None, "nf4", "nf4-double", "mxfp4", "fp8"]),
    ignored_modules=st.none() | TEXTS,
    backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
    forward_prefetch=BOOL,
    activation_checkpointing=BOOL,
    activation_checkpointing_reentrant=BOOL,
    activation_checkpointing_mode=st.sampled_from(["full", "selective"]),
    wrap_embeddings=BOOL,
    cpu_offload=BOOL,
    offload_compute_shards=st.none() | BOOL,
    offload_main_weights=st.none() | BOOL,
    offload_optimizer_state=st.none() | BOOL,
    offload_activations=BOOL,
    sync_module_states=BOOL,
    cpu_ram_efficient_loading=BOOL,
    compile=BOOL,
    compile_backend=st.sampled_from(["inductor", "eager", "Eager", "aot_eager", "mine"]),
    compile_mode=st.sampled_from(["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]),
    compile_fullgraph=BOOL,
    compile_dynamic=st.none() | BOOL,
) | groups(ShardingConfig, wrap=st.just("none"), strategy=st.sampled_from(sorted(STRATEGIES)))
PRECISION = groups(
    PrecisionConfig,
    mode=st.sampled_from(["no", "fp32", "bf16", "fp16", "fp8"]),
    param_dtype=DTYPES,
    reduce_dtype=DTYPES,
    gather_as=st.none() | st.sampled_from(["int8", "bfloat16"]),
    reduce_as=st.none() | st.sampled_from(["int8", "bfloat16"]),
    output_dtype=DTYPES,
    buffer_dtype=DTYPES,
    cast_inputs=BOOL,
    fp8_all_gather=BOOL,
    fp8_pad_inner_dim=BOOL,
)
CONFIGS = groups(
    RunConfig,
    launch=LAUNCH,
    sharding=SHARDING,
    parallelism=groups(
        AxesConfig,
        cp_size=st.sampled_from([1, 2]),
        cp_comm_strategy=st.sampled_from(["allgather", "alltoall"]),
        sp_size=st.sampled_from([1, 2]),
        sp_backend=st.sampled_from(["deepspeed", "fullshard"]),
        sp_seq_length=st.none() | st.integers(1, 10**6),
        sp_seq_length_is_variable=BOOL,
        sp_attn_implementation=st.none() | TEXTS,
    ),
    precision=PRECISION,
    training=groups(
        TrainingConfig,
        gradient_accumulation_steps=st.integers(1, 10**6),
        gradient_clipping=st.none() | st.floats(1e-3, 1e3),
        step_in_backward=BOOL,
        nonfinite_gradients=st.sampled_from(["raise", "skip", "off"]),
        nonfinite_limit=st.integers(1, 10**6),
        replica_check=st.sampled_from(["raise", "off"]),
        compare_every=st.integers(0, 10**6),
    ),
    checkpoint=groups(
        CheckpointConfig,
        state_dict_type=st.sampled_from(["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]),
        format=st.sampled_from(["native", "dcp"]),
        async_save=st.booleans(),
        max_lost_steps=st.none() | st.integers(1, 10**6),
    ),
)
SCHEMA = json_schema()
PROPERTY = settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


def test_the_strategies_reach_every_setting() -> None:
    """A setting that is added to the schema must be added above."""
    source = Path(__file__).read_text()
    for group in GROUPS:
        model: Any = RunConfig.model_fields[group].annotation
        for name in model.model_fields:
            assert f"    {name}=" in source or f"({model.__name__}, {name}=" in source, name
    assert "wrap=st" in source


def read(text: str, suffix: str = ".yaml") -> Resolved:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"run{suffix}"
        path.write_text(text, encoding="utf-8")
        return resolve([load_file(path)])


@PROPERTY
@given(config=CONFIGS, comments=BOOL, only_changed=BOOL)
def test_any_configuration_survives_the_native_file(config: RunConfig, comments: bool, only_changed: bool) -> None:
    text = write_native(config, comments=comments, only_changed=only_changed)
    resolved = read(text)
    assert resolved.config == config
    assert not resolved.notes
    jsonschema.validate(YAML(typ="safe").load(text), SCHEMA)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("no", '"no"'),
        ("bf16", "bf16"),
        ("1e8", '"1e8"'),
        ("12", '"12"'),
        ("", '""'),
        ("a: b # c", '"a: b # c"'),
        (("A", "no"), '[A, "no"]'),
        ((), "[]"),
        (10**12, "1000000000000"),
        ("x" * 5000, "x" * 5000),
    ],
)
def test_scalars_mean_the_same_to_every_reader(value: Any, text: str) -> None:
    import yaml  # type: ignore[import-untyped]  # YAML 1.1, as many editors and tools have it

    assert scalar(value) == text
    expected = list(value) if isinstance(value, tuple) else value
    assert yaml.safe_load(text) == expected
    assert YAML(typ="safe").load(text) == expected


def test_every_setting_is_explained_in_the_file() -> None:
    """Uncommenting every default changes nothing."""
    text = write_native(RunConfig())
    lines = text.splitlines()
    for group in GROUPS:
        model: Any = RunConfig.model_fields[group].annotation
        for name, field in model.model_fields.items():
            at = next(i for i, line in enumerate(lines) if line.startswith(f"  # {name}: "))
            assert lines[at - 1].startswith("  ## "), name
            assert field.description
    assert read(text).config == RunConfig()
    resolved = read(text.replace("\n  # ", "\n  "))
    assert resolved.config == RunConfig()
    assert "sharding.cpu_offload" in resolved.settings


@pytest.mark.parametrize(
    "content",
    [
        {"sharding": {"strategy": "FUL_SHARD"}},
        {"sharding": {"no_such": 1}},
        {"launch": {"num_processes": 0}},
        {"lunch": {}},
        {"precision": {"mode": "fp4"}},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(content: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, json_schema())
