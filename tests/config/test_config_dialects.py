"""The tables of dialects know every key of the tools they stand for, and read their values as people write them.

pytest tests/config/test_config_dialects.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.accelerate import FLAT, PARALLELISM_KEYS
from fullshard.config.accelerate_file import ACCELERATE
from fullshard.config.deepspeed import DEEPSPEED
from fullshard.config.dialect import Dialect, Key, Reading, Status
from fullshard.config.document import read_document
from fullshard.config.environment import VARIABLES, load_environment
from fullshard.config.fsdp import FSDP
from fullshard.config.handover import hand_over, handed_over
from fullshard.config.load import NATIVE, load_file, load_fsdp_config
from fullshard.config.origin import Origin, entries_of
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.schema import SETTINGS
from fullshard.config.tables import TABLES, fill_tables
from fullshard.config.transformers import FSDP_ARGUMENTS, TRANSFORMERS, read_fsdp_words
from fullshard.config.xla import XLA_SETTINGS
from fullshard.core.errors import ConfigError

DIALECTS = (NATIVE, ACCELERATE, DEEPSPEED, TRANSFORMERS, FLAT, FSDP_ARGUMENTS)
PLAIN = resolve([Reading()]).config


def _words(text: str) -> list[str]:
    return text.split()


FSDP_CONFIG = _words(
    """
    fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params fsdp_auto_wrap_policy
    fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch
    fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_state_dict_type fsdp_use_orig_params
    fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing
    fsdp_activation_checkpointing_offload fsdp_ignored_modules fsdp_wrap_policy min_num_param offload_params
    """
)
CLUSTER = _words(
    """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
    gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function
    enable_cpu_affinity fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config
    mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm
    tpu_env dynamo_config fp16 dynamo_backend
    """
)
TRANSFORMERS_KEYS = _words(
    """
    min_num_params transformer_layer_cls_to_wrap backward_prefetch forward_prefetch limit_all_gathers
    use_orig_params sync_module_states cpu_ram_efficient_loading activation_checkpointing state_dict_type xla
    xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt version reshard_after_forward cpu_offload
    auto_wrap_policy
    """
)
XLA_ARGUMENTS = _words(
    """
    reshard_after_forward flatten_parameters execute_sharding_on_init optimization_barrier_in_forward
    optimization_barrier_in_backward sync_on_finalization disable_reshard_on_root compute_dtype buffer_dtype
    fp32_reduce_scatter sharding_groups sharding_rank sharding_world_size shard_param_on_dim_0
    pin_layout_in_collective_ops reduce_scatter_bucket_size_mb coalesce_all_gather_ops auto_wrap_policy
    auto_wrapper_callable param_init_fn _shard_size_multiple _use_xla_patched_linear _debug_dummy_forward_pass
    _debug_msg _debug_print _debug_dummy_all_gather_op _debug_dummy_all_reduce_op
    _debug_dummy_reduce_scatter_op _debug_dummy_optimization_barrier_op
    """
)
EXPORTED = _words(
    """
    FSDP_VERSION FSDP_SHARDING_STRATEGY FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_AUTO_WRAP_POLICY
    FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_MIN_NUM_PARAMS FSDP_BACKWARD_PREFETCH FSDP_FORWARD_PREFETCH
    FSDP_STATE_DICT_TYPE FSDP_USE_ORIG_PARAMS FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_SYNC_MODULE_STATES
    FSDP_ACTIVATION_CHECKPOINTING FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD FSDP_IGNORED_MODULES
    ACCELERATE_MIXED_PRECISION ACCELERATE_DYNAMO_BACKEND ACCELERATE_DYNAMO_MODE
    ACCELERATE_DYNAMO_USE_FULLGRAPH ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION
    ACCELERATE_DEBUG_MODE ACCELERATE_CPU_AFFINITY ACCELERATE_USE_CPU ACCELERATE_GRADIENT_ACCUMULATION_STEPS
    PARALLELISM_CONFIG_DP_REPLICATE_SIZE PARALLELISM_CONFIG_DP_SHARD_SIZE PARALLELISM_CONFIG_TP_SIZE
    PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_CP_BACKEND PARALLELISM_CONFIG_CP_COMM_STRATEGY
    PARALLELISM_CONFIG_SP_SIZE PARALLELISM_CONFIG_SP_BACKEND PARALLELISM_CONFIG_SP_SEQ_LENGTH
    PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION
    """
)


def read(tmp_path: Path, text: str, name: str = "run.yaml") -> Resolved:
    """What a file with this text resolves to."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return resolve([load_file(path)])


