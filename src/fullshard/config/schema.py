"""Every setting of a sharded run, as validated data. No torch here: dtypes and classes are names.

An unknown field, a value of the wrong type and a combination that cannot be honoured are all `ConfigError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fullshard.core.errors import ConfigError
from fullshard.core.strategy import STRATEGIES, Axis, Strategy, parse_strategy

BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
WrapKind = Literal["auto", "none", "class", "size"]
PrecisionMode = Literal["no", "fp32", "bf16", "fp16"]
Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


class _Settings(BaseModel):
    """A frozen group of settings whose construction raises `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._explain(error) from None

    @classmethod
    def of(cls, value: Mapping[str, Any] | Self | None) -> Self:
        """Settings from a mapping, from None (all defaults) or unchanged.

        Raises:
            ConfigError: anything else, or a setting that is wrong.
        """
        if isinstance(value, cls):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"{cls.__name__} cannot be made of a {type(value).__name__}", hint="pass a dict of settings"
            )
        return cls(**(value or {}))

    @classmethod
    def _explain(cls, error: ValidationError) -> ConfigError:
        lines, hint = [], None
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                close = difflib.get_close_matches(where, cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(cls.model_fields)}"
                lines.append(f"unknown setting {where!r}")
            elif item["type"] == "value_error":
                cause = item["ctx"]["error"]
                hint = getattr(cause, "hint", None) or hint
                lines.append(str(cause).split("\nhint: ")[0])
            else:
                lines.append(f"setting {where!r}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}")
        return ConfigError(f"{cls.__name__}: {'; '.join(lines)}", hint=hint)


class ShardingConfig(_Settings):
    """How a model is divided over the ranks."""

    strategy: str = "FULL_SHARD"
    """A row of the strategy table, by name in any case or by its number 1 to 5."""

    shard_size: int | None = Field(default=None, ge=1)
    """Ranks per shard group. Needed by the hybrid strategies, fixed by the others."""

    reshard_after_forward: bool | None = None
    """Whether unsharded parameters are dropped between forward and backward. None: as the strategy has it. Otherwise
    the strategy that differs in this alone is taken: FULL_SHARD with `false` is SHARD_GRAD_OP, and so on."""

    wrap: WrapKind = "auto"
    """Which modules are units: `auto` (the model's own list of layers, else its repeated block), `class`, `size`, or
    `none` (the root alone)."""

    wrap_classes: tuple[str, ...] = ()
    """Class names of the units, for `wrap: class`. A text with commas is split."""

    wrap_min_numel: int | None = Field(default=None, ge=1)
    """Parameters a unit has at least, for `wrap: size`."""

    ignored_modules: str | None = None
    """A regular expression; modules whose whole qualified name matches it keep their parameters unsharded."""

    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When the next unit's all-gather is issued in backward: before this unit computes gradients, after, or never."""

    forward_prefetch: bool = True
    """Whether the next unit's all-gather is issued while this unit runs forward."""

    activation_checkpointing: bool = False
    """Whether the activations of every unit are recomputed in backward instead of kept."""

    activation_checkpointing_reentrant: bool = False
    """Use PyTorch's older, reentrant implementation of it."""

    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer state live in host memory."""

    sync_module_states: bool = True
    """Whether rank 0's parameters and buffers are broadcast at the start. Without it all ranks must start equal."""

    compile: bool = False
    """Whether the forward of every unit is compiled, each on its own."""

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_strategy(cls, value: object) -> str:
        if not isinstance(value, str | int | Strategy) or isinstance(value, bool):
            raise ConfigError(f"unknown sharding strategy {value!r}", hint=f"use one of {', '.join(STRATEGIES)}")
        return parse_strategy(value).name

    @field_validator("wrap_classes", mode="before")
    @classmethod
    def _split_classes(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return tuple(stripped for name in value if (stripped := name.strip()))
        return value

    @field_validator("backward_prefetch", mode="before")
    @classmethod
    def _any_case(cls, value: object) -> object:
        return value.strip().upper() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.wrap == "class") != bool(self.wrap_classes):
            raise ConfigError(
                f"wrap = {self.wrap!r} with wrap_classes = {list(self.wrap_classes)}",
                hint="class names go with wrap: class, and wrap: class needs at least one",
            )
        if (self.wrap == "size") != (self.wrap_min_numel is not None):
            raise ConfigError(
                f"wrap = {self.wrap!r} with wrap_min_numel = {self.wrap_min_numel}",
                hint="a size goes with wrap: size, and wrap: size needs one",
            )
        if self.activation_checkpointing_reentrant and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing_reentrant is set, but activation_checkpointing is not")
        self.resolved_strategy()
        return self

    def resolved_strategy(self) -> Strategy:
        """The strategy's row, with the override of `reshard_after_forward` applied.

        Raises:
            ConfigError: no strategy differs from the chosen one in that alone.
        """
        row = parse_strategy(self.strategy)
        if self.reshard_after_forward in (None, row.reshard_after_forward):
            return row
        for other in STRATEGIES.values():
            if other.placements == row.placements and other.reshard_after_forward == self.reshard_after_forward:
                return other
        raise ConfigError(
            f"reshard_after_forward = {self.reshard_after_forward} means nothing for {row.name}: it shards nothing",
            hint="leave reshard_after_forward out, or use FULL_SHARD",
        )

    def resolved_shard_size(self, local_world_size: int) -> int | None:
        """Ranks per shard group; for a hybrid strategy without a size, the ranks of one host."""
        is_hybrid = len(self.resolved_strategy().placements) == len(Axis)
        return local_world_size if is_hybrid and self.shard_size is None else self.shard_size


class PrecisionConfig(_Settings):
    """The dtypes of a run. Main weights and optimizer state are float32 in every mode except `no`.

    | mode | main weights | compute | gradients reduced in |
    |---|---|---|---|
    | `no` | as the model has them | as the model has them | float32, or wider if they are |
    | `fp32` | float32 | float32 | float32 |
    | `bf16` | float32 | bfloat16 | float32 |
    | `fp16` | float32 | float16, scaled loss | float32 |
    """

    mode: PrecisionMode = "no"
    """The row of the table above."""

    param_dtype: Dtype | None = None
    """Compute dtype of parameters and inputs, instead of the mode's."""

    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced over the ranks, instead of the mode's."""

    output_dtype: Dtype | None = None
    """Dtype the model's floating-point outputs are cast to, instead of float32 in the modes bf16 and fp16."""

    buffer_dtype: Dtype | None = None
    """Dtype floating-point buffers are cast to. None: they keep theirs, which is right for rotary tables and norms."""

    cast_inputs: bool = True
    """Whether floating-point inputs of each unit are cast to the compute dtype."""

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_alias(cls, value: object) -> object:
        # YAML reads an unquoted `no` as false.
        if value is None or value is False:
            return "no"
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", mode="before")
    @classmethod
    def _dtype_alias(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        name = value.strip().lower().removeprefix("torch.")
        return _DTYPE_ALIASES.get(name, name)

    @property
    def compute_dtype(self) -> Dtype | None:
        """Dtype of parameters during compute; None if it is the stored one."""
        return self.param_dtype or _COMPUTE[self.mode]

    @property
    def gradient_dtype(self) -> Dtype | None:
        """Dtype gradients are reduced in; None leaves it to the engine: at least float32."""
        return self.reduce_dtype

    @property
    def result_dtype(self) -> Dtype | None:
        """Dtype of the model's outputs; None if they are left as they come."""
        return self.output_dtype or ("float32" if self.mode in ("bf16", "fp16") else None)

    @property
    def upcasts_main_weights(self) -> bool:
        """Whether trainable parameters stored in half precision become float32 main weights."""
        return self.mode != "no"


_COMPUTE: dict[PrecisionMode, Dtype | None] = {"no": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
