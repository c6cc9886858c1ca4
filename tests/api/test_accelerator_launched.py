"""What a launcher hands over decides where the script says nothing; every setting of it arrives in the engine.

pytest tests/api/test_accelerator_launched.py
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from pydantic import ValidationError
from torch import nn

from fullshard import accelerate
from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.api import plugin as plugin_module
from fullshard.config.handover import hand_over
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError
from fullshard.core.user_class import is_unit
from fullshard.features import describe
from fullshard.wrap.policies import ByClass, BySize
from tests.distributed import run_ranks

Launch = Callable[..., None]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Sets the variables that `fullshard launch` sets for a worker."""
    monkeypatch.setattr(plugin_module, "_ALREADY_SAID", set())
    before = dict(os.environ)

    def set_variables(**groups: Any) -> None:
        os.environ.update(hand_over(RunConfig(**groups), tmp_path / "config.json"))

    yield set_variables
    os.environ.clear()
    os.environ.update(before)


def test_everything_comes_from_the_launcher(launch: Launch) -> None:
    launch(
        sharding={"strategy": "SHARD_GRAD_OP", "wrap_classes": ("Linear",), "forward_prefetch": False},
        precision={"mode": "bf16", "reduce_dtype": "bfloat16"},
        training={"gradient_accumulation_steps": 3},
        launch={"device": "cpu"},
        checkpoint={"state_dict_type": "FULL_STATE_DICT"},
    )
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator._config.precision.reduce_dtype == "bfloat16"
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.device.type == "cpu"
    assert accelerator._config.sharding.strategy == "SHARD_GRAD_OP"
    assert not accelerator._config.sharding.forward_prefetch
    assert accelerator.fsdp_plugin.wrap_policy() == ByClass(("Linear",))
    # Scripts written for Accelerate ask its plugin.
    plugin = accelerator.state.fsdp_plugin
    assert (plugin.sharding_strategy, plugin.state_dict_type) == ("SHARD_GRAD_OP", "FULL_STATE_DICT")
    assert plugin.transformer_cls_names_to_wrap == ["Linear"]


def test_what_is_sent_comes_from_the_launcher(launch: Launch) -> None:
    launch(precision={"mode": "bf16", "gather_as": "int8", "reduce_as": "bfloat16"}, launch={"device": "cpu"})
    model = Accelerator().prepare(nn.Linear(8, 8))
    line = str(describe(model))
    assert "no weights sent as int8: the ranks of a shard group share memory, or are one" in line
    assert "no gradients sent as bfloat16" in line


def test_the_script_wins_setting_by_setting(launch: Launch) -> None:
    launch(
        sharding={"strategy": "SHARD_GRAD_OP", "wrap_classes": ("Linear",), "forward_prefetch": False},
        precision={"mode": "bf16"},
        training={"gradient_accumulation_steps": 3},
    )
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD", min_num_params=7)
    with pytest.warns(UserWarning, match="no is used instead of bf16 from fullshard launch"):
        accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 2)
    assert accelerator._config.sharding.resolved_strategy().name == "FULL_SHARD"
    assert accelerator.fsdp_plugin.wrap_policy() == BySize(7)
    assert not accelerator._config.sharding.forward_prefetch
    for settings in ({"backward_prefetch": "NO_PREFETCH"}, {"wrap": "none"}):
        sharding = Accelerator(fsdp_plugin=settings)._config.sharding
        assert sharding.strategy == "SHARD_GRAD_OP"
        assert all(getattr(sharding, name) == value for name, value in settings.items())


def test_variables_that_the_script_sets_later_win_over_the_launcher(launch: Launch) -> None:
    os.environ.update(FSDP_BACKWARD_PREFETCH="BACKWARD_POST", ACCELERATE_MIXED_PRECISION="fp16")
    launch(sharding={"wrap_classes": ("Linear",)}, precision={"mode": "bf16"})
    os.environ.update(  # as Axolotl does
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_RESHARD_AFTER_FORWARD="false",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_CPU_RAM_EFFICIENT_LOADING="False",  # as Accelerate's plugin does
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True)
    assert [str(warning.message) for warning in said] == [
        "$FSDP_RESHARD_AFTER_FORWARD: fsdp_reshard_after_forward = false, set by the script, replaces the default",
        "$FSDP_STATE_DICT_TYPE: fsdp_state_dict_type = FULL_STATE_DICT, set by the script, replaces SHARDED_STATE_DICT",
    ]
    config = accelerator._config
    assert config.sharding.resolved_strategy().name == "SHARD_GRAD_OP"
    assert config.checkpoint.state_dict_type == "FULL_STATE_DICT"
    assert config.sharding.wrap_classes == ("Linear",)
    # What the launcher had found there it has weighed against its flags.
    assert (config.sharding.backward_prefetch, config.precision.mode) == ("BACKWARD_PRE", "bf16")
    said_by_the_script = FullyShardedDataParallelPlugin(
        sharding_strategy="FULL_SHARD", state_dict_type="LOCAL_STATE_DICT"
    )
    own = Accelerator(cpu=True, fsdp_plugin=said_by_the_script)._config
    assert own.checkpoint.state_dict_type == "LOCAL_STATE_DICT"
    os.environ["FSDP_STATE_DICT_TYP"] = "x"
    with pytest.raises(ConfigError, match=r"did you mean FSDP_STATE_DICT_TYPE"):
        Accelerator(cpu=True)