def fsdp(**keys: Any) -> Resolved:
    """What an `fsdp_config` of these keys resolves to."""
    return resolve([FSDP.read(entries_of(keys, "fsdp_config"))])


def notes(found: Resolved | Reading) -> str:
    """All notes, one a line."""
    return "\n".join(map(str, found.notes))


def every_key(dialect: Dialect) -> Iterable[Key]:
    """The rows of a dialect and of its sections."""
    for key in dialect.keys:
        yield key
        if key.section is not None:
            yield from every_key(key.section)


# -- the tables are complete --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "keys"),
    [
        (FSDP, FSDP_CONFIG),
        (ACCELERATE, CLUSTER),
        (TRANSFORMERS, [*TRANSFORMERS_KEYS, *(f"fsdp_{key}" for key in TRANSFORMERS_KEYS if "xla" not in key)]),
        (TRANSFORMERS, FSDP_CONFIG),
        (XLA_SETTINGS, XLA_ARGUMENTS),
    ],
)
def test_every_key_of_the_reference_is_known(dialect: Dialect, keys: list[str]) -> None:
    assert [key for key in keys if dialect.find(key) is None] == []


def test_every_variable_of_the_reference_is_known() -> None:
    assert [name for name in EXPORTED if name not in VARIABLES] == []
    assert all(FLAT.find(key) for key in VARIABLES.values())


def test_every_field_of_the_installed_accelerate_is_known() -> None:
    cluster = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    plugin = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin
    parallelism = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
    assert [f.name for f in dataclasses.fields(cluster) if not ACCELERATE.find(f.name)] == []
    in_scripts_only = {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn"}
    assert {f.name for f in dataclasses.fields(plugin) if not FSDP.find(f.name)} == in_scripts_only
    names = [name for name in inspect.signature(parallelism).parameters if name.endswith("_size")]
    section = Dialect("", PARALLELISM_KEYS, prefix="parallelism_config_")
    assert len(names) >= 4
    assert [name for name in names if not section.find(name)] == []


def test_every_row_says_what_becomes_of_the_key() -> None:
    for dialect in DIALECTS:
        for key in every_key(dialect):
            if key.section is not None:
                continue
            if key.status in (Status.NO_EFFECT, Status.REFUSED):
                assert key.because, f"{dialect.name}: {key.name} has no reason"
            if key.target:
                assert key.target in SETTINGS
            elif key.status in (Status.USED, Status.TRANSLATED):
                assert key.read is not None or key.because, f"{dialect.name}: {key.name} does nothing"


def test_no_two_rows_answer_to_one_name() -> None:
    for dialect in DIALECTS:
        for part in [dialect, *(key.section for key in every_key(dialect) if key.section is not None)]:
            spellings = part.spellings()
            assert len(spellings) == len(set(spellings)), part.name


# -- spellings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "sharding_strategy", "FSDP-Sharding-Strategy"])
@pytest.mark.parametrize("value", [2, "2", "shard_grad_op", "SHARD_GRAD_OP", "Shard-Grad-Op"])
def test_keys_and_values_in_any_spelling(key: str, value: Any) -> None:
    assert fsdp(**{key: value}).config.sharding.strategy == "SHARD_GRAD_OP"


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"fsdp_backward_prefetch_policy": "BACKWARD_POST"}, "sharding.backward_prefetch", "BACKWARD_POST"),
        ({"fsdp_backward_prefetch": 3}, "sharding.backward_prefetch", "NO_PREFETCH"),
        ({"fsdp_state_dict_type": "1"}, "checkpoint.state_dict_type", "FULL_STATE_DICT"),
        ({"fsdp_transformer_layer_cls_to_wrap": " A, B ,"}, "sharding.wrap_classes", ("A", "B")),
        ({"transformer_layer_cls_to_wrap": ["A", "B"]}, "sharding.wrap_classes", ("A", "B")),
        ({"fsdp_wrap_policy": "SIZED_BASED_WRAP", "min_num_param": "1e8"}, "sharding.wrap_min_numel", 100_000_000),
        ({"fsdp_auto_wrap_policy": 3}, "sharding.wrap", "none"),
        ({"fsdp_min_num_params": 2000}, "sharding.wrap", "size"),
        ({"fsdp_min_num_params": 0}, "sharding.wrap", "auto"),
        ({"fsdp_offload_params": "On"}, "sharding.cpu_offload", True),
        ({"fsdp_offload_activations": "yes"}, "sharding.offload_activations", True),
        ({"fsdp_activation_checkpointing_offload": True}, "sharding.offload_activations", True),
        ({"fsdp_activation_checkpointing_offload": "false"}, "sharding.offload_activations", False),
        ({"fsdp_forward_prefetch": "no"}, "sharding.forward_prefetch", False),
        ({"fsdp_reshard_after_forward": "False"}, "sharding.reshard_after_forward", False),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "sharding.strategy", "SHARD_GRAD_OP"),
        ({"fsdp_reshard_after_forward": 2}, "sharding.strategy", "SHARD_GRAD_OP"),
        ({"fsdp_reshard_after_forward": "HYBRID_SHARD"}, "sharding.strategy", "HYBRID_SHARD"),
        ({"fsdp_ignored_modules": ".*router"}, "sharding.ignored_modules", ".*router"),
        ({"fsdp_transformer_layer_cls_to_wrap": ["A", 3]}, "sharding.wrap_classes", ("A", "3")),
    ],
)
def test_values_arrive(keys: dict[str, Any], path: str, value: Any) -> None:
    assert fsdp(**keys).config.value(path) == value


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"fsdp_backward_prefetch_policy": 1}, "translated to sharding.backward_prefetch = BACKWARD_PRE"),
        ({"fsdp_wrap_policy": "SIZE_BASED_WRAP", "min_num_param": 5}, "translated to sharding.wrap = size"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "units of 100,000,000 parameters"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_min_num_params": 5}, "only applies to SIZE_BASED_WRAP"),
        ({"fsdp_use_orig_params": False}, "the original parameters are always kept"),
        ({"fsdp_limit_all_gathers": True}, "limits the units in flight"),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False, "fsdp_version": 2}, "version 2"),
        ({"fsdp_backward_prefetch": None}, "it has no value"),
    ],
)
def test_what_is_not_plainly_used_is_said_once(keys: dict[str, Any], note: str) -> None:
    assert notes(fsdp(**keys)).count(note) == 1


