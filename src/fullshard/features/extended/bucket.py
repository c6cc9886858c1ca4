"""The bucket of a parameter that defines its own all-gather (`features.extended.protocol`).

    main              a plain tensor, as in any bucket, but with complete rows on each rank and only one parameter
    rows              a parameter of the extension's class that wraps `main`. Before every all-gather it returns the
                      tensors to send (for composed parameters see `features.extended.composed`)
    outputs           the gathered tensors, one for each tensor that is sent
    unsharded         the tensor that the extension builds from the first outputs; modules use it as their parameter
                      in forward

Later all-gathers refill the same memory, because autograd may have saved views of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm import torch_private
from fullshard.comm.base import FullBuffer, Work, WorkOf
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.engine.binding import Originals
from fullshard.engine.bucket import Bucket
from fullshard.engine.gradient import Gradient
from fullshard.engine.parameter import ShardedParameter, mark_original
from fullshard.engine.precision import MixedPrecisionPolicy, dtype_name
from fullshard.features.extended.protocol import takes_options, wrapped_by
from fullshard.wrap.partition import Slot, Values


class ExtendedParameter(ShardedParameter):
    """A sharded parameter whose `_local_tensor` is a tensor of the extension's class, as in torch's `fully_shard`."""

    rows: torch.Tensor

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.rows if "rows" in self.__dict__ else torch_private.local_of(self)

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        torch_private.put_local(self, value)

    def to_local(self, **options: Any) -> torch.Tensor:
        """Return the plain tensor with this rank's part, as other sharded parameters do."""
        return self.view(self.shape).to_local(**options)  # type: ignore[attr-defined, no-any-return]


