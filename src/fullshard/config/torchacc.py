"""TorchAcc's `Config`: every field with its type, its default, and its effect in fullshard, in one place.

Every assignment is validated. The annotation of each field contains its row (a `Key`). Fields without a target, which
control the data loader and the choice of checkpointed layers, are used by `fullshard.integrations.torchacc` itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from fullshard.config.dialect import Dialect, Key, Problem, Read, Reading, Settings, Status, refuse, shown
from fullshard.config.document import read_document
from fullshard.config.origin import Entry, Origin, entries_of
from fullshard.config.settings import plain_message, suggestion
from fullshard.config.xla import XLA_TRAINS, asks_for_xla, require_xla
from fullshard.core.errors import ConfigError

AXES = ("dp", "fsdp", "pp", "tp")
_SIZE = "dist.fsdp.size"


# -- what becomes of a field: rows without their names, which are the fields' -----------------------------------------


def _sets(target: str, read: Read | None = None) -> Key:
    return Key("", target=target, read=read)


def _used(because: str) -> Key:
    return Key("", because=because)


def _no_effect(because: str) -> Key:
    return Key("", Status.NO_EFFECT, because=because)


def _refused(because: str, unset: Any = None) -> Key:
    return Key("", Status.REFUSED, because=because, unset=(None, unset))


_MODE = "precision.mode"
_NO_PIPELINE = _no_effect("pipeline parallelism is not supported")


def _shard_size(size: Any) -> Settings:
    # One row covers all sizes: the mesh is (world size / size) x size, so 1 replicates and the world size only shards.
    return {"sharding.strategy": "HYBRID_SHARD", "sharding.shard_size": size}


def _annotates(_value: Any) -> Settings:
    require_xla("a callable that annotates outputs", "remove it; every rank has its own outputs")
    return {}


def _as_set(value: object) -> object:
    if isinstance(value, str | list | tuple):
        raise ConfigError(
            f"expected a set of class names, got {value!r}",
            hint=f"write {{{', '.join(map(repr, [value] if isinstance(value, str) else value))}}}",
        )
    return value


def _as_order(value: object) -> object:
    if not isinstance(value, list) or sorted(value, key=str) != sorted(AXES):
        raise ConfigError(f"expected {list(AXES)} in any order, got {value!r}", hint="list each of the four axes once")
    return value


def _as_buckets(value: object) -> object:
    if isinstance(value, list) and all(type(length) is int for length in value):
        if not value or min(value) < 1:
            raise ConfigError(f"expected positive lengths, got {value!r}", hint="use a list such as [128, 256, 512]")
        if value != sorted(set(value)):
            raise ConfigError(f"expected lengths in ascending order, got {value!r}", hint=f"write {sorted(set(value))}")
    return value


ClassNames = Annotated[set[str], BeforeValidator(_as_set)]
Size = Annotated[int, Field(ge=1)]


class _ConfigGroup(BaseModel):
    """A group of fields that are validated on assignment."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, use_attribute_docstrings=True)
    path: ClassVar[str]

    def __init_subclass__(cls, path: str = "config", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.path = path

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._explained(error, str(error.errors()[0]["loc"][0])) from None

    if not TYPE_CHECKING:  # otherwise, a type checker would accept any assignment

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
        field = type(self).model_fields[name]
        hint = field.description or next((row.because for row in field.metadata if isinstance(row, Key)), None)
        return ConfigError(f"{self.path}.{name}: {message}, got {item['input']!r}", hint=hint)

    def _unknown(self, name: str) -> ConfigError:
        return ConfigError(f"{self.path} has no field {name!r}", hint=suggestion(name, type(self).model_fields))


class ComputeConfig(_ConfigGroup, path="config.compute"):
    """Dtypes and kernels of the computation."""

    fp16: Annotated[bool, _sets(_MODE, lambda on: {_MODE: "fp16"} if on else {})] = False
    """Compute in float16. Scale the loss with `amp.GradScaler`."""
    bf16: Annotated[bool, _sets(_MODE, lambda on: {_MODE: "bf16"} if on else {})] = False
    """Compute in bfloat16."""
    acc_scaled_dot_attn: Annotated[
        bool, _no_effect("torch's scaled_dot_product_attention is not replaced, because it chooses the fastest kernel")
    ] = False
    disable_kernel_patches: Annotated[bool, _no_effect("kernels are never patched")] = False


class MemoryConfig(_ConfigGroup, path="config.memory"):
    """Gradient checkpointing, which recomputes activations in backward."""

    gc: Annotated[bool, _sets("sharding.activation_checkpointing")] = False
    """Checkpoint the units, or the modules of the classes in `gc_cls`."""
    gc_cls: Annotated[
        set[str] | None, BeforeValidator(_as_set), _used("these modules are checkpointed instead of the units")
    ] = None
    gc_cnt: Annotated[int | None, _used("only this number of modules is checkpointed, starting with the first")] = (
        Field(default=None, ge=0)
    )


class DataLoaderConfig(_ConfigGroup, path="config.dataloader"):
    """Length bucketing, which pads every batch to one of a few lengths."""

    buckets: Annotated[list[int] | None, BeforeValidator(_as_buckets), _used("batches are padded to these lengths")] = (
        None
    )
    max_length: Annotated[
        Size | None, _used("the longest bucket, as an alternative to buckets; the others are evenly spaced below it")
    ] = None
    num_buckets: Annotated[Size | None, _used("the number of buckets with max_length; None means 8")] = None
    pad_value_dict: Annotated[dict[str, int | float] | None, _used("the padding value for each key of a batch")] = None


class DPConfig(_ConfigGroup, path="config.dist.dp"):
    """Data parallelism without sharding."""

    size: Annotated[Size | None, _used("the number of shard groups, which must match the world size")] = None


class TPConfig(_ConfigGroup, path="config.dist.tp"):
    """Tensor parallelism, which must be applied before fullshard shards the model."""

    size: Annotated[
        Size, _refused("split layers with torch's parallelize_module before the model is sharded", unset=1)
    ] = 1


class PPConfig(_ConfigGroup, path="config.dist.pp"):
    """Pipeline parallelism, which is not supported."""

    size: Annotated[Size, _refused("pipeline parallelism is not supported", unset=1)] = 1
    num_micro_batches: Annotated[Size, _NO_PIPELINE] = 1
    input_names: Annotated[list[str] | None, _NO_PIPELINE] = None
    split_points: Annotated[list[Any], _NO_PIPELINE] = []
    broadcast_loss: Annotated[bool, _NO_PIPELINE] = True


class FSDPConfig(_ConfigGroup, path="config.dist.fsdp"):
    """Sharded data parallelism."""

    size: Annotated[Size, _sets("sharding.shard_size", _shard_size)] = 1
    """Ranks per shard group. Groups hold replicas of each other."""
    wrap_layer_cls: Annotated[ClassNames, _sets("sharding.wrap_classes")] = set()
    """Class names of the units. If empty, the model's own list of layers and all repeated blocks are used."""
    flatten_parameters: Annotated[
        bool, _no_effect("units are always flat buffers, but parameters stay separate for the optimizer")
    ] = True
    sync_module_states: Annotated[bool, _no_effect("every rank always starts from rank 0's weights")] = False
    use_spmd: Annotated[bool, Key("", because=XLA_TRAINS, read=asks_for_xla)] = False
    shard_output_callable: Annotated[
        Callable[..., Any] | None,
        Key("", because="with `use_spmd`, it annotates the outputs of the model and its units", read=_annotates),
    ] = None


class SPConfig(_ConfigGroup, path="config.dist.sp"):
    """Sequence parallelism, which is not supported."""

    size: Annotated[Size, _refused("sequence parallelism is not supported", unset=1)] = 1


class DistConfig(_ConfigGroup, path="config.dist"):
    """The division of the work among the ranks."""

    dp: DPConfig = Field(default_factory=DPConfig)
    tp: TPConfig = Field(default_factory=TPConfig)
    pp: PPConfig = Field(default_factory=PPConfig)
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    sp: SPConfig = Field(default_factory=SPConfig)
    topology: Annotated[
        list[str], BeforeValidator(_as_order), _used("dp must come before fsdp if both are more than 1")
    ] = list(AXES)
    """Axes, from the one with the most distant ranks to the one with the closest."""


class Config(_ConfigGroup):
    """TorchAcc's configuration.

        config = Config()
        config.compute.bf16 = True
        config.dist.fsdp.size = 4
        config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}

    Assigning an unknown field or a value of the wrong type raises a `ConfigError`.
    """

    backend: Annotated[Literal["lazy", "eager"], _no_effect("the engine is the same for every device")] = "eager"
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    dist: DistConfig = Field(default_factory=DistConfig)
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)

    _places: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, value: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """Build a configuration from a mapping, a YAML or JSON file, or None (all defaults).

        Return a `Config` unchanged.

        Raises:
            ConfigError: If the value is anything else or if a field is invalid.
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
            f"config must be a Config, a dict or a path, got a {type(value).__module__}.{type(value).__name__}",
            hint="pass a fullshard.torchacc.Config, a dict or the path of a YAML file",
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Build a configuration from nested mappings. A list is accepted where a field is a set.

        Raises:
            ConfigError: If a field is invalid. The message lists every fault.
        """
        return cls._from_entries(entries_of(fields, "config"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Build a configuration from a YAML or JSON file with the fields as nested keys.

        Raises:
            ConfigError: If a field is invalid. The message lists every fault with its line and column.
        """
        return cls._from_entries(read_document(Path(path)))

    def validate(self) -> None:  # type: ignore[override]  # pydantic's own is deprecated; this is TorchAcc's name
        """Check the fields for consistency.

        Raises:
            ConfigError: If fields contradict each other or request something that is not supported.
        """
        refuse(self.reading().problems)

    def entries(self) -> dict[str, Entry]:
        """Return the fields that differ from their defaults, by dotted name. The shard size is always included."""
        defaults = {name: value for name, value, _ in _leaves(Config())}
        changed = {name: v for name, v, _ in _leaves(self) if v != defaults[name] or name == _SIZE}
        values = {name: sorted(value) if isinstance(value, set) else value for name, value in changed.items()}
        here = Origin.argument("torchacc.Config")
        return {name: Entry(name, value, self._places.get(name, here)) for name, value in values.items()}

    def reading(self) -> Reading:
        """Return the settings that the fields set. Invalid fields are listed in the `problems` of the reading."""
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


def _leaves(group: _ConfigGroup, prefix: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yield the dotted name, the value, and the row of every field."""
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, _ConfigGroup):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            [row] = [row for row in field.metadata if isinstance(row, Key)]
            yield f"{prefix}{name}", value, dataclasses.replace(row, name=f"{prefix}{name}")


def _flat(entries: Iterable[Entry], prefix: str = "") -> Iterator[Entry]:
    """Yield nested entries as flat entries, whose keys are the dotted names of fields."""
    for entry in entries:
        name = prefix + entry.key
        if entry.is_mapping and TORCHACC.find(name) is None:
            yield from _flat(entry.value, f"{name}.")
        else:
            yield Entry(name, entry.value, entry.origin)


def _plain(value: Any, *, into: Any, name: str) -> Any:
    """Convert a value for a field: mappings become dicts, and lists become sets if the field is a set."""
    if isinstance(value, tuple) and all(isinstance(item, Entry) for item in value):
        return {item.key: item.value for item in value}
    if isinstance(value, list | tuple) and (isinstance(into, set) or name == "gc_cls"):
        return set(value) if all(isinstance(item, str) for item in value) else value
    return value


def _finish(reading: Reading) -> None:
    """Add a problem for each field that contradicts another field, or that has no effect without another field."""
    given = reading.entries
    lengths = "dataloader.max_length" if "dataloader.max_length" in given else "dataloader.buckets"
    for name, needed, hint in (
        ("memory.gc_cls", "memory.gc", "set config.memory.gc = True"),
        ("memory.gc_cnt", "memory.gc", "set config.memory.gc = True"),
        ("dataloader.num_buckets", "dataloader.max_length", "set max_length, or list the lengths in buckets"),
        ("dataloader.pad_value_dict", lengths, "set buckets to the lengths to pad to, or max_length"),
    ):
        if name in given and needed not in given:
            message = f"{name} = {shown(given[name].value)} has no effect without {needed}"
            reading.problems.append(Problem((given[name].origin,), message, hint))
    buckets, longest = given.get("dataloader.buckets"), given.get("dataloader.max_length")
    if buckets and longest:
        message = "dataloader.buckets and dataloader.max_length both set the lengths of batches"
        reading.problems.append(Problem((buckets.origin, longest.origin), message, "keep one of the two"))


TORCHACC = Dialect("TorchAcc's Config", tuple(row for _, _, row in _leaves(Config())), finish=_finish)
"""The table of all fields."""


def check_sizes(given: Mapping[str, Entry], world_size: int) -> None:
    """Raise `ConfigError` if the product of the sizes is not the world size, or if replicas are adjacent."""
    shard = given["dist.fsdp.size"]
    replicas, order = given.get("dist.dp.size"), given.get("dist.topology")
    problems = []
    if world_size % shard.value:
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        message = f"dist.fsdp.size = {shard.value} does not divide the world size of {world_size}"
        hint = f"start {shard.value} processes (or a multiple of it), or use one of {divisors}"
        problems.append(Problem((shard.origin,), message, hint))
    elif replicas is not None and replicas.value is not None and replicas.value * shard.value != world_size:
        product = (
            f"dist.dp.size = {replicas.value} times dist.fsdp.size = {shard.value} is {replicas.value * shard.value}"
        )
        message = f"{product}, but the world size is {world_size}"
        problems.append(Problem((replicas.origin, shard.origin), message, "remove dp.size; it is computed"))
    elif order is not None and 1 < shard.value < world_size and order.value.index("dp") > order.value.index("fsdp"):
        what = f"dist.topology = {shown(order.value)} puts replicas next to each other"
        message = f"{what}, but shard groups must be adjacent"
        problems.append(Problem((order.origin,), message, "put 'dp' before 'fsdp'"))
    refuse(problems)