def test_plain_keys_are_used_without_a_word() -> None:
    plain = fsdp(fsdp_sharding_strategy=1, fsdp_offload_params=True, fsdp_transformer_layer_cls_to_wrap="A")
    assert plain.notes == ()


# -- Accelerate's file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("distributed_type: FSDP\nmixed_precision: bf16", {"precision": {"mode": "bf16"}}),
        ("distributed_type: FSDP\nmixed_precision: no", {"precision": {"mode": "no"}}),
        ("distributed_type: FSDP\nfp16: true", {"precision": {"mode": "fp16"}}),
        ("distributed_type: 'NO'", {"launch": {"num_processes": 1}}),
        ("distributed_type: MULTI_GPU", {"sharding": {"strategy": "NO_SHARD"}}),
        ("distributed_type: MULTI_CPU", {"sharding": {"strategy": "NO_SHARD"}, "launch": {"device": "cpu"}}),
        ("distributed_type: FSDP\ntpu_use_cluster: false\ntpu_env: []\ndowncast_bf16: 'no'", {}),
        ("distributed_type: FSDP\nuse_cpu: true\ndebug: true", {"launch": {"device": "cpu", "debug": True}}),
        ("distributed_type: FSDP\nnum_processes: -1", {}),
        ("distributed_type: FSDP\ngpu_ids: 0,2", {"launch": {"gpu_ids": ["0", "2"]}}),
        (
            "distributed_type: FSDP\ndynamo_config:\n  dynamo_backend: AOT_EAGER\n  dynamo_use_dynamic: true",
            {"sharding": {"compile": True, "compile_backend": "aot_eager", "compile_dynamic": True}},
        ),
        (
            "distributed_type: FSDP\ndynamo_backend: INDUCTOR",
            {"sharding": {"compile": True, "compile_backend": "inductor"}},
        ),
        ("distributed_type: FSDP\ndynamo_backend: 'NO'", {"sharding": {"compile": False}}),
        (
            "distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
            "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 1",
            {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}, "launch": {"num_processes": 4}},
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
            "parallelism_config:\n  dp_replicate_size: 2\n  dp_shard_size: 4",
            {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 4, "reshard_after_forward": False}},
        ),
        ("distributed_type: FSDP\nparallelism_config:\n  dp_replicate_size: 2", {"sharding": {"strategy": "NO_SHARD"}}),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  dp_replicate_size: 2\n"
            "  dp_shard_size: 2\n  cp_size: 2\n  cp_backend: torch\n  cp_comm_strategy: alltoall",
            {
                "launch": {"num_processes": 8},
                "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 4},
                "parallelism": {"cp_size": 2, "cp_comm_strategy": "alltoall"},
            },
        ),
        (
            "distributed_type: FSDP\nparallelism_config:\n  dp_replicate_size: 2\n  sp_size: 2\n  sp_seq_length: 64\n"
            "  sp_backend: deepspeed\n  sp_seq_length_is_variable: false\n  sp_attn_implementation: sdpa",
            {
                "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2},
                "parallelism": {
                    **{"sp_size": 2, "sp_seq_length": 64, "sp_backend": "deepspeed"},
                    **{"sp_seq_length_is_variable": False, "sp_attn_implementation": "sdpa"},
                },
            },
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
            "  offload_param_device: none\n  gradient_accumulation_steps: 4\n  zero3_init_flag: true\n"
            "  seq_parallel_communication_data_type: bf16",
            {
                "sharding": {"strategy": "FULL_SHARD", "offload_main_weights": True},
                "training": {"gradient_accumulation_steps": 4},
            },
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {}", {"sharding": {"strategy": "SHARD_GRAD_OPTIMIZER"}}),
        (
            "distributed_type: FSDP\nxla: false\nxla_fsdp_grad_ckpt: true",
            {"sharding": {"activation_checkpointing": True}},
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  xla: false\n  xla_fsdp_settings:\n    compute_dtype: bfloat16\n"
            "    fp32_reduce_scatter: true",
            {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
        ),
        (
            "xla_fsdp_settings:\nxla_fsdp_grad_ckpt: True",
            {"sharding": {"activation_checkpointing": True}},
        ),
    ],
)
def test_accelerates_file(tmp_path: Path, text: str, changed: dict[str, Any]) -> None:
    found = json.loads(read(tmp_path, text + "\n").config.model_dump_json(exclude_unset=True))
    assert {group: settings for group, settings in found.items() if settings} == changed


