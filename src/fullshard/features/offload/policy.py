"""The policies that say what lives in host memory: fullshard's, and torch's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fullshard.core.offload import Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Choose what lives in host memory. By default nothing does.

    Attributes:
        compute_shards, main_weights: see `core.offload.Offload`.
        optimizer_state: the same; None: where the main weights are.
        activations: the same; not a part of "everything", which means parameters.
        pin_memory: page-lock host memory, without which copies wait for one another.

    Raises:
        ConfigError: an impossible combination.
    """

    compute_shards: bool = False
    main_weights: bool = False
    optimizer_state: bool | None = None
    pin_memory: bool = True
    activations: bool = False

    def __post_init__(self) -> None:
        _ = self.offload

    @property
    def offload(self) -> Offload:
        """Return the four switches."""
        return Offload.of(False, self.compute_shards, self.main_weights, self.optimizer_state, self.activations)


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offload everything that is sharded. On a CPU it is there anyway, and nothing is moved.

    As in torch, `pin_memory` is the one argument that may be given without its name.
    """

    compute_shards: bool = field(default=True, kw_only=True)
    main_weights: bool = field(default=True, kw_only=True)
    pin_memory: bool = True


def offload_of(policy: Any) -> Offload | None:
    """Return what a policy offloads, fullshard's or torch's (FSDP1 or FSDP2); None if it is neither."""
    if isinstance(policy, OffloadPolicy):
        return policy.offload
    if hasattr(policy, "offload_params"):
        return Offload.of(bool(policy.offload_params))
    names = {cls.__name__ for cls in type(policy).__mro__}
    return Offload.of("CPUOffloadPolicy" in names) if "OffloadPolicy" in names else None
