"""`FullyShardedDataParallelPlugin`: Accelerate's field names and spellings, turned into one `ShardingConfig`.

Every field is used, refused with the reason, or named once in a warning that says why it has no effect here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from fullshard.config.schema import PrecisionConfig, ShardingConfig
from fullshard.core.errors import ConfigError
from fullshard.wrap.policies import (
    Auto,
    ByClass,
    ByPredicate,
    BySize,
    NoWrap,
    WrapPolicy,
    numel,
    parse_policy,
    unit_modules,
)

_DEFAULT_MIN_NUM_PARAMS = 100_000_000
_BACKWARD_PREFETCH = {"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "3": "NO_PREFETCH"}
_STATE_DICT_TYPES = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
_NO_EFFECT = {
    "fsdp_version": "there is one engine here, with the interface of both versions",
    "use_orig_params": "the original parameters are always kept",
    "limit_all_gathers": "the engine bounds the units in flight itself",
    "state_dict_config": "save_state writes one sharded format; get_state_dict gives full tensors on the main process",
    "optim_state_dict_config": "save_state writes one sharded format for optimizers too",
}
_ALREADY_SAID: set[str] = set()


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded, in Accelerate's words. None leaves a field at the default that is given below.

    Attributes:
        fsdp_version: no effect.
        sharding_strategy: name in any case, number 1 to 5, or torch's enum. Default FULL_SHARD.
        reshard_after_forward: bool, or (as in Accelerate's version 1) the name of a strategy.
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH, a number or torch's enum. Default BACKWARD_PRE.
        mixed_precision_policy: `bf16`, `fp16`, `fp32`, a dict of dtypes, or torch's or fullshard's policy. Default: the
            Accelerator's `mixed_precision`.
        auto_wrap_policy: `transformer_based_wrap`, `size_based_wrap`, `no_wrap`, one of torch's policies, or anything
            `fullshard.wrap.policies` takes. Default: the model's own layers, else its repeated block.
        cpu_offload: bool, or torch's `CPUOffload` or `CPUOffloadPolicy`.
        ignored_modules: modules, or a regular expression for whole module names.
        state_dict_type: SHARDED_STATE_DICT or FULL_STATE_DICT, a number or torch's enum. `save_state` always shards.
        state_dict_config, optim_state_dict_config: no effect.
        limit_all_gathers, use_orig_params: no effect.
        param_init_fn: initialises one module that is on the meta device.
        sync_module_states: broadcast rank 0's parameters and buffers at the start. Default True.
        forward_prefetch: issue the next unit's all-gather while this unit runs forward. Default True.
        activation_checkpointing: recompute the activations of every unit in backward.
        activation_checkpointing_offload: must not be true.
        cpu_ram_efficient_loading: `from_pretrained` reads weights on each host's first rank only; implies
            `sync_module_states`.
        transformer_cls_names_to_wrap: class names of the units; a text with commas, or a list.
        min_num_params: parameters a unit has at least, for `size_based_wrap`.

    Raises:
        ConfigError: a value that is unknown or cannot be honoured.
    """

    fsdp_version: int | str | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: str | list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        for name, reason in _NO_EFFECT.items():
            if getattr(self, name) is not None:
                _say_once(f"{name} has no effect: {reason}")
        if self.activation_checkpointing_offload:
            raise ConfigError("activation_checkpointing_offload is not supported", hint="leave it out")
        self.set_state_dict_type()
        self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.sharding_config()
        self.wrap_policy()
        if self.cpu_ram_efficient_loading:
            if self.sync_module_states is False:
                raise ConfigError(
                    "cpu_ram_efficient_loading=True with sync_module_states=False would train on empty weights",
                    hint="leave sync_module_states out",
                )
            self.sync_module_states = True
            # This pair is how Transformers asks whether it may leave the other ranks' weights empty.
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> FullyShardedDataParallelPlugin:
        """The plugin that `accelerate launch` describes in its `FSDP_*` variables.

        Raises:
            ConfigError: a variable with an unknown name or a value that cannot be honoured.
        """
        environ = os.environ if environ is None else environ
        fields = {}
        for name in sorted(environ):
            if not name.startswith("FSDP_"):
                continue
            if name not in _ENVIRONMENT:
                known = ", ".join(sorted(_ENVIRONMENT))
                raise ConfigError(f"unknown environment variable {name}={environ[name]!r}", hint=f"known are {known}")
            field, parse = _ENVIRONMENT[name]
            try:
                fields[field] = parse(environ[name])
            except ValueError:
                raise ConfigError(f"environment variable {name}: cannot read {environ[name]!r}") from None
        # The launcher exports every setting, most at its own default, so those that the chosen version and wrap policy
        # do not read are no wish of the user's.
        unread = [
            "use_orig_params",
            "sharding_strategy" if fields.pop("fsdp_version", "1") == "2" else "reshard_after_forward",
        ]
        if str(fields.get("auto_wrap_policy", "")).upper() != "SIZE_BASED_WRAP":
            unread.append("min_num_params")
        return cls(**{field: value for field, value in fields.items() if field not in unread})

    def sharding_config(self) -> ShardingConfig:
        """The settings, without the wrap policy (see `wrap_policy`)."""
        strategy, reshard = self._strategy()
        settings: dict[str, Any] = {
            "strategy": strategy,
            "reshard_after_forward": reshard,
            "backward_prefetch": _enum_name(self.backward_prefetch, _BACKWARD_PREFETCH),
            "ignored_modules": self.ignored_modules if isinstance(self.ignored_modules, str) else None,
            "cpu_offload": _wants_offload(self.cpu_offload),
            "sync_module_states": self.sync_module_states,
            "forward_prefetch": self.forward_prefetch,
            "activation_checkpointing": self.activation_checkpointing,
        }
        return ShardingConfig(**{name: value for name, value in settings.items() if value is not None})

    def precision_config(self, mode: str | None) -> PrecisionConfig:
        """The dtypes: the plugin's policy if it has one, within the Accelerator's `mixed_precision` mode."""
        policy = self.mixed_precision_policy
        return PrecisionConfig.of({"mode": mode, **(policy or {})} if mode is not None or policy else None)

    def wrap_policy(self) -> WrapPolicy:
        """The policy that selects units."""
        policy = self.auto_wrap_policy
        named = policy.strip().upper() if isinstance(policy, str) else None
        if named not in (None, "SIZE_BASED_WRAP") and self.min_num_params:
            raise ConfigError(f"min_num_params goes with size_based_wrap, got auto_wrap_policy = {policy!r}")
        classes = self.transformer_cls_names_to_wrap
        if classes and named in ("SIZE_BASED_WRAP", "NO_WRAP"):
            raise ConfigError(f"transformer_cls_names_to_wrap goes with transformer_based_wrap, got {policy!r}")
        by_class = ByClass(tuple(classes.split(",") if isinstance(classes, str) else classes)) if classes else None
        match named:
            case "TRANSFORMER_BASED_WRAP":
                return by_class or Auto()
            case "SIZE_BASED_WRAP":
                return BySize(self.min_num_params or _DEFAULT_MIN_NUM_PARAMS)
            case "NO_WRAP":
                return NoWrap()
        if isinstance(policy, str) and policy.upper().endswith("_WRAP"):
            raise ConfigError(
                f"unknown auto_wrap_policy {policy!r}",
                hint="use transformer_based_wrap, size_based_wrap or no_wrap",
            )
        if policy is None:
            return by_class or (BySize(self.min_num_params) if self.min_num_params else Auto())
        return _from_torch_policy(policy) or parse_policy(policy)

    def ignored_module_list(self, model: nn.Module) -> list[nn.Module]:
        """The modules of `model` whose parameters stay unsharded."""
        if self.ignored_modules is None:
            return []
        if isinstance(self.ignored_modules, str):
            return modules_matching(model, self.ignored_modules)
        return list(self.ignored_modules)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Fix the policy for `model` now, which checks its class names.

        Raises:
            WrapError: the model has no module of a class that is named.
        """
        policy = self.wrap_policy()
        unit_modules(model, policy)
        self.auto_wrap_policy = policy
        self.transformer_cls_names_to_wrap = None
        self.min_num_params = None

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the precision policy.

        Args:
            mixed_precision: a mode, a dict of dtypes, a policy object, or None for none.
            buffer_autocast: cast buffers as well, for modes.
            override: replace a policy that was set before.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        settings = _precision_settings(mixed_precision)
        if buffer_autocast and settings and settings.get("mode") in ("bf16", "fp16"):
            settings["buffer_dtype"] = settings["mode"]
        PrecisionConfig.of(settings)
        self.mixed_precision_policy = settings

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Check the type of state dict. Checkpoints have one format whatever it is, which a warning says for others.

        Raises:
            ConfigError: LOCAL_STATE_DICT, which no other world size could load, or an unknown type.
        """
        name = _enum_name(self.state_dict_type if state_dict_type is None else state_dict_type, _STATE_DICT_TYPES)
        if name is None:
            return
        if name not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            raise ConfigError(
                f"state_dict_type {name} is not supported", hint="use SHARDED_STATE_DICT; it loads at any world size"
            )
        if name == "FULL_STATE_DICT":
            _say_once(
                "state_dict_type FULL_STATE_DICT has no effect on save_state, which writes one sharded format; "
                "get_state_dict and save_model give whole tensors"
            )
        self.state_dict_type = name

    def _strategy(self) -> tuple[str | int | None, bool | None]:
        strategy = getattr(self.sharding_strategy, "name", self.sharding_strategy)
        reshard = getattr(self.reshard_after_forward, "name", self.reshard_after_forward)
        if isinstance(reshard, str) and reshard.strip().lower() in ("true", "false"):
            reshard = reshard.strip().lower() == "true"
        if reshard is None or isinstance(reshard, bool):
            return strategy, reshard
        # Version 1 of the plugin took the strategy under this name.
        chosen = ShardingConfig.of({"strategy": reshard}).strategy
        if strategy is not None and ShardingConfig.of({"strategy": strategy}).strategy != chosen:
            raise ConfigError(f"sharding_strategy = {strategy!r} and reshard_after_forward = {reshard!r} contradict")
        return chosen, None


