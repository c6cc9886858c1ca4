"""TorchAcc's `Config`. Every assignment is checked; `fullshard.config.torchacc` has what becomes of each field."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from fullshard.config.dialect import Problem, Reading, refuse
from fullshard.config.document import read_document
from fullshard.config.origin import Entry, Origin
from fullshard.config.settings import plain_message
from fullshard.config.torchacc import TORCHACC
from fullshard.core.errors import ConfigError

AXES = ("dp", "fsdp", "pp", "tp")
_SIZE = "dist.fsdp.size"


def _as_set(value: object) -> object:
    if isinstance(value, str | list | tuple):
        raise ConfigError(
            f"expected a set of class names, got {value!r}",
            hint=f"write {{{', '.join(map(repr, [value] if isinstance(value, str) else value))}}}",
        )
    return value


def _as_order(value: object) -> object:
    if not isinstance(value, list) or sorted(value, key=str) != sorted(AXES):
        raise ConfigError(f"expected {list(AXES)} in some order, got {value!r}", hint="name each of the four once")
    return value


def _as_buckets(value: object) -> object:
    if isinstance(value, list) and all(type(length) is int for length in value):
        if not value or min(value) < 1:
            raise ConfigError(f"expected positive lengths, got {value!r}", hint="for example [128, 256, 512]")
        if value != sorted(set(value)):
            raise ConfigError(f"expected rising lengths, got {value!r}", hint=f"write {sorted(set(value))}")
    return value


ClassNames = Annotated[set[str], BeforeValidator(_as_set)]
Size = Annotated[int, Field(ge=1)]


class _Group(BaseModel):
    """Fields that are checked when they are assigned."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, use_attribute_docstrings=True)
    path: ClassVar[str] = "config"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._explained(error, str(error.errors()[0]["loc"][0])) from None

    if not TYPE_CHECKING:  # a type checker would take it as leave to assign anything

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in type(self).model_fields and not name.startswith("_"):
                raise self._unknown(name)
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise self._explained(error, name) from None

    def _explained(self, error: ValidationError, name: str) -> ConfigError:
        item = error.errors()[0]
        if item["type"] == "extra_forbidden":
            return self._unknown(name)
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return ConfigError(f"{self.path}.{name}: {plain_message(cause)}", hint=cause.hint)
        message = f"{item['msg'][0].lower()}{item['msg'][1:]}"
        return ConfigError(
            f"{self.path}.{name}: {message}, got {item['input']!r}", hint=type(self).model_fields[name].description
        )

    def _unknown(self, name: str) -> ConfigError:
        known = list(type(self).model_fields)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
        return ConfigError(f"{self.path} has no field {name!r}", hint=hint)


class ComputeConfig(_Group):
    """Dtypes and kernels."""

    path: ClassVar[str] = "config.compute"

    fp16: bool = False
    """Compute in float16. The loss has to be scaled: use `amp.GradScaler`."""
    bf16: bool = False
    """Compute in bfloat16."""
    acc_scaled_dot_attn: bool = False
    """No effect here."""
    disable_kernel_patches: bool = False
    """No effect here."""


class MemoryConfig(_Group):
    """Gradient checkpointing: activations are recomputed in backward."""

    path: ClassVar[str] = "config.memory"

    gc: bool = False
    """Checkpoint: the units, or what `gc_cls` names."""
    gc_cls: Annotated[set[str] | None, BeforeValidator(_as_set)] = None
    """Class names of the modules to checkpoint instead of the units."""
    gc_cnt: int | None = Field(default=None, ge=0)
    """Checkpoint only so many of them, the first ones."""


class DataLoaderConfig(_Group):
    """Length buckets. Batches are padded to one of a few lengths."""

    path: ClassVar[str] = "config.dataloader"

    buckets: Annotated[list[int] | None, BeforeValidator(_as_buckets)] = None
    """The lengths, rising."""
    max_length: Size | None = None
    """Instead of `buckets`: the longest, the others at equal distances below it."""
    num_buckets: Size | None = None
    """How many with `max_length`; None is 8."""
    pad_value_dict: dict[str, int | float] | None = None
    """By key of a batch, what to pad with."""


class DPConfig(_Group):
    """Data parallelism without sharding."""

    path: ClassVar[str] = "config.dist.dp"

    size: Size | None = None
    """Replicas; None: the world size divided by `fsdp.size`. Another number is an error."""


class TPConfig(_Group):
    """Tensor parallelism, which is not supported."""

    path: ClassVar[str] = "config.dist.tp"

    size: Size = 1
    """Must be 1."""


class PPConfig(_Group):
    """Pipeline parallelism, which is not supported."""

    path: ClassVar[str] = "config.dist.pp"

    size: Size = 1
    """Must be 1."""
    num_micro_batches: Size = 1
    """No effect here."""
    input_names: list[str] | None = None
    """No effect here."""
    split_points: list[Any] = []
    """No effect here."""
    broadcast_loss: bool = True
    """No effect here."""


