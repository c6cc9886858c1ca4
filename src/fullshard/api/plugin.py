"""The class `FullyShardedDataParallelPlugin`, with Accelerate's field names and spellings.

The fields are read in the same way as the keys of a configuration file. Every field is used, refused with a reason, or
named once in a warning that explains why it has no effect here.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

from fullshard.api import torch_private
from fullshard.config.dialect import Dialect, Key, Note, Reading, Setting, Status
from fullshard.config.fsdp import DEFAULT_MIN_NUM_PARAMS, finish_fsdp, renamed
from fullshard.config.handover import launched, set_variables, whole
from fullshard.config.origin import Entry, Origin, Precedence
from fullshard.config.resolve import resolve
from fullshard.config.schema import PrecisionConfig, RunConfig, ShardingConfig
from fullshard.core.dtypes import AUTOCAST, COMPUTE
from fullshard.core.errors import ConfigError
from fullshard.engine.precision import torch_dtype
from fullshard.features import MixedPrecisionPolicy, OffloadPolicy
from fullshard.features.unit_selection import unit_modules
from fullshard.launch.environment import read_rank_environment
from fullshard.wrap.policies import ByClass, ByPredicate, BySize, WrapPolicy, numel, parse_policy

_SAVED = "save_state and save_model decide what they write"
PLUGIN = Dialect(
    "FullyShardedDataParallelPlugin",
    (
        *renamed(
            {
                "fsdp_offload_params": "fsdp_cpu_offload",
                "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_cls_names_to_wrap",
            }
        ),
        Key("state_dict_config", Status.NO_EFFECT, because=_SAVED),
        Key("optim_state_dict_config", Status.NO_EFFECT, because=_SAVED),
    ),
    prefix="fsdp_",
    finish=finish_fsdp,
)
"""The plugin's fields, which have the same names as the keys of `fsdp_config`. Fields for objects are read below."""

_NAMES = ("sharding_strategy", "backward_prefetch", "state_dict_type")
_UNITS = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params")
_ALREADY_SAID: set[str] = set()


