"""Private names of torch that checkpoints use, in addition to the names in `comm.torch_private`."""

from collections.abc import Callable
from operator import attrgetter

from torch import nn

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that are not in state dicts and so not in checkpoints. Since torch 2.0."""

HOOK_NAMES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""Suffixes of the module attributes that hold hooks, which a copy for merging must not run. Since torch 2.1."""
