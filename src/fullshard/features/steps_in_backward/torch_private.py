"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

step_pre_hooks: Callable[[torch.optim.Optimizer], Mapping[int, object]] = attrgetter("_optimizer_step_pre_hooks")
"""The hooks that run before an optimizer's step. No other hook is allowed for a step in backward. Since torch 2.0."""