def test_a_deepspeed_file_named_in_an_accelerate_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"
    assert read(tmp_path, text).config.sharding.strategy == "SHARD_GRAD_OPTIMIZER"
    with pytest.raises(ConfigError, match=r"keep one of the two"):
        read(tmp_path, text + "  zero_stage: 3\n")


# -- DeepSpeed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "strategy"), [(0, "NO_SHARD"), (1, "SHARD_OPTIMIZER"), (2, "SHARD_GRAD_OPTIMIZER"), (3, "FULL_SHARD")]
)
def test_a_zero_stage_is_a_strategy(tmp_path: Path, stage: int, strategy: str) -> None:
    found = read(tmp_path, json.dumps({"zero_optimization": {"stage": stage}}), "ds.json")
    assert found.config.sharding.strategy == strategy
    assert f"translated to sharding.strategy = {strategy}" in notes(found)


def test_a_deepspeed_file_as_transformers_documents_it(tmp_path: Path) -> None:
    text = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": "auto",
            "zero_hpz_partition_size": 8,
        },
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
        "wandb": {"enabled": False},
    }
    found = read(tmp_path, json.dumps(text, indent=2), "ds.json")
    sharding = found.config.sharding
    assert (sharding.strategy, sharding.shard_size, sharding.offload_main_weights) == ("HYBRID_SHARD", 8, True)
    assert str(sharding.offload) == "main weights, optimizer state and activations"
    training = found.config.training
    assert (found.config.precision.mode, training.gradient_accumulation_steps) == ("bf16", 2)
    assert training.gradient_clipping == 1.0
    for word in ("stage", "device", "pin_memory", "overlap_comm", "optimizer", "scheduler", "zero_hpz_partition_size"):
        assert f" {word} " in notes(found)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ('{"bf16": {"enabled": true}}', True),
        ('{"zero_optimization": {"offload_param": {"device": "cpu"}}}', True),
        ('{"zero_optimization": {"stage": 0}}', False),
        ('{"zero_optimization": {"mics_shard_size": 4}}', False),
        ("{}", False),
    ],
)
def test_a_deepspeed_file_without_a_stage_is_told_what_that_is_here(text: str, is_told: bool, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    notes = [str(note) for note in DEEPSPEED.read(read_document(path)).notes]
    assert (
        any("zero_optimization has no stage, which means 0 (NO_SHARD) in DeepSpeed" in note for note in notes)
        == is_told
    )


def test_deepspeeds_batch_sizes_do_not_say_how_many_micro_batches_a_step_has(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    wanted = "do not set gradient_accumulation_steps here"
    assert wanted in notes(read(tmp_path, json.dumps(sizes), "ds.json"))
    for more in ({"gradient_accumulation_steps": 2}, {"train_batch_size": "auto"}):
        assert wanted not in notes(read(tmp_path, json.dumps({**sizes, **more}), "ds.json"))


def test_the_loss_scale_of_fp16_that_is_off_is_of_no_account(tmp_path: Path) -> None:
    fp16 = {"enabled": False, "loss_scale": 128}
    zero = {"zero_optimization": {"stage": 2}}
    assert read(tmp_path, json.dumps({**zero, "fp16": fp16}), "ds.json").config.precision.mode == "no"
    with pytest.raises(ConfigError, match="a constant loss scale of 128 is not supported"):
        read(tmp_path, json.dumps({**zero, "fp16": {**fp16, "enabled": True}}), "ds.json")


OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "adam_w_mode": True}}


