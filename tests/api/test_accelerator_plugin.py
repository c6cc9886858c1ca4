"""The plugin takes Accelerate's fields in all their spellings, and drops none in silence.

pytest tests/api/test_accelerator_plugin.py
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.api import plugin as plugin_module
from fullshard.api.configure import run_config
from fullshard.config.fsdp import FSDP
from fullshard.config.handover import hand_over
from fullshard.config.resolve import resolve
from fullshard.config.schema import PrecisionConfig, RunConfig
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.offload import Offload
from fullshard.features import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ShardedParameter
from fullshard.features.unit_selection import unit_modules
from fullshard.wrap.policies import Auto, ByClass, BySize, NoWrap

Plugin = FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin_module, "_ALREADY_SAID", set())
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def precision_of(plugin: Plugin) -> PrecisionConfig:
    return resolve([plugin.reading()]).config.precision


def test_the_field_names_are_accelerates() -> None:
    theirs = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin
    names = {f.name for f in dataclasses.fields(theirs)} | {"activation_checkpointing_mode"}
    assert {f.name for f in dataclasses.fields(Plugin)} == names


def test_what_an_fsdp_config_sets_can_be_said_by_a_field() -> None:
    """A Trainer gives its `fsdp_config` to the engine by a plugin: what that has no field for would be lost."""
    rows = [plugin_module.PLUGIN.find(field.name) for field in dataclasses.fields(Plugin)]
    said = {row.target for row in rows if row is not None}
    said |= {f"sharding.offload_{part}" for part in ("compute_shards", "main_weights", "optimizer_state")}
    assert {key.target for key in FSDP.keys if key.target is not None} <= said


def test_unknown_fields_are_type_errors() -> None:
    with pytest.raises(TypeError, match="sharding_strateg"):
        Plugin(sharding_strateg="FULL_SHARD")  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [2, "2", "shard_grad_op", "SHARD_GRAD_OP", fsdp.ShardingStrategy.SHARD_GRAD_OP])
def test_spellings_of_the_strategy(value: Any) -> None:
    assert Plugin(sharding_strategy=value).sharding_config().resolved_strategy().name == "SHARD_GRAD_OP"
    # Version 1 of Accelerate's plugin took it under this name.
    assert Plugin(reshard_after_forward=value).sharding_config().resolved_strategy().name == "SHARD_GRAD_OP"


def test_hybrid_strategies_of_torch() -> None:
    config = Plugin(sharding_strategy=fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2).sharding_config()
    assert config.resolved_strategy().name == "HYBRID_SHARD_ZERO2"


@pytest.mark.parametrize(("value", "name"), [(True, "FULL_SHARD"), ("false", "SHARD_GRAD_OP"), (None, "FULL_SHARD")])
def test_reshard_after_forward_as_a_truth_value(value: Any, name: str) -> None:
    assert Plugin(reshard_after_forward=value).sharding_config().resolved_strategy().name == name


@pytest.mark.parametrize("value", [2, "backward_post", "BACKWARD_POST", fsdp.BackwardPrefetch.BACKWARD_POST])
def test_spellings_of_backward_prefetch(value: Any) -> None:
    assert Plugin(backward_prefetch=value).sharding_config().backward_prefetch == "BACKWARD_POST"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (False, False),
        (fsdp.CPUOffload(offload_params=True), True),
        (fsdp.CPUOffload(), False),
        (fsdp.CPUOffloadPolicy(), True),
        (fsdp.OffloadPolicy(), False),
        (CPUOffloadPolicy(), True),
    ],
)
def test_spellings_of_cpu_offload(value: Any, expected: bool) -> None:
    assert Plugin(cpu_offload=value).sharding_config().cpu_offload is expected


def test_activations_on_the_host_are_apart_from_cpu_offload() -> None:
    for policy, shards in (
        (OffloadPolicy(activations=True), Offload()),
        (OffloadPolicy(main_weights=True, activations=True), Offload(main_weights=True, optimizer_state=True)),
        (OffloadPolicy(compute_shards=True, main_weights=True, activations=True), Offload(True, True, True)),
    ):
        wanted = dataclasses.replace(shards, activations=True)
        config = Plugin(cpu_offload=policy).sharding_config()
        assert (config.offload, config.cpu_offload) == (wanted, shards.is_everything)
    plugin = Plugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    assert plugin.sharding_config().offload == Offload(activations=True)
    both = Plugin(cpu_offload=True, activation_checkpointing_offload=True)
    assert both.sharding_config().offload == Offload(True, True, True, True)
    filled = Plugin()
    filled.fill(RunConfig.of({"sharding": {"offload_activations": True, "cpu_offload": True}}))
    assert (filled.cpu_offload, filled.activation_checkpointing_offload) == (True, True)
    assert filled.sharding_config().offload == Offload(True, True, True, True)
    assert Plugin(cpu_offload=True).sharding_config().offload == Offload(True, True, True)


def test_parts_of_cpu_offload() -> None:
    config = Plugin(cpu_offload=OffloadPolicy(main_weights=True)).sharding_config()
    assert (config.cpu_offload, config.offload) == (False, Offload(main_weights=True, optimizer_state=True))
    plugin = Plugin()
    plugin.fill(RunConfig(sharding=config))
    assert plugin.sharding_config().offload == config.offload


@pytest.mark.parametrize(
    "policy",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": "torch.float32", "buffer_dtype": "bf16"},
        fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    ],
)
def test_spellings_of_mixed_precision(policy: Any) -> None:
    precision = precision_of(Plugin(mixed_precision_policy=policy))
    assert (precision.compute_dtype, precision.reduce_dtype, precision.buffer_dtype) == (
        "bfloat16",
        "float32",
        "bfloat16",
    )


def test_mixed_precision_of_fsdp2_and_modes() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32, cast_forward_inputs=False)
    precision = precision_of(Plugin(mixed_precision_policy=policy))
    assert (precision.compute_dtype, precision.result_dtype, precision.cast_inputs) == ("float16", "float32", False)
    assert precision_of(Plugin(mixed_precision_policy="bf16")).mode == "bf16"
    plugin = Plugin()
    plugin.set_mixed_precision("fp16", buffer_autocast=True)
    assert precision_of(plugin).buffer_dtype == "float16"
    plugin.set_mixed_precision("bf16")
    assert precision_of(plugin).mode == "fp16", "only override=True replaces a policy"
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    assert precision_of(plugin).mode == "bf16"
    with pytest.raises(ConfigError, match="int8"):
        plugin.set_mixed_precision(torch.int8, override=True)
    with pytest.raises(ConfigError, match="keep_low_precision_grads"):
        Plugin(mixed_precision_policy=fsdp.MixedPrecision(keep_low_precision_grads=True))
    with pytest.raises(ConfigError, match="int8"):
        Plugin(mixed_precision_policy={"param_dtype": torch.int8})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Auto()),
        ({"auto_wrap_policy": "transformer_based_wrap"}, Auto()),
        (
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "A, B"},
            ByClass(("A", "B")),
        ),
        ({"transformer_cls_names_to_wrap": ["A"]}, ByClass(("A",))),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 5}, BySize(5)),
        ({"min_num_params": 5}, BySize(5)),
        ({"auto_wrap_policy": "NO_WRAP"}, NoWrap()),
        ({"auto_wrap_policy": wrap.ModuleWrapPolicy({nn.Linear})}, ByClass((nn.Linear,))),
        (
            {"auto_wrap_policy": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=7)},
            BySize(7),
        ),
        (
            {
                "auto_wrap_policy": functools.partial(
                    wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
                )
            },
            ByClass((nn.Linear,)),
        ),
    ],
)
def test_spellings_of_the_wrap_policy(fields: dict[str, Any], expected: Any) -> None:
    assert Plugin(**fields).wrap_policy() == expected


def test_torchs_general_policies_select_the_same_modules() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(first, nn.ReLU()), last)
    linear = functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))
    either = functools.partial(wrap._or_policy, policies=[linear])
    custom = wrap.CustomPolicy(lambda m: isinstance(m, nn.Linear))
    for policy in (linear, either, custom, lambda m: isinstance(m, nn.Linear)):
        assert unit_modules(model, Plugin(auto_wrap_policy=policy).wrap_policy()) == [first, last]
    assert len(unit_modules(model, Plugin(auto_wrap_policy=wrap.always_wrap_policy).wrap_policy())) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"sharding_strategy": "FUL_SHARD"},
        {"sharding_strategy": 1, "reshard_after_forward": "NO_SHARD"},
        {"backward_prefetch": "BACKWARD"},
        {"auto_wrap_policy": "SIZES_BASED_WRAP"},
        {"transformer_cls_names_to_wrap": ["A"], "min_num_params": 5},
        {"auto_wrap_policy": "NO_WRAP", "transformer_cls_names_to_wrap": ["A"]},
        {"state_dict_type": "SHARDED"},
        {"cpu_offload": "maybe"},
        {"activation_checkpointing_offload": "maybe"},
        {"cpu_ram_efficient_loading": True, "sync_module_states": False},
        {"mixed_precision_policy": "fp4"},
        {"forward_prefetch": "maybe"},
    ],
)
def test_values_that_cannot_be_honored_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, WrapError)):
        Plugin(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_orig_params": True}, "original parameters are always kept"),
        ({"limit_all_gathers": True}, "limits the units in flight"),
        ({"fsdp_version": 2}, "the engine has the interface"),
        ({"state_dict_config": object()}, "decide what they write"),
        ({"auto_wrap_policy": "NO_WRAP", "min_num_params": 5}, "only applies to SIZE_BASED_WRAP"),
    ],
)
def test_fields_without_effect_say_so_once(fields: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=f"no effect.*{reason}"):
        Plugin(**fields)
    Plugin(**fields)  # a second warning would be an error here


def test_what_is_not_as_written_says_so() -> None:
    with pytest.warns(UserWarning, match="units of 100,000,000 parameters"):
        assert Plugin(auto_wrap_policy="SIZE_BASED_WRAP").wrap_policy() == BySize(100_000_000)


@pytest.mark.parametrize("wrong", [["head"], [nn.Linear], 3, {"head": nn.Linear(2, 2)}])
def test_ignored_modules_are_modules(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"expected modules of the model, got(.|\n)*hint: to select names, use a regular"
    ):
        Plugin(ignored_modules=wrong)


def test_ignored_modules_may_be_one_or_a_generator() -> None:
    model = nn.ModuleDict({"router": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    assert Plugin(ignored_modules=model["router"]).ignored_module_list(model) == [model["router"]]
    plugin = Plugin(ignored_modules=(module for module in model.values()))
    for _ in range(2):
        assert plugin.ignored_module_list(model) == list(model.values())


def test_ignored_modules_of_another_model_are_said_to_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(ignored_modules=[copy.deepcopy(model)[1]]))
    accelerator.prepare(model)
    assert "ignored_modules: no ignored module is in Sequential" in capsys.readouterr().err


def test_torchs_policies_that_would_be_read_wrongly_are_refused() -> None:
    with pytest.raises(ConfigError, match="force_leaf_modules"):
        Plugin(auto_wrap_policy=functools.partial(wrap.size_based_auto_wrap_policy, force_leaf_modules={nn.Linear}))
    plugin = Plugin(auto_wrap_policy=wrap.transformer_auto_wrap_policy)
    with pytest.raises(TypeError, match="transformer_layer_cls"):
        unit_modules(nn.Sequential(nn.Linear(2, 2)), plugin.wrap_policy())


def test_ignored_modules_by_expression() -> None:
    model = nn.ModuleDict({"router": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    assert Plugin(ignored_modules="rou.*").ignored_module_list(model) == [model["router"]]
    assert Plugin(ignored_modules=[model["expert"]]).ignored_module_list(model) == [model["expert"]]
    for wrong in ("(", "gate"):
        with pytest.raises(ConfigError, match="ignored_modules"):
            Plugin(ignored_modules=wrong).ignored_module_list(model)


def test_set_auto_wrap_policy_checks_names_against_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(WrapError, match="no module of class 'Linea'"):
        Plugin(transformer_cls_names_to_wrap="Linea").set_auto_wrap_policy(model)
    plugin = Plugin(transformer_cls_names_to_wrap="Linear")
    plugin.set_auto_wrap_policy(model)
    assert plugin.wrap_policy() == ByClass(("Linear",))


def test_efficient_loading_tells_transformers_and_implies_synchronization() -> None:
    plugin = Plugin(cpu_ram_efficient_loading=True)
    assert plugin.sharding_config().sync_module_states
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def test_fields_that_are_left_read_as_what_is_in_effect_and_set_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = Plugin()
    assert plugin.sharding_strategy == fsdp.ShardingStrategy.SHARD_GRAD_OP == plugin.sharding_strategy
    assert (plugin.sharding_strategy, plugin.reshard_after_forward, plugin.fsdp_version) == ("SHARD_GRAD_OP", False, 2)
    assert plugin.backward_prefetch == fsdp.BackwardPrefetch.BACKWARD_POST
    assert plugin.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT
    assert plugin.cpu_offload is True
    assert plugin.activation_checkpointing is True
    assert (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap) == ("TRANSFORMER_BASED_WRAP", ["A", "B"])
    assert not plugin.reading().settings and not copy.deepcopy(plugin).reading().settings
    filled = Plugin()
    filled.fill(RunConfig())
    assert (filled.sharding_strategy, filled.ignored_modules, filled.fsdp_version) == ("FULL_SHARD", None, 2)
    monkeypatch.setenv("FSDP_IGNORED_MODULES", "head")
    assert (Plugin().ignored_modules, filled.ignored_modules) == ("head", None), "an Accelerator has the last word"
    said = Plugin(sharding_strategy="full_shard", cpu_offload=False, backward_prefetch="backward_pre")
    assert said.sharding_strategy == fsdp.ShardingStrategy.FULL_SHARD and said.reshard_after_forward is True
    assert said.backward_prefetch == fsdp.BackwardPrefetch.BACKWARD_PRE
    assert Plugin(sharding_strategy="hybrid_shard_zero2").sharding_strategy == fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
    assert said.cpu_offload is False
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "maybe")
    assert Plugin().cpu_offload is None, "an Accelerator says what is wrong"


def test_the_environment_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }.items():
        monkeypatch.setenv(name, value)
    assert Plugin().sharding_config().resolved_strategy().name == "SHARD_GRAD_OP"
    assert Plugin().wrap_policy() == ByClass(("A", "B"))
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert Plugin().sharding_config().resolved_strategy().name == "FULL_SHARD"
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "maybe")
    with pytest.raises(ConfigError, match=r"\$FSDP_OFFLOAD_PARAMS: .*expected true or false, got 'maybe'"):
        Plugin().sharding_config()


def _dtypes(accelerator: Accelerator) -> tuple[torch.dtype, torch.dtype]:
    """What a layer computes in, and what the model returns."""
    model, inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[1].register_forward_hook(lambda module, args, output: inner.append(output.dtype))
    return accelerator.prepare(model)(torch.ones(1, 2)).dtype, inner[0]


def test_a_launchers_checkpointing_may_be_selective(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is set, but activation_checkpointing is not"):
        FullyShardedDataParallelPlugin(activation_checkpointing_mode="selective")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing_mode="selective")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    _dtypes(accelerator)
    sharding = accelerator._config.sharding
    assert sharding.activation_checkpointing and sharding.activation_checkpointing_mode == "selective"


def test_what_is_changed_on_the_plugin_counts_for_the_next_model() -> None:
    accelerator = Accelerator(cpu=True)
    plugin: Any = accelerator.state.fsdp_plugin
    assert _dtypes(accelerator) == (torch.float32, torch.float32) and plugin.mixed_precision_policy is None
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    assert _dtypes(accelerator) == (torch.float32, torch.bfloat16) and accelerator.mixed_precision == "bf16"
    plugin.sharding_strategy, plugin.activation_checkpointing, plugin.cpu_offload = "SHARD_GRAD_OP", True, True
    plugin.mixed_precision_policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    assert _dtypes(accelerator) == (torch.bfloat16, torch.bfloat16)
    sharding = accelerator._config.sharding
    assert sharding.activation_checkpointing and sharding.cpu_offload
    assert sharding.resolved_strategy().name == "SHARD_GRAD_OP" and plugin.reshard_after_forward is False
    plugin.activation_checkpointing_mode = "selective"
    _dtypes(accelerator)
    assert accelerator._config.sharding.activation_checkpointing_mode == "selective"
    plugin.activation_checkpointing_mode = "full"
    plugin.reshard_after_forward, plugin.activation_checkpointing = True, False
    with pytest.raises(ConfigError, match="SHARD_GRAD_OP and reshard_after_forward = true contradict each other"):
        accelerator.prepare(nn.Linear(2, 2))
    plugin.sharding_strategy = None
    _dtypes(accelerator)
    sharding = accelerator._config.sharding
    assert (plugin.sharding_strategy, sharding.activation_checkpointing) == ("FULL_SHARD", False)
    plugin.set_mixed_precision("fp16", override=True)
    with pytest.raises(ConfigError, match="fp16 conflicts with the Accelerator's mixed_precision = no"):
        accelerator.prepare(nn.Linear(2, 2))


def test_what_is_changed_leaves_what_is_asked_for_when_a_model_is_sharded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(ignored_modules=[model[0]]))
    plugin: Any = accelerator.state.fsdp_plugin
    plugin.activation_checkpointing = True
    accelerator.prepare(model)
    assert accelerator._config.sharding.activation_checkpointing
    assert [isinstance(p, ShardedParameter) for p in model.parameters()] == [False, False, True, True]
    plugin.activation_checkpointing, plugin.ignored_modules = False, "1"
    other = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert [isinstance(p, ShardedParameter) for p in other.parameters()] == [True, True, False, False]
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(ignored_modules="1"))
    accelerator.state.fsdp_plugin.ignored_modules = None
    other = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert all(isinstance(p, ShardedParameter) for p in other.parameters())


def test_of_what_is_replaced_on_the_plugin_nothing_is_left() -> None:
    bf16 = torch.bfloat16
    both = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(mixed_precision_policy=both))
    plugin: Any = accelerator.state.fsdp_plugin

    def prepared() -> tuple[str | None, str | None, Offload]:
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        precision = accelerator._config.precision
        return precision.compute_dtype, precision.reduce_dtype, accelerator._config.sharding.offload

    assert prepared() == ("bfloat16", "bfloat16", Offload())
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=bf16)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=bf16)
    plugin.cpu_offload = OffloadPolicy(main_weights=True)
    assert prepared() == ("bfloat16", None, Offload(main_weights=True, optimizer_state=True))
    plugin.mixed_precision_policy, plugin.cpu_offload = None, False
    assert prepared() == (None, None, Offload())
    plugin.set_mixed_precision("bf16", override=True)
    plugin.activation_checkpointing = True
    assert prepared()[0] == "bfloat16" and accelerator.mixed_precision == "bf16"
    plugin.mixed_precision_policy, plugin.activation_checkpointing = None, None
    assert prepared()[0] is None and not accelerator._config.sharding.activation_checkpointing
    with pytest.warns(UserWarning, match="is overridden by the plugin"):
        mine = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=Plugin(mixed_precision_policy="fp32"))
    mine.state.fsdp_plugin.mixed_precision_policy = None
    mine.prepare(nn.Linear(2, 2))
    assert mine.mixed_precision == "bf16", "what the Accelerator says"


def test_none_gives_a_field_back_to_what_filled_the_plugin() -> None:
    """A Trainer's `fsdp_config`."""
    plugin: Any = Plugin()
    plugin.fill(RunConfig.of({"sharding": {"activation_checkpointing": True, "offload_main_weights": True}}))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    plugin.activation_checkpointing, plugin.cpu_offload, plugin.mixed_precision_policy = False, False, "fp32"
    with pytest.warns(UserWarning, match="is overridden by the plugin"):
        assert _dtypes(accelerator) == (torch.float32, torch.float32)
    sharding = accelerator._config.sharding
    assert (sharding.activation_checkpointing, sharding.offload) == (False, Offload())
    plugin.activation_checkpointing = plugin.cpu_offload = plugin.mixed_precision_policy = None
    assert _dtypes(accelerator) == (torch.float32, torch.bfloat16)
    sharding = accelerator._config.sharding
    assert sharding.activation_checkpointing and sharding.offload == Offload(main_weights=True, optimizer_state=True)


