"""Storage of shards that are partly in host memory: where each tensor is kept, and when it is copied."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import Work
from fullshard.config.switches import OFFLOAD
from fullshard.core.errors import ConfigError
from fullshard.core.events import EventKind
from fullshard.core.offload import Offload
from fullshard.engine.bucket import Bucket
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.parameter import sharded_parameters
from fullshard.engine.storage import Storage
from fullshard.features.offload.host import Host, StorageView, bytes_of, host_of, plain_tensors, show_in
from fullshard.wrap.partition import UnitPlan


def move_state(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], host: Host, way: EventKind) -> None:
    """Copy optimizer state to the device or back (`way`). It is updated on the device, but kept on the host."""
    visiting = {bucket for bucket in buckets if bucket.plan.state_visits_device}
    if not visiting:
        return
    memory: dict[int, tuple[Bucket, list[torch.Tensor]]] = {}
    for parameter in sharded_parameters(optimizer):
        values = optimizer.state.get(parameter, {}).values() if parameter.bucket in visiting else ()
        for tensor in itertools.chain.from_iterable(map(plain_tensors, values)):
            place = torch_private.storage_id(tensor.untyped_storage())
            memory.setdefault(place, (parameter.bucket, []))[1].append(tensor)
    moved: dict[Bucket, int] = {}
    for bucket, tensors in memory.values():
        nbytes = tensors[0].untyped_storage().nbytes()
        if host.is_there(tensors[0]) is (way is EventKind.TO_DEVICE) or host.is_here:
            _rebind(tensors, host, way)
            moved[bucket] = moved.get(bucket, 0) + nbytes
    if moved and way is EventKind.TO_HOST:  # any code may read state on the host
        host.finish()
    for bucket in sorted(moved, key=lambda bucket: bucket.tag):
        if moved[bucket]:
            bucket.owner.emit(way, moved[bucket], what="optimizer state", bucket=bucket.number)


def _rebind(tensors: list[torch.Tensor], host: Host, way: EventKind) -> None:
    """Copy the storage that `tensors` share to the host or the device, and make the tensors views of the copy."""
    views = [(tensor, StorageView.of(tensor)) for tensor in tensors]
    to_host = way is EventKind.TO_HOST
    show_in(views, host.copy_of(bytes_of(tensors[0].untyped_storage()), to_host=to_host).untyped_storage())


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Selects which data to keep in host memory. By default, everything stays on the device.

    Attributes:
        compute_shards, main_weights: see `core.offload.Offload`.
        optimizer_state: see `core.offload.Offload`; None means the same location as the main weights.
        activations: see `core.offload.Offload`. `everything` there does not include them.
        pin_memory: page-lock host memory. Otherwise, copies do not overlap with computation.

    Raises:
        ConfigError: The combination is not possible.
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
        """Return the selection as an `Offload`."""
        return Offload.of(False, self.compute_shards, self.main_weights, self.optimizer_state, self.activations)


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offloads all sharded data. On a CPU nothing is moved, because the data is already in host memory.

    As in torch, only `pin_memory` may be a positional argument.
    """

    compute_shards: bool = field(default=True, kw_only=True)
    main_weights: bool = field(default=True, kw_only=True)
    pin_memory: bool = True


def offload_of(policy: Any) -> Offload | None:
    """Return what a policy of fullshard or torch (FSDP1 or FSDP2) offloads, or None if `policy` is not a policy."""
    if isinstance(policy, OffloadPolicy):
        return policy.offload
    if hasattr(policy, "offload_params"):
        return Offload.of(bool(policy.offload_params))
    names = {cls.__name__ for cls in type(policy).__mro__}
    return Offload.of("CPUOffloadPolicy" in names) if "OffloadPolicy" in names else None


class OneMemory(Storage):
    """Storage of shards on a CPU, where host and device are the same and nothing needs to be offloaded."""

    def __init__(self, wanted: Offload) -> None:
        self._wanted = wanted

    def check(self, plans: Sequence[UnitPlan]) -> None:
        """Raise an error if the selected data cannot be offloaded together."""
        if self._wanted.activations:
            check_offloads_activations(len(plans))
        is_frozen = (not slot.parameter.requires_grad for plan in plans for slot in plan.slots)
        if self._wanted.compute_shards and not self._wanted.main_weights and not any(is_frozen):
            raise ConfigError(
                "compute shards are on the host and main weights on the device, but trainable parameters are gathered "
                "from main weights, and no parameter is frozen",
                hint="offload main weights as well, or keep compute shards on the device",
            )


