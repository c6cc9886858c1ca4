"""What goes wrong in silence or without explanation in Accelerate and Transformers, and what happens here instead.

Files, words and variables are in `tests/config`, hosts and ports in the tests of `fullshard launch`.

pytest tests/api/test_accelerate_behavior.py
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from torch import nn

from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.api import accelerator as accelerator_module
from fullshard.api import plugin as plugin_module
from fullshard.config.accelerate import FLAT
from fullshard.config.load import load_fsdp_config
from fullshard.config.origin import Origin, entries_of
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.transformers import read_fsdp_words
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.user_class import is_unit

Plugin = FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin_module, "_ALREADY_SAID", set())
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class BertLayer(nn.Module):
    """Stands for a layer whose class name people write."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dense(x))


def model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(BertLayer() for _ in range(layers)), nn.Linear(4, 2))


def flags(**given: Any) -> Resolved:
    """Flags of the launcher, resolved."""
    return resolve([FLAT.read(entries_of(given, "flags"))])


# -- Accelerate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("backward_prefetch", "BACKWARD", "did you mean BACKWARD_PRE"),
        ("state_dict_type", "SHARDED", "did you mean SHARDED_STATE_DICT"),
        ("auto_wrap_policy", "TRANSFORMER_WRAP", "did you mean TRANSFORMER_BASED_WRAP"),
        ("cpu_offload", "maybe", "sharding.cpu_offload"),
    ],
)
def test_unknown_names_in_the_plugin(field: str, value: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"FullyShardedDataParallelPlugin: {field}: (.|\n)*hint: .*{hint}"):
        Plugin(**dict[str, Any]({field: value}))


@pytest.mark.parametrize("name", ["bertlayer", "BertLayr"])
def test_wrong_layer_class_lists_candidates(name: str) -> None:
    with pytest.raises(WrapError, match="no module of class") as caught:
        Accelerator(fsdp_plugin=Plugin(transformer_cls_names_to_wrap=name)).prepare(model())
    assert caught.value.hint is not None
    assert "BertLayer" in str(caught.value)


def test_spaces_around_class_names_do_not_count() -> None:
    prepared = Accelerator(fsdp_plugin=Plugin(transformer_cls_names_to_wrap=" BertLayer, Linear ")).prepare(model())
    assert is_unit(prepared[0])
    assert is_unit(prepared[3])


@pytest.mark.parametrize("fields", [{}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}])
def test_layers_are_found_without_no_split_modules(fields: dict[str, Any]) -> None:
    prepared = Accelerator(fsdp_plugin=Plugin(**fields)).prepare(model())
    assert all(is_unit(prepared[index]) for index in range(3))


def test_a_size_above_every_module_is_said() -> None:
    plugin = Plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10_000)
    with pytest.warns(UserWarning, match="only the root of Sequential is wrapped"):
        Accelerator(fsdp_plugin=plugin).prepare(model())


def test_checkpointing_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="works unit by unit"):
        Plugin(auto_wrap_policy="NO_WRAP", activation_checkpointing=True, fsdp_version=2)


def test_ram_efficient_loading_without_synchronization_as_texts() -> None:
    with pytest.raises(ConfigError, match="would train on empty weights"):
        flags(fsdp_cpu_ram_efficient_loading="true", fsdp_sync_module_states="false")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_a_strategy_survives_the_change_to_version_2(strategy: str) -> None:
    # The conversion tool writes the strategy under the name of version 2.
    found = flags(fsdp_version="2", fsdp_reshard_after_forward=strategy)
    assert found.config.sharding.resolved_strategy().name == strategy


def test_bf16_without_hardware_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older device")
    with pytest.raises(ConfigError, match="bf16 is not supported on an older device"):
        accelerator_module._check_precision("bf16", torch.device("cuda", 0))
    accelerator_module._check_precision("fp16", torch.device("cuda", 0))
    accelerator_module._check_precision("bf16", torch.device("cpu"))


def test_a_model_without_an_optimizer_and_two_models() -> None:
    accelerator = Accelerator()
    first, second = accelerator.prepare(model(), model())
    assert is_unit(first)
    assert is_unit(second)


def test_a_model_spread_over_devices_is_refused() -> None:
    spread = model()
    spread.hf_device_map = {"0": 0, "1": "cpu"}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"across several devices(.|\n)*load it without device_map"):
        Accelerator().prepare(spread)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_gradients_are_clipped_by_value(mode: str) -> None:
    """Not those of a loss that is scaled: what moves the weights is."""
    accelerator = Accelerator(cpu=True, mixed_precision=mode, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    prepared, optimizer = model(), None
    prepared, optimizer = accelerator.prepare(prepared, torch.optim.SGD(prepared.parameters(), lr=1.0))
    for _ in range(2):
        before = accelerator.get_state_dict(prepared)
        accelerator.backward(prepared(torch.ones(2, 4)).sum() * 100)
        accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
        accelerator.clip_grad_value_(prepared.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        after = accelerator.get_state_dict(prepared)
        assert max((after[name] - before[name]).abs().max().item() for name in before) == pytest.approx(0.01, rel=1e-4)


# -- Transformers -------------------------------------------------------------------------------------------------


def words(text: Any) -> Any:
    return read_fsdp_words(text, Origin.flag("--fsdp"))


def test_one_process_is_sharded_too() -> None:
    assert is_unit(Accelerator().prepare(model())[0])


def test_hybrid_shard_with_version_2() -> None:
    config = resolve([words("hybrid_shard auto_wrap"), load_fsdp_config({"version": 2})]).config
    assert config.sharding.strategy == "HYBRID_SHARD"


def test_torchs_policies_still_serve() -> None:
    from torch.distributed.fsdp import wrap

    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={BertLayer})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_unit(Accelerator(fsdp_plugin=Plugin(auto_wrap_policy=policy)).prepare(model())[0])