def test_cpu_offload_replaces_what_the_launcher_says_of_its_parts(tmp_path: Path) -> None:
    os.environ.update(hand_over(RunConfig.of({"sharding": {"offload_main_weights": True}}), tmp_path / "config.json"))
    offload = {value: run_config(Plugin(cpu_offload=value), {}).sharding.offload for value in (None, False, True)}
    assert offload == {
        None: Offload(main_weights=True, optimizer_state=True),
        False: Offload(),
        True: Offload(True, True, True),
    }


def test_the_policy_in_effect_is_one_that_fully_shard_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given = fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32, cast_forward_inputs=False)
    assert Plugin(mixed_precision_policy=given).mixed_precision_policy is given
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Plugin().mixed_precision_policy == policy


def test_outputs_are_cast_in_any_mode() -> None:
    for policy in (
        fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        fsdp.MixedPrecisionPolicy(output_dtype=torch.bfloat16),
    ):
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(mixed_precision_policy=policy))
        assert _dtypes(accelerator) == (policy.output_dtype, policy.param_dtype or torch.float32)
    with pytest.raises(ConfigError, match=r"only fullshard\.fully_shard supports param_dtype_override_fn"):
        Plugin(mixed_precision_policy=MixedPrecisionPolicy(param_dtype_override_fn=lambda p: None))


