"""The `xla*` keys of Transformers' `fsdp_config`, which control FSDP in PyTorch/XLA.

`xla` and `xla_fsdp_v2` request an engine other than fullshard's and are refused if PyTorch/XLA is not installed. The
other keys are translated if they describe the training. Keys about XLA's compiler and collectives have no effect.
"""

from typing import Any

from fullshard.config import values
from fullshard.config.dialect import Dialect, Key, Settings, Status, rows
from fullshard.core.errors import ConfigError
from fullshard.core.requirements import XLA_TORCH, why_no_xla


def _fp32_reduce(value: Any) -> Settings | str:
    if values.boolean(value):
        return {"precision.reduce_dtype": "float32"}
    return "gradients are reduced in float32 anyway, unless precision.reduce_dtype is set"


XLA_SETTINGS = Dialect(
    "xla_fsdp_settings",
    (
        Key("fp32_reduce_scatter", Status.TRANSLATED, "precision.reduce_dtype", read=_fp32_reduce),
        *rows("xla_fsdp_settings"),
    ),
)

XLA_TRAINS = "it selects PyTorch/XLA, which requires the extra `fullshard[xla]`"
"""The effect of a key that requests PyTorch/XLA."""


def require_xla(what: str, otherwise: str) -> Settings:
    """Refuse `what` if PyTorch/XLA is unavailable, and suggest `otherwise`. The adapter itself reads the key."""
    if (why := why_no_xla()) is not None:
        torch = ".".join(map(str, XLA_TORCH))
        hint = f"pip install 'fullshard[xla]', then 'torch=={torch}.*', in a separate environment, or {otherwise}"
        raise ConfigError(f"{what} requests PyTorch/XLA, but {why}", hint=hint)
    return {}


def asks_for_xla(value: Any) -> Settings:
    """Read a boolean that requests PyTorch/XLA."""
    return require_xla("true", "remove it") if values.boolean(value) else {}


XLA_KEYS = (
    Key("xla", Status.TRANSLATED, because=XLA_TRAINS, read=asks_for_xla),
    Key("xla_fsdp_v2", Status.TRANSLATED, because=XLA_TRAINS, read=asks_for_xla),
    Key("xla_fsdp_settings", section=XLA_SETTINGS),
    Key("xla_fsdp_grad_ckpt", Status.TRANSLATED, "sharding.activation_checkpointing"),
)