def modules_matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Modules whose whole qualified name matches the regular expression.

    Raises:
        ConfigError: it is not a regular expression, or matches nothing.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"ignored_modules: {pattern!r} is not a regular expression: {error}") from None
    found = [module for name, module in model.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ConfigError(
            f"ignored_modules: {pattern!r} matches no module of {type(model).__name__}",
            hint="the expression must match the whole qualified name, for example r'.*\\.router'",
        )
    return found


def _say_once(message: str) -> None:
    if message not in _ALREADY_SAID:
        _ALREADY_SAID.add(message)
        warnings.warn(message, stacklevel=4)


def _enum_name(value: Any, numbers: Mapping[str, str]) -> str | None:
    """The name for an enum member, a number or a name in any case; None stays None."""
    if value is None:
        return None
    text = str(value.name if isinstance(value, Enum) else value).strip().upper()
    return numbers.get(text, text)


def _wants_offload(value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if hasattr(value, "offload_params"):  # torch's CPUOffload of FSDP1
        return bool(value.offload_params)
    if hasattr(value, "pin_memory"):  # CPUOffloadPolicy
        return True
    if type(value).__name__ == "OffloadPolicy":
        return False
    raise ConfigError(f"cpu_offload = {value!r} is not understood", hint="use True, False or CPUOffloadPolicy()")


def _precision_settings(policy: Any) -> dict[str, Any] | None:
    """Keyword arguments for `PrecisionConfig` from a mode, a dict, or any policy with dtype attributes."""
    if policy is None:
        return None
    if isinstance(policy, str):
        return {"mode": policy}
    if isinstance(policy, Mapping):
        values = dict(policy)
    elif dataclasses.is_dataclass(policy):
        values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if not f.name.startswith("_")}
    else:
        raise ConfigError(f"mixed_precision_policy = {policy!r} is not understood", hint="use 'bf16', 'fp16' or 'fp32'")
    if values.pop("keep_low_precision_grads", False):
        raise ConfigError("keep_low_precision_grads=True: gradients of sharded parameters have the main weights' dtype")
    values.pop("cast_root_forward_inputs", None)
    if "cast_forward_inputs" in values:
        values["cast_inputs"] = values.pop("cast_forward_inputs")
    return {name: str(v) if name.endswith("_dtype") else v for name, v in values.items() if v is not None}


def _from_torch_policy(policy: Any) -> WrapPolicy | None:
    """One of the policies in `torch.distributed.fsdp.wrap`, translated; None for anything else."""
    function: Any = policy.func if isinstance(policy, functools.partial) else policy
    keywords = policy.keywords if isinstance(policy, functools.partial) else {}
    match getattr(function, "__name__", type(function).__name__):
        case "transformer_auto_wrap_policy" if "transformer_layer_cls" in keywords:
            return ByClass(tuple(sorted(keywords["transformer_layer_cls"], key=str)))
        case "size_based_auto_wrap_policy":
            return BySize(keywords.get("min_num_params", _DEFAULT_MIN_NUM_PARAMS))
        case "always_wrap_policy":
            return ByPredicate(_always)
        case "ModuleWrapPolicy":
            return ByClass(tuple(sorted(function._module_classes, key=str)))
        case "CustomPolicy":
            return ByPredicate(function._lambda_fn)
    if callable(policy) and not isinstance(policy, type) and "recurse" in inspect.signature(policy).parameters:
        # The general form asks `policy(module, recurse, nonwrapped_numel)` about each module.
        return ByPredicate(lambda module: bool(policy(module=module, recurse=False, nonwrapped_numel=numel(module))))
    return None


def _always(module: nn.Module) -> bool:
    return True


def _truth(text: str) -> bool:
    if text.strip().lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(text)
    return text.strip().lower() in ("true", "1", "yes")


_ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "FSDP_VERSION": ("fsdp_version", str),
    "FSDP_SHARDING_STRATEGY": ("sharding_strategy", str),
    "FSDP_RESHARD_AFTER_FORWARD": ("reshard_after_forward", str),
    "FSDP_OFFLOAD_PARAMS": ("cpu_offload", _truth),
    "FSDP_AUTO_WRAP_POLICY": ("auto_wrap_policy", str),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("transformer_cls_names_to_wrap", str),
    "FSDP_MIN_NUM_PARAMS": ("min_num_params", lambda text: int(float(text))),
    "FSDP_BACKWARD_PREFETCH": ("backward_prefetch", str),
    "FSDP_FORWARD_PREFETCH": ("forward_prefetch", _truth),
    "FSDP_STATE_DICT_TYPE": ("state_dict_type", str),
    "FSDP_USE_ORIG_PARAMS": ("use_orig_params", _truth),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("cpu_ram_efficient_loading", _truth),
    "FSDP_SYNC_MODULE_STATES": ("sync_module_states", _truth),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", _truth),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("activation_checkpointing_offload", _truth),
    "FSDP_IGNORED_MODULES": ("ignored_modules", str),
}