@pytest.mark.parametrize(
    ("more", "settings", "note"),
    [
        ({"optimizer": OPTIMIZER}, {}, "optimizer has no effect here: the script creates it"),
        ({"_comment": "from a page", "$schema": "x"}, {}, "_comment has no effect here: it is a comment"),
        ({"compile": {"enabled": False, "backend": "eager"}, "gradient_clipping": "auto"}, {}, "auto leaves it"),
    ],
)
def test_what_published_deepspeed_files_have_besides(
    more: dict[str, Any], settings: dict[str, Any], note: str, tmp_path: Path
) -> None:
    found = read(tmp_path, json.dumps({"zero_optimization": {"stage": 3}, **more}), "ds.json")
    changed = {name: value for name, value in found.config.sharding if value != getattr(PLAIN.sharding, name)}
    assert changed == settings
    assert note in notes(found)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"compile": {"deepcompile": True}},
            "compile: the feature is not supported: use sharding.compile, which compiles every unit",
        ),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-4}}}, "would ignore lr"),
    ],
)
def test_what_would_change_the_training_stays_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, json.dumps({"zero_optimization": {"stage": 3}, **more}), "ds.json")


def test_one_process_is_what_no_means_whatever_the_number_beside_it(tmp_path: Path) -> None:
    found = read(tmp_path, "distributed_type: 'NO'\nnum_processes: 8\nmixed_precision: bf16\n")
    assert found.config.launch.num_processes == 1
    assert "run.yaml:2:1: num_processes = 8 has no effect: distributed_type = NO starts one" in notes(found)
    assert "has no effect" not in notes(read(tmp_path, "distributed_type: 'NO'\nnum_processes: 1\n"))


