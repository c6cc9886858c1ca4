"""Settings for PyTorch/XLA. An unsupported setting raises an error or is reported as having no effect."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fullshard.config.load import load_file
from fullshard.config.resolve import Resolved, resolve
from fullshard.core.errors import ConfigError

_HONORED = {
    *("sharding.strategy", "sharding.shard_size", "sharding.wrap", "sharding.wrap_classes", "sharding.wrap_min_numel"),
    *("sharding.activation_checkpointing", "precision.mode", "precision.param_dtype"),
}
_STATE = ("activations", "main_weights", "compute_shards", "optimizer_state")
_REPLICATES = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OFFLOADS = ("cpu_offload", *(f"offload_{what}" for what in _STATE))
_REFUSED = {
    **{f"sharding.{name}": "PyTorch/XLA keeps all state on its devices" for name in _OFFLOADS},
    "sharding.ignored_modules": "PyTorch/XLA shards every parameter",
}


@dataclass(frozen=True, slots=True)
class XlaSettings:
    """The settings for training through PyTorch/XLA.

    Attributes:
        shard_size: The number of devices per shard group; the shard groups are replicas of one another. None means that
            all devices form one group.
        wrap_classes: The names of the module classes that become units. If empty, and without `wrap_min_numel`, the
            model's own list of layers is used.
        wrap_min_numel: The number of parameters from which a module becomes a unit, as an alternative to classes.
        bf16: Whether to compute in bfloat16, with float32 weights and outputs.
        checkpointing: Whether to recompute the activations of units in backward.
        shard_output: A function `(output, mesh) -> None` that annotates the output of a unit and of the model. By
            default, dim 0 of every tensor in the output is divided over all devices if its size is a multiple of their
            number.
    """

    shard_size: int | None = None
    wrap_classes: tuple[str, ...] = ()
    wrap_min_numel: int | None = None
    bf16: bool = False
    checkpointing: bool = False
    shard_output: Callable[[Any, Any], None] | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read settings from a file in any format of `fullshard launch`. Raises the same errors as `from_resolved`."""
        return cls.from_resolved(resolve([load_file(path)]))

    @classmethod
    def from_resolved(cls, found: Resolved, shard_output: Callable[[Any, Any], None] | None = None) -> Self:
        """Take the settings from a resolved configuration. Warn about each setting that has no effect.

        Raises:
            ConfigError: If PyTorch/XLA does not support a setting. The message says where the setting comes from.
        """
        sharding, precision = found.config.sharding, found.config.precision
        for path, setting in found.settings.items():
            if path in _REFUSED and setting.value:
                raise ConfigError(f"{setting.origin}: {setting.key}: {_REFUSED[path]}", hint="remove it")
            if path.startswith(("sharding.", "precision.")) and path not in {*_HONORED, *_REFUSED}:
                text = f"{setting.origin}: {setting.key} has no effect under PyTorch/XLA, whose compiler decides it"
                warnings.warn(text, stacklevel=2)
        compute = precision.mode if precision.mode != "no" else str(precision.param_dtype or "no")
        if compute not in ("no", "bf16", "float32", "bfloat16"):
            origin = found.origin("precision.mode" if precision.mode != "no" else "precision.param_dtype")
            raise ConfigError(
                f"{origin}: {compute} is not supported: TPUs compute in bfloat16 or float32", hint="use bf16"
            )
        size = 1 if sharding.strategy == "NO_SHARD" else sharding.shard_size
        if sharding.strategy in _REPLICATES and size is None:
            origin = found.origin("sharding.strategy")
            raise ConfigError(
                f"{origin}: {sharding.strategy} requires the size of a shard group", hint="set shard_size"
            )
        return cls(
            shard_size=size,
            wrap_classes=tuple(sharding.wrap_classes),
            wrap_min_numel=sharding.wrap_min_numel,
            bf16=compute in ("bf16", "bfloat16"),
            checkpointing=sharding.activation_checkpointing,
            shard_output=shard_output,
        )
