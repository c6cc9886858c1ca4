"""Who is asking: code that knows slices, or code that takes them for whole tensors."""

from __future__ import annotations

from functools import cache
from types import FrameType

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError

_KNOW_SLICES = frozenset({"bitsandbytes", "fullshard", "torch", "torchao"})
"""Packages that get slices as plain tensors: the engine, and optimizers, which treat all elements alike."""
_PASS_ON = torch_private.PASSES_ON | {"torch.functional", "torch.nn.functional", "torch.optim.swa_utils"}
_MODULE = "torch.nn.modules.module"
"""Moves and loads parameters for everybody."""
_WRITERS = ("safetensors", *torch_private.WRITERS)
"""Modules that would write a slice as if it were the whole tensor."""
WAY_OUT = (
    "call, on every rank, fullshard.checkpoint.save_checkpoint and load_checkpoint for a model with its optimizer, "
    "full_state_dict and load_full_state_dict for whole tensors, or export_hf"
)


def knows_slices(frame: FrameType) -> bool:
    """Whether the code that runs in `frame` belongs to one of those packages."""
    return _package_knows(frame.f_globals.get("__name__", ""))


@cache
def _package_knows(module: str) -> bool:
    return module.partition(".")[0] in _KNOW_SLICES


def asker(frame: FrameType) -> FrameType:
    """Who wants what torch's own Python code in `frame` computes: whoever called `torch.norm` or a layer."""
    while frame.f_back is not None and _only_passes_on(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


@cache
def _only_passes_on(module: str) -> bool:
    return module in _PASS_ON or (module.startswith(("torch.nn.utils.", "torch.nn.modules.")) and module != _MODULE)


def refuse_writers(frame: FrameType, what: str) -> None:
    """See to it that the code in `frame` is not torch's checkpoint API or safetensors.

    Raises:
        LifecycleError: it is.
    """
    module = frame.f_globals.get("__name__", "")
    if _is_writer(module):
        raise LifecycleError(f"{module} would take this rank's slice of {what} for the whole", hint=WAY_OUT)


@cache
def _is_writer(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _WRITERS)