class ExtendedBucket(Bucket):
    """The bucket of one extended parameter. It takes the same arguments as `Bucket`, but exactly one slot."""

    buffer: ExtendedBuffer
    parameter_type: type[ShardedParameter] = ExtendedParameter

    def __init__(self, slots: Sequence[Slot], **options: Any) -> None:
        extended = slots[0].parameter
        super().__init__(slots, **options)
        [parameter] = self.sharded_parameters
        mark_original(extended, parameter)  # not kept, because it holds unsharded memory
        mark_original(wrapped_by(extended), parameter)  # an optimizer that is older than the extension holds this
        if isinstance(parameter, ExtendedParameter):
            parameter.rows = self.buffer.rows

    def _allocate(self, weights: Values | None) -> None:
        """Copy this rank's rows, and gather once, because only the extension knows which tensors it gathers."""
        [slot] = self.slots
        extended = slot.parameter
        if self.plan.main_is_on_host:
            raise ConfigError(
                f"a parameter of type {type(extended).__name__} defines its own all-gather, which needs its shards on "
                "the device",
                hint="omit offload_policy",
            )
        rows = self._make_rows(slot, weights)
        self.compute_shard, self._version = self.main, -1
        self.buffer = ExtendedBuffer(slot, rows, mesh=self.mesh, policy=self.owner.policy, dtype=self.compute_dtype)
        self.full = self.buffer.full
        slot.parameter = self.buffer.unsharded
        for module, attribute in slot.owners:
            module._parameters[attribute] = slot.parameter
        self.storage_ids = self.buffer.storage_ids
        self.plan = dataclasses.replace(self.plan, full_dtype=self.buffer.full_dtype)
        self.originals = Originals([slot.parameter])
        self.reshard()

    def _make_rows(self, slot: Slot, weights: Values | None) -> torch.Tensor:
        """Fill `main` and return a tensor of the extension's class around it. All ranks get the same number of rows."""
        extended = slot.parameter
        self.main = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.mesh.device)
        interval, own = self.layout.interval(0, self.mesh.shard_rank), self.main[self.slices[0]]
        if extended.is_meta and weights is not None:
            weights.read(slot, interval, own)
        else:
            own.copy_(wrapped_by(extended).detach().reshape(-1)[interval.start : interval.stop])
        shape = (self.layout.shard_numel // math.prod(extended.shape[1:]), *extended.shape[1:])
        rows = new_rows(extended, shape, self.mesh.device)
        wrapped_by(rows).data = self.main.view(shape)
        return rows

    @property
    def full_nbytes(self) -> int:
        """Return the size in bytes of the gathered tensors and of other tensors that the extension has allocated."""
        return self.buffer.whole_nbytes

    def write_back(self) -> None:
        """Raise an error if the unsharded parameter has changed, because changes cannot be converted back to rows."""
        if self.originals.take_changes():
            name = self.sharded_parameters[0].name
            raise LifecycleError(
                f"rank {self.mesh.rank}, {self.owner}: {name} was changed in place inside unsharded(). The "
                "change would be lost, because it is a temporary tensor that `fsdp_post_all_gather` returned",
                hint="change the sharded parameter in place instead",
            )

    def make_gradient(self) -> None:
        """Prepare to collect gradients. Unlike in other buckets, data that forward has replaced cannot be detected."""
        self.gradient = Gradient(self, self.sharded_parameters, storage_id=None)
        self.has_gradient = True


class ExtendedBuffer(FullBuffer):
    """The memory that one extended parameter is unsharded into. `dtype` is the compute dtype.

    Attributes:
        rows: this rank's rows, including padding, as an instance of the parameter's class.
        unsharded: the parameter that modules use in forward.
        full: the unsharded parameter, detached from autograd.
        storage_ids: ids of all storages that are filled when the parameter is unsharded.
        whole_nbytes: total size of these storages in bytes.
    """

    def __init__(
        self, slot: Slot, rows: torch.Tensor, *, mesh: Mesh, policy: MixedPrecisionPolicy, dtype: torch.dtype
    ) -> None:
        extended, self.rows = slot.parameter, rows
        self._slot, self._mesh, self._policy, self._dtype = slot, mesh, policy, dtype
        self._shape, self._stride = extended.shape, torch.empty(extended.shape, device="meta").stride()
        self._shard_mesh = _shard_mesh(mesh)
        self._takes_options = takes_options(extended)
        self._outputs: list[tuple[FullBuffer, torch.Tensor]] = []
        self._beside: list[tuple[torch.UntypedStorage, int]] = []
        self.gather(rows, tag=0).wait()
        self.full = self.unsharded.detach()
        self.shared_number = self._outputs[0][0].shared_number if self._outputs else None
        self.is_persistent = all(buffer.is_persistent for buffer, _ in self._outputs) and not self._beside
        self.whole_nbytes = self.nbytes

    @property
    def full_dtype(self) -> str | None:
        """Return the dtype of the gathered tensor if the extension keeps only this tensor, or None otherwise."""
        outputs = [output for _, output in self._outputs]
        return dtype_name(outputs[0].dtype) if len(outputs) == 1 and not self._beside else None

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that `free` would release now."""
        return sum(buffer.nbytes for buffer, _ in self._outputs) + sum(storage.nbytes() for storage, _ in self._beside)

    @torch.no_grad()
    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Ask the extension for the tensors to send, and start to all-gather them. `exactly` has no effect."""
        inputs, metadata = self._ask()
        if not self._outputs:
            self._outputs = [self._output(tensor) for tensor in inputs]
        works = [
            buffer.gather(tensor.reshape(-1).view(torch.uint8), tag=tag)
            for (buffer, _), tensor in zip(self._outputs, inputs, strict=True)
        ]
        return WorkOf(partial(self._wait, works, metadata))

    def _ask(self) -> tuple[list[torch.Tensor], Any]:
        rows: Any = self.rows
        options = (self._shape, self._stride, self._slot.owners[0][0], self._policy) if self._takes_options else ()
        inputs, metadata = rows.fsdp_pre_all_gather(self._shard_mesh, *options)
        return ([inputs] if isinstance(inputs, torch.Tensor) else list(inputs)), metadata

    def _output(self, tensor: torch.Tensor) -> tuple[FullBuffer, torch.Tensor]:
        """Allocate the buffer for the gathered form of `tensor`, and return it with the extension's view of it."""
        nbytes = tensor.nbytes * self._mesh.shard_size
        buffer = self._mesh.gather.full_buffer(nbytes, torch.uint8, self._mesh.device, holds_main=False)
        output = buffer.full.view(tensor.dtype).view(-1, *tensor.shape[1:])
        if tensor.shape[:1] == self.rows.shape[:1]:
            output = output[: self._shape[0]]  # without padding rows
        return buffer, output

    @torch.no_grad()
    def _wait(self, works: list[Work], metadata: Any) -> torch.Tensor:
        for work in works:
            work.wait()
        rows: Any = self.rows
        outputs = tuple(output for _, output in self._outputs)
        if not hasattr(self, "unsharded"):
            made, inner = rows.fsdp_post_all_gather(outputs, metadata, self._dtype)
            whole = torch.as_strided(made, self._shape, self._stride, storage_offset=0)
            self.unsharded = nn.Parameter(whole, requires_grad=self._slot.parameter.requires_grad)
            own = {torch_private.storage_id(buffer.full.untyped_storage()) for buffer, _ in self._outputs}
            storages = {torch_private.storage_id(s): s for s in (tensor.untyped_storage() for tensor in inner)}
            self._beside = [(storage, storage.nbytes()) for key, storage in storages.items() if key not in own]
            self.storage_ids = frozenset(own | storages.keys())
            return self.unsharded
        for storage, nbytes in self._beside:
            if storage.nbytes() != nbytes:  # otherwise the memory would move
                storage.resize_(nbytes)
        # Autograd may have saved views, and must not count a refill as a change.
        version = self.unsharded._version
        rows.fsdp_post_all_gather(outputs, metadata, self._dtype, out=self.unsharded)
        torch_private.set_versions((self.unsharded,), (version,))
        return self.unsharded

    def free(self, *, keeps_memory: bool = False) -> None:
        """Free the gathered tensors and others that the extension has allocated, unless `keeps_memory` is set."""
        for buffer, _ in self._outputs:
            buffer.free(keeps_memory=keeps_memory)
        for storage, _ in self._beside if not keeps_memory else ():
            storage.resize_(0)

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads this memory any more, as `FullBuffer.wait_for_readers` does."""
        for buffer, _ in self._outputs:
            buffer.wait_for_readers()


def new_rows(extended: torch.Tensor, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Create a tensor of an extended parameter's class with the given shape, filled with zeros."""
    rows = extended.detach().new_zeros(shape, device=device)
    if type(rows) is not type(extended.detach()):
        raise LifecycleError(
            f"{type(extended).__name__}.new_zeros returns a {type(rows).__name__}, expected the same type",
            hint="handle new_zeros in the __torch_dispatch__ of the subclass, as torch's fully_shard also requires",
        )
    return rows


def _shard_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the shard axis of the mesh as a torch `DeviceMesh`, which extensions use for their own reductions."""
    kind = mesh.device.type
    if mesh.shard_group is not None:
        return DeviceMesh.from_group(mesh.shard_group, kind)
    if not dist.is_initialized():
        return mesh.device_mesh
    return init_device_mesh(kind, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))["shard"]