def test_a_file_of_both_arguments_of_a_trainer(tmp_path: Path) -> None:
    config = {"fsdp_version": 2, "reshard_after_forward": True, "activation_cpu_offload": True, "_note": "inside"}
    preset = {"_param_docs": {"fsdp": "words"}, "fsdp": "full_shard auto_wrap offload", "fsdp_config": config}
    found = read(tmp_path, json.dumps(preset), "fsdp2.json").config.sharding
    assert (found.strategy, found.cpu_offload, found.offload_activations) == ("FULL_SHARD", True, True)
    path = tmp_path / "fsdp2.json"
    reading = load_fsdp_config(path)
    assert not {"fsdp", "fsdp_config"} & reading.entries.keys(), "a Trainer keeps them as its fsdp_config"
    preset["fsdp"] = "full_shard auto_warp"
    with pytest.raises(
        ConfigError, match=r"fsdp2.json:1:\d+: fsdp: unknown option 'auto_warp' in 'full_shard auto_warp'"
    ):
        read(tmp_path, json.dumps(preset), "fsdp2.json")
    preset |= {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}
    with pytest.raises(ConfigError, match="contradict each other"):
        read(tmp_path, json.dumps(preset), "fsdp2.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {gradient_clipping: .nan}", r"run.yaml:1:12: gradient_clipping: expected a number, got nan"),
        ("launch: {monitor_interval: .inf}", "input should be a finite number, got inf"),
        ("launch: {timeout: .inf}", "input should be a finite number, got inf"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "training: {gradient_clipping: .inf}"),
        ("run.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, gradient_clipping: .inf}"),
        ("ds.json", '{"zero_optimization": {"stage": 3}, "gradient_clipping": Infinity}'),
    ],
)
def test_a_norm_may_be_clipped_to_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Which clips nothing, in the processes too that get it from the launcher."""
    config = read(tmp_path, text, name).config
    assert config.training.gradient_clipping == math.inf
    monkeypatch.setattr(os, "environ", {**os.environ, **hand_over(config, tmp_path / "handed.json")})
    assert handed_over() == config


def test_nested_keys_where_one_value_belongs_are_shown_as_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"main_training_function: expected text, got \(dtype: 'bf16',\)"):
        read(tmp_path, "distributed_type: FSDP\nmain_training_function:\n  dtype: bf16\n")


def test_keys_that_are_merged_in_are_where_they_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    text = "fsdp_config: &common {fsdp_version: 2}\nnum_processes: 4\n<<: {mixed_precision: bf16}\n"
    path.write_text(text)
    assert resolve([load_file(path)]).config.precision.mode == "bf16"
    path.write_text(text + "parallelism_config:\n  <<: *common\n")
    assert f"{path}:5:3: unknown key 'fsdp_version'" in str(load_file(path).problems[0])
    path.write_text(text.replace("bf16", "bf61"))
    with pytest.raises(ConfigError, match=r"merged\.yaml:1:1: .*bf61"):
        resolve([load_file(path)])


def test_one_gpu_may_be_a_number(tmp_path: Path) -> None:
    assert read(tmp_path, "distributed_type: FSDP\ngpu_ids: 0\n").config.launch.gpu_ids == ("0",)
    with pytest.raises(ConfigError, match="gpu_ids contains 0 twice"):
        read(tmp_path, "distributed_type: FSDP\ngpu_ids: 0,1,0\n")


def test_a_hint_that_lists_all_keys_is_said_once(tmp_path: Path) -> None:
    """Somebody else's whole file, with thirty keys that are none here, stays readable."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "num_processes: 2\nbase_model: a\nload_in_8bit: false\nsample_packing: true\n")
    assert str(caught.value).count("unknown key") == 3
    assert str(caught.value).count("use one of compute_environment") == 1


# -- Transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full shard", {"strategy": "FULL_SHARD"}),
        ('"full shard"', {"strategy": "FULL_SHARD"}),
        ("full_shard auto_wrap offload", {"strategy": "FULL_SHARD", "cpu_offload": True}),
        ("Shard-Grad-Op,auto-wrap", {"strategy": "SHARD_GRAD_OP"}),
        ("hybrid_shard_zero2 auto_wrap", {"strategy": "HYBRID_SHARD_ZERO2"}),
        ("offload hybrid shard", {"strategy": "HYBRID_SHARD", "cpu_offload": True}),
        ("no_shard", {"strategy": "NO_SHARD"}),
        (True, {"strategy": "FULL_SHARD"}),
        ("False", {"strategy": "NO_SHARD"}),
        ("", {}),
    ],
)
def test_fsdp_words(text: Any, expected: dict[str, Any]) -> None:
    config = resolve([read_fsdp_words(text, Origin.flag("--fsdp"))]).config
    assert config.sharding.model_dump(exclude_unset=True) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("offload", "--fsdp: offload has no effect without", "full_shard offload"),
        ("full_shard shard_grad_op", "--fsdp.*full_shard means .*FULL_SHARD, shard_grad_op means SHARD_GRAD_OP", "one"),
        ("ful_shard", "unknown option 'ful_shard'", "did you mean full_shard"),
    ],
)
def test_fsdp_words_that_make_no_sense(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve([read_fsdp_words(text, Origin.flag("--fsdp"))])
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_auto_wrap_leaves_the_way_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"transformer_layer_cls_to_wrap": ["Block"]}', encoding="utf-8")
    words = read_fsdp_words("full_shard auto_wrap", Origin.flag("--fsdp"))
    config = resolve([load_fsdp_config(tmp_path / "fsdp.json"), words]).config
    assert config.sharding.wrap_classes == ("Block",)


