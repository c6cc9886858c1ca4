"""Dtypes of tensors by their role in a step, and the casts of a unit's inputs and outputs."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from fullshard.comm.base import PACKINGS
from fullshard.core.dtypes import Dtypes, saves
from fullshard.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of tensors by their role. None means the default for that role.

    Attributes:
        param_dtype: dtype of the unsharded parameters during computation. The sharded parameters (main weights), and
            therefore the optimizer, keep their dtype. Batch norms compute in the dtype of their statistics.
        reduce_dtype: dtype in which gradients are summed. None means float32 for half-precision gradients, and
            otherwise their own dtype.
        output_dtype: dtype to which the floating-point outputs of each unit are cast.
        cast_forward_inputs: whether to cast the floating-point inputs of each unit to `param_dtype`.
        buffer_dtype: dtype to which floating-point buffers are cast once, when the unit is made.
        gather_as: `torch.int8` or `torch.bfloat16`, the format in which parameters are sent for unsharding. Every rank
            then computes with the rounded values; sharded parameters and checkpoints stay exact. The feature that
            registers the formats documents the rounding error. `gather_as` has no effect on weights that are never
            cast, or if ranks share memory.
        reduce_as: the format in which gradients are sent along the shard axis. They are still summed in `reduce_dtype`.
        param_dtype_override_fn: called for each parameter; returns its `param_dtype`, or None for the default.

    Raises:
        ConfigError: `gather_as` or `reduce_as` has an unsupported value or saves no bytes.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    gather_as: torch.dtype | None = None
    reduce_as: torch.dtype | None = None
    param_dtype_override_fn: Callable[[torch.nn.Parameter], torch.dtype | None] | None = None

    def __post_init__(self) -> None:
        for name, dtype, sent in (
            ("gather_as", self.gather_as, self.param_dtype),
            ("reduce_as", self.reduce_as, self.reduce_dtype),
        ):
            if dtype is None:
                continue
            if dtype not in PACKINGS:
                known = " or ".join(map(str, PACKINGS))
                raise ConfigError(
                    f"{name} = {dtype} is not supported: expected {known}",
                    hint="omit it to send values in their original dtype",
                )
            if sent is not None and not saves(dtype_name(dtype), dtype_name(sent)):
                raise ConfigError(
                    f"{name} = {dtype} saves no bytes compared with {sent}, which would be sent without it",
                    hint=f"omit {name}",
                )

    @classmethod
    def of(cls, policy: Any) -> Self:
        """Convert None or a torch policy (FSDP1 or FSDP2) to this class. Return a policy of this class unchanged."""
        if policy is None or isinstance(policy, cls):
            return policy or cls()
        if isinstance(policy, type) or not hasattr(policy, "param_dtype"):
            raise ConfigError(
                f"mp_policy: expected a MixedPrecisionPolicy, got {policy!r}",
                hint="pass a policy, for example MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            )
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(policy, name) for name in names if hasattr(policy, name)})

    def override(self, parameter: torch.nn.Parameter) -> torch.dtype | None:
        """Return the dtype that `param_dtype_override_fn` sets for this parameter, or None if it sets none."""
        return None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(parameter)

    def dtypes_of(self, override: torch.dtype | None = None) -> Dtypes:
        """Return the names of the dtypes, from which each bucket's are derived. `override` replaces `param_dtype`."""
        roles = (override or self.param_dtype, self.reduce_dtype, self.gather_as, self.reduce_as)
        compute, reduce, gather_as, reduce_as = (None if dtype is None else dtype_name(dtype) for dtype in roles)
        return Dtypes(compute, reduce, gather_as, reduce_as)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that `core.dtypes` uses for a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that has this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any, *, into_mutable: bool = True) -> Any:
    """Apply `function` to every tensor in `value`, which may contain dicts, lists, (named) tuples and dataclasses.

    Containers whose tensors do not change are returned as they are, which preserves their classes. With
    `into_mutable=False`, lists, dicts and dataclasses are skipped, because code may modify them in place.
    """
    if value is None:  # the most common case
        return value
    if isinstance(value, torch.Tensor):
        return function(value)
    if not into_mutable and not isinstance(value, tuple):
        return value
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        if all(mapped[key] is value[key] for key in mapped):
            return value
        return mapped if type(value) is dict else _rebuild_mapping(value, mapped)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item, into_mutable=into_mutable) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = map_tensors(function, old)
            if new is not old:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _rebuild_mapping(value: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `value`. Dataclasses, such as Transformers' outputs, get keyword arguments."""
    if dataclasses.is_dataclass(value):
        return type(value)(**mapped)
    if not isinstance(value, MutableMapping):
        return type(value)(mapped)  # type: ignore[call-arg]
    made = copy.copy(value)  # keeps other attributes, such as a `defaultdict`'s factory or a tokenizer's encodings
    made.update(mapped)
    return made


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with all floating-point tensors cast to `dtype`. If `dtype` is None, return it unchanged."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def moved(value: Any, device: torch.device) -> Any:
    """Move CPU tensors in tuples, lists and mappings to an accelerator. Return `value` itself if `device` is a CPU.

    torch's `fully_shard` does the same for tuples, lists and dicts, and skips other objects, even dataclasses.
    """
    if device.type in ("cpu", "meta"):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PackedSequence):  # a tuple with lengths that must stay on the host
        return cast(Any, value).to(device)
    if not isinstance(value, (MutableMapping, list, tuple)):
        return value
    items = value.values() if isinstance(value, MutableMapping) else value
    taken = [moved(item, device) for item in items]
    if all(map(operator.is_, taken, items)):
        return value
    if isinstance(value, MutableMapping):
        mapped = dict(zip(value, taken, strict=True))
        return mapped if type(value) is dict else _rebuild_mapping(value, mapped)
    if hasattr(value, "_fields"):
        return type(value)(*taken)
    return (tuple if isinstance(value, tuple) else list)(taken)  # the constructor of a subclass may not accept items
