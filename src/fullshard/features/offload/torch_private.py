"""Private torch names that only this feature uses. `comm.torch_private` contains the others."""

from collections.abc import Callable

import torch

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns the number of holders of a storage, given its `storage_id`. Without it, memory that forward still uses would
be moved to the host. Since torch 2.8."""


def are_saved_elsewhere() -> bool:
    """Return whether `saved_tensors_hooks` are active, as inside a checkpointed function. Since torch 2.8."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
