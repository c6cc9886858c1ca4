"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file

OVERRIDDEN: Mapping[str, frozenset[str]] = {
    "torch.nn.Module": frozenset({"_replicate_for_data_parallel"}),
    "torch.distributed.fsdp.FSDPModule": frozenset({"_get_fsdp_state"}),
}
"""Methods that torch calls and that the class of sharded modules overrides: one refuses replicas, and one returns the
state of torch's engine. If torch renamed them, the overrides would no longer be called. Since torch 2.0."""


def mark_fully_sharded(module: nn.Module) -> None:
    """Make torch's composable functions, such as `replicate`, skip the parameters of the module. Since torch 2.0."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def leave_state(module: nn.Module, state: object) -> None:
    """Make torch's own `fully_shard.state(module)` return `state` instead of None. Since torch 2.6.

    torch's pipeline schedules use this object to reduce gradients after the backwards of a step.
    """
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state