@dataclass
class FullyShardedDataParallelPlugin:
    """Configures how models are sharded, with the field names of Accelerate.

    A field that is None takes its value from the launcher's configuration, or the default below if the launcher sets
    none. Such a field is updated to show the value in effect when the plugin or an Accelerator is created, and when
    a model is sharded. Names compare equal to torch's names with the same meaning. A changed field applies to the next
    model that is sharded.

    Attributes:
        fsdp_version: no effect.
        sharding_strategy: name in any case, number 1 to 5, or torch's enum. Default FULL_SHARD.
        reshard_after_forward: bool, `auto`, or (as in Accelerate's version 1) the name of a strategy.
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH, a number or torch's enum. Default BACKWARD_PRE.
        mixed_precision_policy: `bf16`, `fp16`, `fp32`, `fp8`, a dict of dtypes, or torch's or fullshard's policy.
            Default: the Accelerator's `mixed_precision`.
        auto_wrap_policy: `transformer_based_wrap`, `size_based_wrap`, `no_wrap`, one of torch's policies, or anything
            that `fullshard.wrap.policies` accepts. Default: the model's own layers, and all repeated blocks.
        cpu_offload: bool, torch's `CPUOffload` or `CPUOffloadPolicy`, or fullshard's `OffloadPolicy`, which can select
            what is offloaded. An Accelerator uses the `activations` of that policy as
            `activation_checkpointing_offload`, which keeps this value when `cpu_offload` is set again.
        ignored_modules: modules, or a regular expression that matches full module names.
        state_dict_type: SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT, a number or torch's enum. With FULL,
            `save_state` also writes the unsharded weights. With LOCAL, `get_state_dict` returns what this rank holds.
        state_dict_config, optim_state_dict_config: no effect.
        limit_all_gathers, use_orig_params: no effect.
        param_init_fn: initializes one module that is on the meta device.
        sync_module_states: broadcast rank 0's parameters and buffers at the start. Default True.
        forward_prefetch: issue the all-gather of the next unit while the current unit runs forward. Default True.
        activation_checkpointing: recompute the activations of every unit in backward.
        activation_checkpointing_offload: keep the tensors that autograd saves for a unit in host memory until backward.
            With `activation_checkpointing` these are the inputs of the unit. Accelerate supports this field only
            with `activation_checkpointing`.
        cpu_ram_efficient_loading: `from_pretrained` reads weights only on the first rank of each host. Implies
            `sync_module_states`.
        transformer_cls_names_to_wrap: class names of the units, as a list or a comma-separated string.
        min_num_params: minimum number of parameters in a unit, for `size_based_wrap`.
        activation_checkpointing_mode: the mode of `activation_checkpointing`: `full`, or `selective`, which keeps the
            activations that are expensive to recompute relative to their size. Accelerate does not have this field.

    Raises:
        ConfigError: a value is unknown or not supported.
    """

    fsdp_version: int | str | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: nn.Module | Iterable[nn.Module] | str | None = None
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
    activation_checkpointing_mode: str | None = None

    # The values that unset fields read as. They set nothing. `dataclasses.replace` passes them to the copy.
    filled: InitVar[dict[str, Any] | None] = None
    base: ClassVar[Reading | None] = None  # replaces the launcher's settings

    def __post_init__(self, filled: dict[str, Any] | None) -> None:
        values = dict(filled or {})
        vars(self).update({name: None for name, value in values.items() if getattr(self, name) == value}, filled={})
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, str):
            self.ignored_modules = _modules(self.ignored_modules)
        if self.cpu_ram_efficient_loading and self.sync_module_states is None:
            self.sync_module_states = True
        # A checkpointing mode has no effect on its own, but the launcher may enable checkpointing.
        is_alone = self.activation_checkpointing_mode and self.activation_checkpointing is None
        resolved = resolve([self.reading(), *([launched()] if is_alone else ())])
        say_once(resolved.notes)
        self.wrap_policy(resolved.config.sharding)
        if resolved.config.sharding.cpu_ram_efficient_loading:
            tell_transformers()
        effective = self._in_effect(resolved.config)
        vars(self).update({name: effective[name] for name in _NAMES if getattr(self, name) is not None})
        with contextlib.suppress(ConfigError):  # an Accelerator raises this if its arguments do not fix it
            self.show(self.config())

    def said(self, name: str) -> Any:
        """Return a field's value if it was set explicitly, otherwise None. The launcher's value does not count."""
        value, filled = getattr(self, name), vars(self)["filled"]
        return None if name in filled and value == filled[name] else value

    def show(self, config: RunConfig) -> None:
        """Let unset fields show the values in `config`, without setting the fields."""
        effective = self._in_effect(config)
        effective = {name: effective.get(name) for name in _FIELDS if self.said(name) is None}
        vars(self).update(effective, filled={name: value for name, value in effective.items() if value is not None})

    def reading(self) -> Reading:
        """Return the settings that the fields set. A field that is None sets nothing."""
        said = {name: value for name in _FIELDS if (value := self.said(name)) is not None}
        precision = _precision_settings(said.pop("mixed_precision_policy", None))
        fields = {name: value.name if isinstance(value, Enum) else value for name, value in said.items()}
        fields |= _offload_fields(fields.get("cpu_offload"))
        if not isinstance(fields.get("ignored_modules"), str):
            fields.pop("ignored_modules", None)
        fields.pop("param_init_fn", None)
        origin = Origin.argument(type(self).__name__)
        settings: list[Setting] = []
        if self._has_policy_object():
            # Class names do not conflict with it, because a script may have set the policy after the names.
            fields = {name: value for name, value in fields.items() if name not in _UNITS}
            units = {"wrap": "auto", "wrap_classes": (), "wrap_min_numel": None}
            settings = [Setting(f"sharding.{n}", value, origin, "auto_wrap_policy") for n, value in units.items()]
        key = "mixed_precision_policy"
        settings += [Setting(f"precision.{name}", value, origin, key) for name, value in precision.items()]
        PrecisionConfig.of(precision or None)
        reading = PLUGIN.read(Entry(name, value, origin) for name, value in fields.items() if value is not None)
        reading.settings += settings
        return reading

    def fill(self, config: RunConfig) -> None:
        """Let unset fields take their values from `config` instead of from the launcher."""
        sharding = config.sharding
        row, auto = sharding.resolved_strategy(), "auto" if sharding.keeps_what_fits else None
        named = sharding.model_copy(update={"strategy": row.name, "reshard_after_forward": auto})
        base = whole(config.model_copy(update={"sharding": named}), Origin(Precedence.ENVIRONMENT, "launched"))
        vars(self)["base"] = base
        self.show(self.config())

    def config(self) -> RunConfig:
        """Return the configuration that the fields and the launcher's settings result in."""
        return resolve([self.base or launched(), self.reading()]).config

    def _in_effect(self, config: RunConfig) -> dict[str, Any]:
        """Return the values that would take effect for unset fields under the configuration `config`."""
        sharding, precision = config.sharding, config.precision
        policy = dataclasses.replace(policy_of(precision), output_dtype=dtype_or_none(precision.output_dtype))
        kinds = {"class": "TRANSFORMER_BASED_WRAP", "auto": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP"}
        strategy = sharding.resolved_strategy()
        rows = {name: PLUGIN.find(name) for name in _FIELDS}
        effective = {name: config.value(row.target) for name, row in rows.items() if row is not None and row.target}
        effective |= {
            "fsdp_version": 2,  # a model is sharded in place
            "mixed_precision_policy": None if policy == MixedPrecisionPolicy() else policy,
            "reshard_after_forward": ("auto" if sharding.keeps_what_fits else strategy.reshards_after_forward),
            "sharding_strategy": _Name(strategy.name),
            "backward_prefetch": _Name(sharding.backward_prefetch),
            "state_dict_type": _Name(config.checkpoint.state_dict_type),
            "state_dict_config": FullStateDictConfig(),  # Accelerate's own functions write into them
            "optim_state_dict_config": FullOptimStateDictConfig(),
            "cpu_offload": (
                OffloadPolicy(**dataclasses.asdict(dataclasses.replace(sharding.offload, activations=False)))
                if sharding.offload.has_shards and not sharding.offload.is_everything
                else sharding.cpu_offload
            ),
            "auto_wrap_policy": kinds.get(sharding.wrap, "NO_WRAP"),
            "transformer_cls_names_to_wrap": list(sharding.wrap_classes) or None,
        }
        if any(self.said(name) is not None for name in _UNITS):
            for name in _UNITS:
                del effective[name]  # these three select the units together
        return effective

    def sharding_config(self) -> ShardingConfig:
        """Return the sharding settings in effect. They do not include a policy object, which `wrap_policy` returns."""
        return self.config().sharding

    def wrap_policy(self, config: ShardingConfig | None = None) -> WrapPolicy:
        """Return the policy that selects the units, from `config` or, if it is None, from the settings in effect."""
        if self._has_policy_object():
            return _from_torch_policy(self.auto_wrap_policy) or parse_policy(self.auto_wrap_policy)
        return configured_policy(config or self.sharding_config())

    def _has_policy_object(self) -> bool:
        """Return whether the wrap policy is an object or a class name, not one of Accelerate's policy names."""
        policy = self.said("auto_wrap_policy")
        return policy is not None and not (isinstance(policy, str) and policy.strip().upper().endswith("WRAP"))

    def ignored_module_list(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of `model` whose parameters stay unsharded."""
        if self.ignored_modules is None:
            return []
        if isinstance(self.ignored_modules, str):
            return modules_matching(model, self.ignored_modules)
        self.ignored_modules = _modules(self.ignored_modules)
        return self.ignored_modules

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Resolve the wrap policy for `model` now, which checks whether the model has the classes that it names.

        Raises:
            WrapError: the model has no module of a class in the policy.
        """
        policy = self.wrap_policy()
        unit_modules(model, policy)
        self.auto_wrap_policy = policy
        self.transformer_cls_names_to_wrap = None
        self.min_num_params = None

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the precision policy.

        Args:
            mixed_precision: a mode, its dtype, a dict of dtypes, a policy object, or None to remove the policy.
            buffer_autocast: also cast buffers, if `mixed_precision` is a mode.
            override: replace a policy that was set before.
        """
        if self.said("mixed_precision_policy") is not None and not override:
            return
        settings = _precision_settings(mixed_precision)
        if buffer_autocast and settings.get("mode") in AUTOCAST:
            settings["buffer_dtype"] = COMPUTE[settings["mode"]]
        PrecisionConfig.of(settings or None)
        self.mixed_precision_policy = settings or None

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Validate and set the type of state dict.

        Raises:
            ConfigError: the type is unknown.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        config = resolve([self.reading()]).config
        if self.said("state_dict_type") is not None:
            self.state_dict_type = _Name(config.checkpoint.state_dict_type)


_FIELDS = tuple(field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin))


class _Name(str):
    """A string that equals the torch enumeration member of the same name, so that scripts can compare the two."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        name = getattr(other, "name", None)
        return str.__eq__(self, other) if name is None else self.upper() == str(name).lstrip("_")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def configured_policy(config: ShardingConfig) -> WrapPolicy:
    """Return the wrap policy that the sharding settings describe."""
    match config.wrap:
        case "class":
            return ByClass(config.wrap_classes)
        case "size":
            return BySize(config.wrap_min_numel or 1)
        case kind:
            return parse_policy(kind)


def say_once(notes: Iterable[Note]) -> None:
    """Warn about settings that are ignored or changed. Give each warning only once, and only on the main rank."""
    for note in notes:
        message = str(note)
        if message not in _ALREADY_SAID and read_rank_environment().is_main:
            _ALREADY_SAID.add(message)
            warnings.warn(message, stacklevel=5)


def tell_transformers() -> None:
    """Set the environment variables with which Transformers reads weights on the first rank of each host only."""
    set_variables(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")


def modules_matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules whose full name matches the regular expression. Raise an error if no name matches."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"ignored_modules: {pattern!r} is not a regular expression: {error}") from None
    found = [module for name, module in model.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ConfigError(
            f"ignored_modules: {pattern!r} matches no module of {type(model).__name__}",
            hint="use an expression that matches the full module name, for example r'.*\\.router'",
        )
    return found


def _modules(value: Any) -> list[nn.Module]:
    """Return the modules in `ignored_modules` as a list, because a generator can be read only once."""
    found = [value] if isinstance(value, nn.Module) or not isinstance(value, Iterable) else list(value)
    wrong = next((item for item in found if not isinstance(item, nn.Module)), None)
    if wrong is not None:
        raise ConfigError(
            f"ignored_modules: expected modules of the model, got {wrong!r}",
            hint="to select names, use a regular expression, for example ignored_modules=r'head|.*\\.router'",
        )
    return found


def _offload_fields(value: Any) -> dict[str, Any]:
    """Return the plugin fields for a value of `cpu_offload`. A policy is translated to booleans."""
    if isinstance(value, OffloadPolicy):
        offload = value.offload
        parts = {f"offload_{field.name}": getattr(offload, field.name) for field in dataclasses.fields(offload)}
        fields = {"offload_activations": True} if parts.pop("offload_activations") else {}
        is_partial = offload.has_shards and not offload.is_everything
        return {"cpu_offload": offload.is_everything, **fields, **(parts if is_partial else {})}
    if hasattr(value, "offload_params"):  # torch's CPUOffload of FSDP1
        return {"cpu_offload": bool(value.offload_params)}
    if hasattr(value, "pin_memory"):  # torch's CPUOffloadPolicy
        return {"cpu_offload": True}
    return {"cpu_offload": False if type(value).__name__ == "OffloadPolicy" else value}


def _precision_settings(policy: Any) -> dict[str, Any]:
    """Return keyword arguments for `PrecisionConfig` from a mode, a dict, or any policy with dtype attributes."""
    if policy is None:
        return {}
    if isinstance(policy, torch.dtype):  # Accelerate's `set_mixed_precision` accepts the dtype of a mode
        policy = next((mode for mode, name in COMPUTE.items() if f"torch.{name}" == str(policy)), str(policy))
    if isinstance(policy, str):
        return {"mode": policy}
    if isinstance(policy, Mapping):
        values = dict(policy)
    elif dataclasses.is_dataclass(policy):
        values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if not f.name.startswith("_")}
    else:
        raise ConfigError(f"mixed_precision_policy = {policy!r} is not valid", hint="use 'bf16', 'fp16' or 'fp32'")
    if values.pop("param_dtype_override_fn", None) is not None:
        raise ConfigError(
            "mixed_precision_policy: only fullshard.fully_shard supports param_dtype_override_fn",
            hint="remove it, or shard the model with fully_shard",
        )
    if values.pop("keep_low_precision_grads", False):
        raise ConfigError("keep_low_precision_grads=True is not supported: gradients have the main weights' dtype")
    values.pop("cast_root_forward_inputs", None)
    if "cast_forward_inputs" in values:
        values["cast_inputs"] = values.pop("cast_forward_inputs")
    names = {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in values.items()}
    return {name: value for name, value in names.items() if value is not None}


def policy_of(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """Return the precision policy of units. It has no output dtype, because only the model's outputs are cast."""
    return MixedPrecisionPolicy(
        param_dtype=dtype_or_none(precision.compute_dtype),
        reduce_dtype=dtype_or_none(precision.reduce_dtype),
        cast_forward_inputs=precision.cast_inputs,
        buffer_dtype=dtype_or_none(precision.buffer_dtype),
        gather_as=dtype_or_none(precision.gather_as),
        reduce_as=dtype_or_none(precision.reduce_as),
    )


def dtype_or_none(name: str | None) -> torch.dtype | None:
    """Return the dtype with that name, or None if the name is None."""
    return None if name is None else torch_dtype(name)


def _from_torch_policy(policy: Any) -> WrapPolicy | None:
    """Convert a policy of `torch.distributed.fsdp.wrap` to fullshard's equivalent. Return None for any other value."""
    function: Any = policy.func if isinstance(policy, functools.partial) else policy
    keywords = policy.keywords if isinstance(policy, functools.partial) else {}
    match getattr(function, "__name__", type(function).__name__):
        case "transformer_auto_wrap_policy" if "transformer_layer_cls" in keywords:
            return ByClass(tuple(sorted(keywords["transformer_layer_cls"], key=str)))
        case "size_based_auto_wrap_policy":
            _check_alone_by_size(function, keywords)
            return BySize(keywords.get("min_num_params", DEFAULT_MIN_NUM_PARAMS))
        case "always_wrap_policy":
            return ByPredicate(lambda module: True)
        case "ModuleWrapPolicy":
            return ByClass(tuple(sorted(torch_private.classes_to_wrap(function), key=str)))
        case "CustomPolicy":
            return ByPredicate(torch_private.wrap_function(function))
    if callable(policy) and not isinstance(policy, type) and "recurse" in inspect.signature(policy).parameters:
        # The general form calls `policy(module, recurse, nonwrapped_numel)` for each module.
        return ByPredicate(lambda module: bool(policy(module=module, recurse=False, nonwrapped_numel=numel(module))))
    return None


def _check_alone_by_size(policy: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse torch's size-based policy if its excluded classes were changed. Here, only the size selects units."""
    for name in ("exclude_wrap_modules", "force_leaf_modules"):
        if keywords.get(name) not in (None, getattr(policy, name.upper())):
            raise ConfigError(
                f"auto_wrap_policy: size_based_auto_wrap_policy with {name} is not supported",
                hint="remove it, or pass a function that returns whether a module is a unit",
            )
