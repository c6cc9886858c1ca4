"""Private torch names that only this feature uses. `comm.torch_private` contains the others."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._ops._math_ops import _NormPartial

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file
from fullshard.comm.torch_private import Kernel


def takes_plain_as_replicated() -> bool:
    """Return whether torch's `implicit_replication()` is active. Since torch 2.5."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


norm_partial: Callable[[float], Placement] = _NormPartial
"""The placement of a norm before it is reduced, when every rank holds the norm of its own elements. Since torch 2.2."""


@cache
def written(kernel: Kernel) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that a kernel writes to. Since torch 2.0."""
    arguments = enumerate(kernel._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Disables the `__torch_function__` of subclasses inside a block. Since torch 2.0."""


COPY_KERNELS = frozenset({"_to_copy"})
MANY_KERNELS = ("_foreach_", "_fused_", "_amp_foreach_")
ITEM, MAX_OF_MANY, NORM_OF_MANY = "_local_scalar_dense", "_foreach_max", "_foreach_norm"
"""Names of the kernels for `to()` and `item()`, name prefixes of kernels that take lists of tensors, and names of
kernels that reduce each tensor of a list. If torch renamed one, it would run on gathered tensors, which is slow, or as
if it were elementwise, which is wrong. Since torch 2.5."""
