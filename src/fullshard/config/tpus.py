"""Words that ask for PyTorch/XLA, or for TPUs."""

from __future__ import annotations

from fullshard.config.dialect import Settings
from fullshard.core.errors import ConfigError
from fullshard.core.requirements import XLA_TORCH, is_installed, why_no_xla


def require_xla(what: str, otherwise: str) -> None:
    """Refuse what asks for PyTorch/XLA where it cannot be had.

    Args:
        what: the key with its value, or whatever asks.
        otherwise: how to do without, after "or".

    Raises:
        ConfigError: it is not installed, or not for this torch.
    """
    if (why := why_no_xla()) is not None:
        torch = ".".join(map(str, XLA_TORCH))
        hint = f"pip install 'fullshard[xla]' into an environment of its own (torch {torch}), or {otherwise}"
        raise ConfigError(f"{what} asks for PyTorch/XLA, and {why}", hint=hint)


def tpus_or_xla(what: str, otherwise: str) -> Settings:
    """Return the settings of PyTorch/XLA's words for TPUs: torch_tpu's, for fullshard's engine, if it is installed.

    Where PyTorch/XLA is installed it sets nothing: the adapter reads it itself.

    Raises:
        ConfigError: see `require_xla`; neither is installed.
    """
    if why_no_xla() is not None and is_installed("torch_tpu"):
        return {"launch.device": "tpu"}
    require_xla(what, otherwise)
    return {}