class HostStorage(OneMemory):
    """Storage of shards for a device with its own memory. `host` allocates buffers in host memory and copies them."""

    def __init__(self, offload: Offload, host: Host) -> None:
        super().__init__(offload)
        self.offload, self.host = offload, host

    def is_home(self, device: torch.device) -> bool:
        """Return whether `device` is the host."""
        return device.type == "cpu"

    def _empty(self, bucket: BucketSpec, dtype: torch.dtype) -> torch.Tensor:
        return self.host.empty(bucket.plan.main_numel, dtype)

    def make_main(self, bucket: BucketSpec) -> torch.Tensor:
        """Allocate a bucket's main weights, filled with zeros, on the host or on the device as the plan requires."""
        is_there = bucket.plan.main_is_on_host
        return self._empty(bucket, bucket.dtype).zero_() if is_there else super().make_main(bucket)

    def make_compute_shard(self, bucket: Bucket) -> torch.Tensor:
        """Return `main` if it is also the compute shard. Otherwise, allocate memory for a compute shard."""
        if bucket.plan.compute_shard_is_main:
            return bucket.main
        if bucket.plan.is_gathered_from_host:
            return self._empty(bucket, bucket.compute_shard_dtype)
        return torch.empty(bucket.plan.main_numel, dtype=bucket.compute_shard_dtype, device=bucket.mesh.device)

    def gather(self, bucket: Bucket, *, exactly: bool, is_changed: bool) -> Work:
        """All-gather a bucket's compute shard, which is updated if it is outdated and copied to the device first."""
        is_outdated = bucket.compute_shard is not bucket.main and is_changed
        if not (bucket.plan.is_gathered_from_host or is_outdated):
            return super().gather(bucket, exactly=exactly, is_changed=is_changed)
        with self.host.copying_to_device():
            if is_outdated:
                self._update_compute_shard(bucket)
            work = bucket.buffer.gather(bucket.compute_shard, tag=bucket.tag, exactly=exactly)
        work = self.host.arriving(work)
        bucket.owner.emit(EventKind.TO_DEVICE, bucket.compute_shard.nbytes, what="compute shard", bucket=bucket.number)
        return work

    @torch.no_grad()
    def _update_compute_shard(self, bucket: Bucket) -> None:
        """Cast the main weights to the compute dtype on the host, and copy the result to the compute shard."""
        cast = bucket.main
        if bucket.compute_shard_dtype != bucket.dtype:
            is_there = bucket.plan.is_gathered_from_host
            cast = bucket.compute_shard if is_there else self._empty(bucket, bucket.compute_shard_dtype)
            cast.copy_(bucket.main)
        if cast is not bucket.compute_shard:
            bucket.compute_shard.copy_(cast, non_blocking=cast.is_pinned())

    def take_gradient(self, bucket: Bucket, reduced: Work, nbytes: int) -> Work:
        """Start to copy a reduced gradient to the host, and return work that waits for the copy."""
        work = self.host.send(reduced)
        bucket.owner.emit(EventKind.TO_HOST, nbytes, what="gradient", bucket=bucket.number)
        return work

    def settle(self) -> None:
        """Wait until no all-gather reads host memory any more."""
        self.host.settle()

    def before_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Copy optimizer state that is kept on the host to the device if the update runs there."""
        if any(bucket.plan.main_is_on_host for bucket in buckets):
            for name in ("grad_scale", "found_inf"):  # from GradScaler; fused optimizers do not wait for a copy
                if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
                    setattr(optimizer, name, value.cpu())
        move_state(optimizer, buckets, self.host, EventKind.TO_DEVICE)

    def after_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Copy optimizer state back to the host, including state that was created or loaded on the device."""
        move_state(optimizer, buckets, self.host, EventKind.TO_HOST)


def store_on_host(policy: Any, device: torch.device) -> Storage | None:
    """Return the storage for an offload policy of fullshard or torch, or None for any other object."""
    wanted = offload_of(policy)
    # FSDP1's policy has no `pin_memory`.
    return None if wanted is None else _storage(wanted, device, getattr(policy, "pin_memory", True), OFFLOAD.read())


@functools.cache
def _storage(wanted: Offload, device: torch.device, pins: bool, mode: str | None) -> Storage:
    if not wanted or (device.type == "cpu" and mode != "rehearse"):
        return OneMemory(wanted)
    return HostStorage(wanted, host_of(device, pins=pins, overlaps=mode != "in-turn"))


def check_offloads_activations(units: int) -> None:
    """Raise an error if activations are offloaded from a single unit: backward would start with all on the device."""
    if units == 1:
        raise ConfigError(
            "activations are offloaded, but the complete model is one unit, so backward would start with all of them "
            "on the device",
            hint="make its layers units as well, or keep activations on the device",
        )