@pytest.mark.parametrize(
    "value", ['{"version": 2, "cpu_offload": true}', {"fsdp_version": 2, "fsdp_offload_params": "true"}]
)
def test_fsdp_config_in_place_of_a_file(value: Any) -> None:
    resolved = resolve([load_fsdp_config(value)])
    assert resolved.config.sharding.cpu_offload
    assert "--fsdp_config: " in notes(resolved)


# -- variables ----------------------------------------------------------------------------------------------------


def test_variables_people_set() -> None:
    environ = {
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
        "PARALLELISM_CONFIG_CP_BACKEND": "torch",
        "FSDP_OFFLOAD_PARAMS": "",
        "PATH": "/bin",
    }
    resolved = resolve([load_environment(environ)])
    sharding = resolved.config.sharding
    assert (sharding.strategy, sharding.wrap_classes, sharding.compile) == ("SHARD_GRAD_OP", ("A", "B"), True)
    assert (resolved.config.precision.mode, resolved.config.launch.device) == ("bf16", "cpu")
    assert str(resolved.origin("sharding.strategy")) == "$FSDP_SHARDING_STRATEGY"
    assert resolved.config.parallelism.cp_size == 2
    assert resolved.notes == ()


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("FSDP_OFFLOAD_PARAM", "true", "$FSDP_OFFLOAD_PARAM: unknown variable", "did you mean FSDP_OFFLOAD_PARAMS?"),
        ("FSDP_COLOR", "red", "$FSDP_COLOR: unknown variable", "the known variables are"),
        ("ACCELERATE_MIXED_PRECISON", "bf16", "unknown variable", "did you mean ACCELERATE_MIXED_PRECISION?"),
        ("FSDP_OFFLOAD_PARAMS", "maybe", "$FSDP_OFFLOAD_PARAMS: expected true or false", "see"),
        ("ACCELERATE_FP8_BACKEND", "TE", "$ACCELERATE_FP8_BACKEND: TE is not supported", "use torchao"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "tensor parallelism", "in the script"),
        ("PARALLELISM_CONFIG_CP_BACKEND", "ring", "expected one of TORCH", "use TORCH"),
    ],
)
def test_wrong_variables(name: str, value: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([load_environment({name: value})])
    assert message in str(caught.value)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_other_variables_of_accelerate_are_named() -> None:
    assert "ACCELERATE_TORCH_DEVICE has no effect here" in notes(load_environment({"ACCELERATE_TORCH_DEVICE": "cpu"}))
    of_helpers = {
        "ACCELERATE_LOG_LEVEL": "debug",
        "ACCELERATE_ENABLE_RICH": "1",
        "ACCELERATE_DEBUG_RDV_FILE": "rdv",
        "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    }
    assert load_environment(of_helpers) == Reading()


# -- which source wins --------------------------------------------------------------------------------------------


def test_flags_win_over_variables_over_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sharding:\n  strategy: NO_SHARD\n  forward_prefetch: false\nprecision:\n  mode: fp16\n", "utf-8")
    environment = load_environment({"FSDP_SHARDING_STRATEGY": "2", "ACCELERATE_MIXED_PRECISION": "bf16"})
    words = read_fsdp_words("full_shard", Origin.flag("--fsdp"))
    resolved = resolve([words, environment, load_file(path)])
    config = resolved.config
    assert (config.sharding.strategy, config.precision.mode) == ("FULL_SHARD", "bf16")
    assert config.sharding.forward_prefetch is False
    assert str(resolved.origin("sharding.forward_prefetch")) == f"{path}:3:3"


def test_native_and_ties(tmp_path: Path) -> None:
    assert read(tmp_path, "launch:\n  num_processes: 2\n").config.launch.num_processes == 2
    assert read(tmp_path, '{"fp16": {"enabled": true}}', "a.json").config.precision.mode == "fp16", "DeepSpeed's"
    assert read(tmp_path, "fp16: true\n").config.precision.mode == "fp16", "Accelerate's"
    assert read(tmp_path, "activation_checkpointing: true\n").config.sharding.activation_checkpointing, "Transformers'"


# -- documentation ------------------------------------------------------------------------------------------------


def test_the_page_about_configuration_has_todays_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert fill_tables(page) == page, "run `python -m fullshard.config.tables docs/configuration.md`"
    assert all(f"<!-- table {name} -->" in page for name in TABLES)
    rows = [key for dialect in TABLES.values() for key in every_key(dialect) if key.section is None]
    assert all(f"{key.name}`" in page for key in rows)