def test_a_contradiction_names_both_places(launch: Launch) -> None:
    launch(sharding={"strategy": "NO_SHARD"})
    with pytest.raises(ConfigError, match="FullyShardedDataParallelPlugin, fullshard launch: cpu_offload moves shards"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True))


def test_a_policy_set_after_the_accelerator_was_made_counts(launch: Launch) -> None:
    launch(sharding={"wrap_classes": ("Nonexistent",)})
    accelerator = Accelerator()
    accelerator.state.fsdp_plugin.auto_wrap_policy = lambda module: isinstance(module, nn.Linear)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert is_unit(model[0])
    assert is_unit(model[1])


def test_compile_settings_reach_torch(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def spy(function: Any, **options: Any) -> Any:
        seen.append(options)
        return function

    monkeypatch.setattr(torch, "compile", spy)
    launch(
        sharding={
            "compile": True,
            "compile_backend": "aot_eager",
            "compile_mode": "max-autotune",
            "compile_fullgraph": True,
            "compile_dynamic": False,
        }
    )
    Accelerator().prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    expected = {"backend": "aot_eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False}
    assert seen
    assert all(options == expected for options in seen)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_gradients_are_clipped_before_the_step(launch: Launch, mode: str) -> None:
    launch(training={"gradient_clipping": 0.5}, precision={"mode": mode}, launch={"device": "cpu"})
    accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = nn.Linear(4, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = accelerator.get_state_dict(model)["weight"].clone()
    accelerator.backward(model(torch.full((1, 4), 2.0)).sum())  # a gradient of norm 4
    optimizer.step()
    change = before - accelerator.get_state_dict(model)["weight"]
    assert change.norm().item() == pytest.approx(0.5, rel=1e-2)
    with pytest.raises(ConfigError, match="does not support a closure"):
        optimizer.step(lambda: 0.0)


def test_optimizers_step_in_backward(launch: Launch) -> None:
    """The weights are those of ordinary steps, in either order of preparing, and what cannot be is refused."""
    trained = []
    for wanted in (False, True):
        for together in (True, False):
            launch(training={"step_in_backward": wanted, "gradient_accumulation_steps": 2}, launch={"device": "cpu"})
            accelerator = Accelerator()
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
            if together:
                model, optimizer = accelerator.prepare(model, optimizer)
            else:
                optimizer = accelerator.prepare(optimizer)
                model = accelerator.prepare(model)
            for number in range(4):
                before = model[1].bias.detach().clone()
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.full((1, 4), 1.0 + number)).square().sum())
                    has_stepped = not torch.equal(before, model[1].bias)
                    assert has_stepped == (wanted and number % 2 == 1)
                    optimizer.step()
                    optimizer.zero_grad()
            trained.append(accelerator.get_state_dict(model))
            if wanted:
                with pytest.raises(ConfigError, match=r"training\.step_in_backward frees each gradient"):
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                with pytest.raises(ConfigError, match=r"training\.step_in_backward frees each gradient"):
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
    for other in trained[1:]:
        assert all(torch.equal(other[name], value) for name, value in trained[0].items())


@pytest.mark.parametrize(
    "settings",
    [
        {"training": {"step_in_backward": True, "gradient_clipping": 1.0}},
        {"training": {"step_in_backward": True}, "precision": {"mode": "fp16"}},
        {"training": {"step_in_backward": True}, "precision": {"param_dtype": "float16"}},
    ],
)
def test_what_does_not_go_with_stepping_in_backward(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="step_in_backward consumes each gradient"):
        RunConfig.model_validate(settings)


def test_efficient_loading_is_what_transformers_reads(launch: Launch) -> None:
    launch(sharding={"cpu_ram_efficient_loading": True})
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ
    Accelerator()
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def test_accelerate_takes_the_launchers_settings(launch: Launch) -> None:
    launch(precision={"mode": "fp16"})
    with pytest.raises(ConfigError, match="fp16 needs loss scaling"):
        accelerate(nn.Linear(2, 2))


def test_a_wrong_handover_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CONFIG", "absent.json")
    with pytest.raises(ConfigError, match=r"FULLSHARD_CONFIG = absent\.json does not contain a resolved configuration"):
        Accelerator()


def _save_whole(directory: str, config: str) -> dict[str, torch.Tensor]:
    os.environ["FULLSHARD_CONFIG"] = config
    torch.manual_seed(3)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):  # the second replaces the first, whole weights included
        accelerator.save_state(directory)
    accelerator.load_state(directory)
    return weights


def test_full_state_dicts_are_written_beside_the_shards(tmp_path: Path) -> None:
    import safetensors.torch

    config = RunConfig(checkpoint={"state_dict_type": "FULL_STATE_DICT"})  # type: ignore[arg-type]
    hand_over(config, tmp_path / "config.json")
    weights = run_ranks(_save_whole, 2, str(tmp_path / "state"), str(tmp_path / "config.json"))[0]
    saved = safetensors.torch.load_file(tmp_path / "state" / "model" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