def test_another_one_made_of_it_is_set_to_what_was_set() -> None:
    other = dataclasses.replace(FullyShardedDataParallelPlugin(forward_prefetch=False), sharding_strategy="NO_SHARD")
    names = [field.name for field in dataclasses.fields(other)]
    assert [name for name in names if other.said(name) is not None] == ["sharding_strategy", "forward_prefetch"]
    assert other.sharding_config().resolved_strategy().name == "NO_SHARD"
    assert other.reshard_after_forward is False
    for policy in (
        "no",
        "fp32",
        "bf16",
        "fp16",
        {"param_dtype": torch.float32, "reduce_dtype": "bf16", "gather_as": "int8", "cast_inputs": False},
        fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16),
    ):
        plugin = Plugin(mixed_precision_policy=policy)
        assert precision_of(dataclasses.replace(plugin, cpu_offload=True)) == precision_of(plugin)
        fields = dataclasses.asdict(plugin)
        del fields["fsdp_version"], fields["state_dict_config"], fields["optim_state_dict_config"]  # no effect
        spelled_out = precision_of(Plugin(**fields))
        assert spelled_out.compute_dtype == precision_of(plugin).compute_dtype


def test_a_precision_that_replaces_the_launchers_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.of_paths({"precision.mode": "bf16"})
    for name, value in hand_over(config, tmp_path / "config.json").items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="mixed_precision = fp32 is used instead of bf16 from fullshard launch"):
        assert Accelerator(cpu=True, mixed_precision="fp32").mixed_precision == "fp32"
