"""The `xla*` keys of Transformers' `fsdp_config`, which control FSDP in PyTorch/XLA.

`xla` and `xla_fsdp_v2` request an engine other than fullshard's and are refused if PyTorch/XLA is not installed. The
other keys are translated if they describe the training. Keys about XLA's compiler and collectives have no effect.
"""

from typing import Any

from fullshard.config import values
from fullshard.config.dialect import Dialect, Key, Settings, Status, no_effect, refused
from fullshard.core.errors import ConfigError
from fullshard.core.requirements import XLA_TORCH, why_no_xla


def _fp32_reduce(value: Any) -> Settings | str:
    if values.boolean(value):
        return {"precision.reduce_dtype": "float32"}
    return "gradients are reduced in float32 anyway, unless precision.reduce_dtype is set"


XLA_SETTINGS = Dialect(
    "xla_fsdp_settings",
    (
        Key("compute_dtype", Status.TRANSLATED, "precision.param_dtype"),
        Key("buffer_dtype", Status.TRANSLATED, "precision.buffer_dtype"),
        Key("fp32_reduce_scatter", Status.TRANSLATED, "precision.reduce_dtype", read=_fp32_reduce),
        Key("reshard_after_forward", Status.TRANSLATED, "sharding.reshard_after_forward"),
        *no_effect(
            "it controls XLA's compiler and collectives, which are not used; units use one collective per bucket",
            *("flatten_parameters", "shard_param_on_dim_0", "_shard_size_multiple", "opt_flatten_overlap"),
            *("optimization_barrier_in_forward", "optimization_barrier_in_backward", "sync_on_finalization"),
            *("mark_step_on_finalization", "pin_layout_in_collective_ops", "_use_xla_patched_linear", "_debug_msg"),
            *("reduce_scatter_bucket_size_mb", "coalesce_all_gather_ops", "disable_reshard_on_root"),
            "execute_sharding_on_init",
        ),
        *refused(
            "ranks and groups are set by the launcher and shard_size",
            *("sharding_groups", "sharding_rank", "sharding_world_size"),
        ),
        *refused(
            "it is a Python object or a debugging aid for XLA",
            *("auto_wrap_policy", "auto_wrapper_callable", "param_init_fn"),
            *("_debug_dummy_forward_pass", "_debug_print", "_debug_dummy_all_gather_op"),
            *("_debug_dummy_all_reduce_op", "_debug_dummy_reduce_scatter_op", "_debug_dummy_optimization_barrier_op"),
        ),
    ),
)

XLA_TRAINS = "it selects PyTorch/XLA, which requires the extra `fullshard[xla]`"
"""The effect of a key that requests PyTorch/XLA."""


def require_xla(what: str, otherwise: str) -> Settings:
    """Refuse `what` if PyTorch/XLA is unavailable, and suggest `otherwise`. The adapter itself reads the key."""
    if (why := why_no_xla()) is not None:
        torch = ".".join(map(str, XLA_TORCH))
        hint = f"pip install 'fullshard[xla]' into a separate environment (torch {torch}), or {otherwise}"
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