class FSDPConfig(_Group):
    """Sharding."""

    path: ClassVar[str] = "config.dist.fsdp"

    size: Size = 1
    """Ranks per shard group. Groups hold replicas of each other."""
    wrap_layer_cls: ClassNames = set()
    """Class names of the units; none: the model's own list of layers, and all repeated blocks."""
    flatten_parameters: bool = True
    """No effect here."""
    sync_module_states: bool = False
    """No effect here."""
    use_spmd: bool = False
    """No effect here."""
    shard_output_callable: Callable[..., Any] | None = None
    """Must be None."""


class SPConfig(_Group):
    """Sequence parallelism, which is not supported."""

    path: ClassVar[str] = "config.dist.sp"

    size: Size = 1
    """Must be 1."""


class DistConfig(_Group):
    """How ranks share the work."""

    path: ClassVar[str] = "config.dist"

    dp: DPConfig = Field(default_factory=DPConfig)
    """Data parallelism without sharding."""
    tp: TPConfig = Field(default_factory=TPConfig)
    """Not supported."""
    pp: PPConfig = Field(default_factory=PPConfig)
    """Not supported."""
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    """Sharding."""
    sp: SPConfig = Field(default_factory=SPConfig)
    """Not supported."""
    topology: Annotated[list[str], BeforeValidator(_as_order)] = list(AXES)
    """Axes, the one whose ranks are furthest apart first."""


class Config(_Group):
    """TorchAcc's configuration.

        config = Config()
        config.compute.bf16 = True
        config.dist.fsdp.size = 4
        config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}

    An unknown field and a value of the wrong type are a `ConfigError` when they are assigned.
    """

    backend: Literal["lazy", "eager"] = "eager"
    """No effect here."""
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    """Dtypes and kernels."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Gradient checkpointing."""
    dist: DistConfig = Field(default_factory=DistConfig)
    """How ranks share the work."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """Length buckets."""

    _places: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, value: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """A configuration from a mapping, a YAML or JSON file, None (all defaults) or unchanged.

        Raises:
            ConfigError: anything else, or a field that is wrong.
        """
        if isinstance(value, Config):
            return value
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, str | os.PathLike):
            return cls.from_file(value)
        raise ConfigError(
            f"config is a {type(value).__module__}.{type(value).__name__}",
            hint="pass a fullshard.torchacc.Config, a dict or the path of a YAML file",
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """From nested mappings; where a field is a set, a list will do.

        Raises:
            ConfigError: with every fault that was found.
        """
        return cls._from_entries(_entries(fields))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """From a YAML or JSON file with the fields as nested keys.

        Raises:
            ConfigError: with every fault that was found, its line and column.
        """
        return cls._from_entries(read_document(Path(path)))

    def validate(self) -> None:  # type: ignore[override]  # pydantic's own is deprecated; this is TorchAcc's name
        """Check the fields against one another.

        Raises:
            ConfigError: they contradict each other, or ask for what is not supported.
        """
        refuse(self.reading().problems)

    def entries(self) -> dict[str, Entry]:
        """The fields that are not at their default, by dotted name, and the shard size."""
        changed = {name: value for name, value, default in _leaves(self, Config()) if value != default or name == _SIZE}
        return {
            name: Entry(
                name,
                sorted(value) if isinstance(value, set) else value,
                self._places.get(name, Origin.argument("torchacc.Config")),
            )
            for name, value in changed.items()
        }

    def reading(self) -> Reading:
        """What the fields set; faults are in its problems."""
        return TORCHACC.read(self.entries().values())

    @classmethod
    def _from_entries(cls, entries: Iterable[Entry]) -> Self:
        config, problems = cls(), []
        for entry in _flat(entries):
            key = TORCHACC.find(entry.key)
            if key is None:
                problems += TORCHACC.read([entry]).problems
                continue
            group: Any = config
            *parents, name = key.name.split(".")
            for parent in parents:
                group = getattr(group, parent)
            try:
                setattr(group, name, _plain(entry.value, into=getattr(group, name), name=name))
                config._places[key.name] = entry.origin
            except ConfigError as error:
                problems.append(Problem((entry.origin,), plain_message(error), error.hint))
        refuse(problems)
        return config


def _leaves(group: _Group, defaults: _Group, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in type(group).model_fields:
        value, default = getattr(group, name), getattr(defaults, name)
        if isinstance(value, _Group):
            yield from _leaves(value, default, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, default


def _entries(fields: Mapping[str, Any]) -> tuple[Entry, ...]:
    place = Origin.argument("config")
    return tuple(
        Entry(str(name), _entries(value) if isinstance(value, Mapping) else value, place)
        for name, value in fields.items()
    )


def _flat(entries: Iterable[Entry], prefix: str = "") -> Iterator[Entry]:
    """The entries by dotted name, down to the fields."""
    for entry in entries:
        name = prefix + entry.key
        if entry.is_mapping and TORCHACC.find(name) is None:
            yield from _flat(entry.value, f"{name}.")
        else:
            yield Entry(name, entry.value, entry.origin)


def _plain(value: Any, *, into: Any, name: str) -> Any:
    """A value as the field has it: mappings as dicts, and lists as sets where the field is one."""
    if isinstance(value, tuple) and all(isinstance(item, Entry) for item in value):
        return {item.key: item.value for item in value}
    if isinstance(value, list | tuple) and (isinstance(into, set) or name == "gc_cls"):
        return set(value)
    return value
