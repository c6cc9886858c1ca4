"""Private torch names that only this feature uses. `comm.torch_private` contains the others."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

OVERRIDDEN: Mapping[str, frozenset[str]] = {"torch.nn.Module": frozenset({"_apply"})}
"""The method behind `to()`, `half()` and similar ones, which the class of sharded modules overrides. If torch renamed
it, the override would no longer be called. Since torch 2.0."""

gradient_hooks: Callable[[torch.Tensor], Mapping[int, object] | None] = attrgetter("_backward_hooks")
"""Returns the hooks registered on a tensor with `register_hook`, by number. Since torch 2.0."""


def apply_past_fsdp(module: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> Any:
    """Call torch's original `Module._apply` instead of the one of torch's `FSDPModule`. Since torch 2.6."""
    return super(FSDPModule, module)._apply(fn, recurse)
