"""Shards of which some are in host memory: where each tensor of a bucket is, and when it is copied."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
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
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.storage import Storage
from fullshard.features.offload.host import Host, StorageView, bytes_of, host_of
from fullshard.wrap.partition import UnitPlan


def move_state(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], host: Host, way: EventKind) -> None:
    """Copy the state of buckets whose state visits the device there before a step, or back after it."""
    visiting = {bucket for bucket in buckets if bucket.plan.state_visits_device}
    if not visiting:
        return
    memory: dict[int, tuple[Bucket, list[torch.Tensor]]] = {}
    for parameter in sharded_parameters(optimizer):
        values = optimizer.state.get(parameter, {}).values() if parameter.bucket in visiting else ()
        for tensor in itertools.chain.from_iterable(map(_plain_tensors, values)):
            place = torch_private.storage_id(tensor.untyped_storage())
            memory.setdefault(place, (parameter.bucket, []))[1].append(tensor)
    moved: dict[Bucket, int] = {}
    for bucket, tensors in memory.values():
        nbytes = tensors[0].untyped_storage().nbytes()
        if host.is_there(tensors[0]) is (way is EventKind.TO_DEVICE) or host.is_here:
            _rebind(tensors, host, way)
            moved[bucket] = moved.get(bucket, 0) + nbytes
    if moved and way is EventKind.TO_HOST:  # any code may read it there; nothing changes state on its way to the device
        host.finish()
    for bucket in sorted(moved, key=lambda bucket: bucket.tag):
        if moved[bucket]:
            bucket.owner.emit(way, moved[bucket], what="optimizer state", bucket=bucket.number)


def _plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state's value; one of a wrapper class is made of several. Step counts stay."""
    if isinstance(value, ShardedTensor):
        yield value.local
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.dim():
        yield value


def _rebind(tensors: list[torch.Tensor], host: Host, way: EventKind) -> None:
    """Copy the memory that `tensors` are views of, and make them views of the copy."""
    copy = host.copy_of(bytes_of(tensors[0].untyped_storage()), to_host=way is EventKind.TO_HOST).untyped_storage()
    for tensor in tensors:
        view = StorageView.of(tensor).of_storage(copy)
        if torch_private.may_hold(tensor, view):
            tensor.data = view
        else:  # between the host and a plugged-in device
            torch.utils.swap_tensors(tensor, view)


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


class OneMemory(Storage):
    """Shards on a CPU, where host and device are one, whatever is to be offloaded."""

    def __init__(self, wanted: Offload) -> None:
        self._wanted = wanted

    def check(self, plans: Sequence[UnitPlan]) -> None:
        """Refuse what cannot be."""
        if self._wanted.activations:
            check_offloads_activations(len(plans))
        is_frozen = (not slot.parameter.requires_grad for plan in plans for slot in plan.slots)
        if self._wanted.compute_shards and not self._wanted.main_weights and not any(is_frozen):
            raise ConfigError(
                "compute shards on the host and main weights on the device: trainable parameters are gathered from "
                "main weights, and none is frozen",
                hint="offload main weights too, or leave compute shards on the device",
            )


class HostStorage(OneMemory):
    """Shards beside a device whose memory is its own.

    Attributes:
        host: makes buffers on the host and copies them.
    """

    def __init__(self, offload: Offload, host: Host) -> None:
        super().__init__(offload)
        self.offload, self.host = offload, host

    def is_home(self, device: torch.device) -> bool:
        """Return whether it is the host."""
        return device.type == "cpu"

    def _empty(self, bucket: BucketSpec, dtype: torch.dtype) -> torch.Tensor:
        return self.host.empty(bucket.plan.main_numel, dtype)

    def make_main(self, bucket: BucketSpec) -> torch.Tensor:
        """Return zeros on the host, if main weights are there."""
        is_there = bucket.plan.main_is_on_host
        return self._empty(bucket, bucket.dtype).zero_() if is_there else super().make_main(bucket)

    def make_compute_shard(self, bucket: Bucket) -> torch.Tensor:
        """Return `main`, or memory for a copy of it, on the device or in the compute dtype."""
        if bucket.plan.compute_shard_is_main:
            return bucket.main
        if bucket.plan.is_gathered_from_host:
            return self._empty(bucket, bucket.compute_shard_dtype)
        return torch.empty(bucket.plan.main_numel, dtype=bucket.compute_shard_dtype, device=bucket.mesh.device)

    def gather(self, bucket: Bucket, *, exactly: bool, is_changed: bool) -> Work:
        """Copy the compute shard to the device, if it is on the host or is outdated there, and gather it."""
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
        """Cast the changed `main` on the host; copy the result to a compute shard on the device."""
        cast = bucket.main
        if bucket.compute_shard_dtype != bucket.dtype:
            is_there = bucket.plan.is_gathered_from_host
            cast = bucket.compute_shard if is_there else self._empty(bucket, bucket.compute_shard_dtype)
            cast.copy_(bucket.main)
        if cast is not bucket.compute_shard:
            bucket.compute_shard.copy_(cast, non_blocking=cast.is_pinned())

    def take_gradient(self, bucket: Bucket, reduced: Work, nbytes: int) -> Work:
        """Copy it to the host as soon as it is reduced."""
        work = self.host.send(reduced)
        bucket.owner.emit(EventKind.TO_HOST, nbytes, what="gradient", bucket=bucket.number)
        return work

    def settle(self) -> None:
        """Wait until no gather reads host memory."""
        self.host.settle()

    def before_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Bring state to the main weights, wherever they are."""
        if any(bucket.plan.main_is_on_host for bucket in buckets):
            for name in ("grad_scale", "found_inf"):  # GradScaler's, for fused optimizers: they would wait for no copy
                if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
                    setattr(optimizer, name, value.cpu())
        move_state(optimizer, buckets, self.host, EventKind.TO_DEVICE)

    def after_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Send state, made or loaded on the device, to the host."""
        move_state(optimizer, buckets, self.host, EventKind.TO_HOST)


def store_on_host(policy: Any, device: torch.device) -> Storage | None:
    """Return the storage of a policy, fullshard's or torch's (which has one switch); None for anything else."""
    wanted = offload_of(policy)
    # FSDP1's policy has no `pin_memory`.
    return None if wanted is None else _storage(wanted, device, getattr(policy, "pin_memory", True), OFFLOAD.read())


@functools.cache
def _storage(wanted: Offload, device: torch.device, pins: bool, mode: str | None) -> Storage:
    if not wanted or (device.type == "cpu" and mode != "rehearse"):
        return OneMemory(wanted)
    return HostStorage(wanted, host_of(device, pins=pins, overlaps=mode != "in-turn"))


def check_offloads_activations(units: int) -> None:
    """Refuse activations on the host for a model of one unit: backward would begin with all of them."""
    if units == 1:
        raise ConfigError(
            "activations on the host with the whole model as one unit: backward begins with all of them",
            hint="make its layers units, too, or leave activations on the device",
        )
