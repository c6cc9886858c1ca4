"""The storage of a unit's shards: on the compute device, or where a feature's subclass of `Storage` puts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import Work
from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.wrap.partition import UnitPlan

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket
    from fullshard.engine.bucket_spec import BucketSpec


class Storage:
    """Keeps shards on the compute device. A subclass keeps some of them elsewhere, as its `offload` defines."""

    offload: Offload = Offload()

    def check(self, plans: Sequence[UnitPlan]) -> None:
        """Raise an error if this storage does not support a model with these units."""

    def is_home(self, device: torch.device) -> bool:
        """Return whether shards may be on this device, although it is not the compute device."""
        return False

    def make_main(self, bucket: BucketSpec) -> torch.Tensor:
        """Allocate zeros for this rank's part of a bucket: shape (S,), or the bytes of a storage form."""
        return torch.zeros(bucket.plan.main_numel, dtype=bucket.dtype, device=bucket.mesh.device)

    def make_compute_shard(self, bucket: Bucket) -> torch.Tensor:
        """Return the tensor, shape (S,), that this rank contributes when a bucket is gathered."""
        return bucket.main

    def gather(self, bucket: Bucket, *, exactly: bool, is_changed: bool) -> Work:
        """Launch the gather of a bucket. `is_changed` is set if `main` has changed since the last gather."""
        # Only within a backward: between steps, code may change memory without torch counting it.
        is_unchanged = not is_changed and torch_private.backward_under_way() != -1
        return bucket.buffer.gather(bucket.compute_shard, tag=bucket.tag, exactly=exactly, is_unchanged=is_unchanged)

    def take_gradient(self, bucket: Bucket, reduced: Work, nbytes: int) -> Work:
        """Move a reduced gradient to the device of `main`. This is called only if it is not the compute device."""
        return reduced

    def settle(self) -> None:
        """Wait until no copy operation is reading shards, so that they may change."""

    def before_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Run before an optimizer updates these buckets, while nothing is unsharded."""

    def after_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Run after an optimizer has updated these buckets."""


_ON_DEVICE = Storage()
StorageFactory = Callable[[Any, torch.device], Storage | None]
_factories: list[StorageFactory] = []


def register_storage(factory: StorageFactory) -> None:
    """Register a function that returns the storage for an offload policy, or None if it does not know the policy."""
    _factories.append(factory)


def storage_of(policy: Any, device: torch.device) -> Storage:
    """Return the storage for an `offload_policy` and a compute device."""
    found = next((storage for make in _factories if (storage := make(policy, device)) is not None), None)
    if found is None and policy not in (None, False):  # `switch and CPUOffloadPolicy()` may be False
        raise ConfigError(
            f"offload_policy: expected a CPUOffloadPolicy or an OffloadPolicy, got {policy!r}",
            hint="pass a policy, for example CPUOffloadPolicy()",
        )
    return found or _ON_DEVICE


def by_storage(buckets: Sequence[Bucket]) -> dict[Storage, list[Bucket]]:
    """Group buckets by their storage."""
    found: dict[Storage, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.storage, []).append(bucket)
    return found
