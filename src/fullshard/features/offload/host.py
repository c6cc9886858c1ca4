"""Host memory for data that is offloaded from a device, and copies in both directions.

    to the device    compute shards for a unit's all-gather, which are copied on a separate stream as soon as the
                     all-gather is issued, and activations, which are copied one unit ahead of backward (`pages`)
    to the host      reduced gradients, which are copied on another stream while backward continues, and activations,
                     which are copied during forward

The engine waits for a copy only where its result is used. The `wait` of an all-gather makes the compute stream wait.
The `wait` of a gradient blocks the host, because any code may read the resulting plain tensor. `settle` waits for
copies that still read host memory. Without streams, each copy is complete when the call returns; the rest is the same.

On a CPU, host and device are the same and nothing is moved, except in a rehearsal. In a rehearsal, "the host" is a
separate allocation on the CPU, and copies and events are the same as for any other device.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import Work, WorkOf
from fullshard.comm.device import has_streams
from fullshard.engine.sharded_tensor import ShardedTensor

LEAVING = 1
"""Maximum number of gradients that are on their way to the host. If there are more, computation waits for the oldest
one, which limits the device memory that they use."""


class Host:
    """Allocates host memory for data of one device, and copies tensors between host and device.

    Args:
        device: the compute device. With a CPU or the meta device, copies are synchronous.
        pins: whether to page-lock buffers.
        overlaps: whether copies overlap with computation.
    """

    def __init__(self, device: torch.device, *, pins: bool, overlaps: bool) -> None:
        self._device = device
        self._place = torch.device("meta" if device.type == "meta" else "cpu")
        self._has_streams = has_streams(device)
        self._pins = pins and self._has_streams
        self._to_device, self._to_host = (
            torch.Stream(device) if overlaps and self._has_streams else None for _ in ("to device", "to host")
        )
        self._reading: torch.Event | None = None
        self._leaving: deque[_Leaving] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of shape (numel,) in host memory."""
        return torch.empty(numel, dtype=dtype, device=self._place, pin_memory=self._pins)

    def copying_to_device(self) -> AbstractContextManager[object]:
        """Launch the copies inside the block on a separate stream. It first waits for all computation launched so far.

        Memory allocated in the block belongs to the copy stream. Its owner must make the compute stream wait for the
        copies before it frees the memory. The wait at the beginning of the block ensures that memory in use is not
        overwritten.
        """
        return self._beside(self._to_device)

    def arriving(self, work: Work) -> Work:
        """Return `work` with a `wait` that also waits for the copies launched inside `copying_to_device`."""
        if self._to_device is not None:
            self._reading = self._to_device.record_event()
            copied = Copied(self._reading, self._device)

            def wait() -> torch.Tensor:
                copied.wait()
                return work.wait()

            return WorkOf(wait)
        if self._has_streams:  # even then, page-locked memory is read asynchronously
            self._reading = torch.accelerator.current_stream(self._device).record_event()
        return work

    def send(self, work: Work) -> Work:
        """Start to copy the result of `work` to the host, and return work that waits for the copy."""
        with self._beside(self._to_host):
            tensor = work.wait()
            home = self.empty(tensor.numel(), tensor.dtype)
            home.copy_(tensor, non_blocking=self._to_host is not None)
        # Recorded outside the stream's context, but still directly after the copy.
        leaving = _Leaving(home, None if self._to_host is None else tensor, self._copied(self._to_host))
        self._leaving.append(leaving)
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().release()  # otherwise every gradient would stay on the device until the end
        return leaving

    @property
    def is_here(self) -> bool:
        """Return whether host and device have the same type, so that a tensor's device does not show where it is."""
        return self._place.type == self._device.type

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return tensor.device.type == self._place.type

    def copy_of(self, flat: torch.Tensor, *, to_host: bool) -> torch.Tensor:
        """Copy a 1-D tensor to the host or device on the compute stream. Do not read a host copy before `finish`."""
        return self._like(flat, on_host=to_host).copy_(flat, non_blocking=self._pins)

    def copies(self, tensors: Sequence[torch.Tensor], *, to_host: bool) -> tuple[list[torch.Tensor], Copied]:
        """Copy 1-D tensors on a separate stream. Wait for the handle before you read the copies or free the sources."""
        stream = self._to_host if to_host else self._to_device
        with self._beside(stream):
            made = [self._like(tensor, on_host=to_host) for tensor in tensors]
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor, non_blocking=stream is not None)
        return made, self._copied(stream)

    def _copied(self, stream: torch.Stream | None) -> Copied:
        """Return a handle that waits for all work launched on a stream so far."""
        return Copied(None if stream is None else stream.record_event(), self._device)

    def _like(self, flat: torch.Tensor, *, on_host: bool) -> torch.Tensor:
        if on_host:
            return self.empty(flat.numel(), flat.dtype)
        return torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all copies to the host that `copy_of` has launched are complete."""
        if self._pins:
            torch.accelerator.current_stream(self._device).synchronize()

    def settle(self) -> None:
        """Wait until no all-gather reads host memory any more, so that the caller may change it."""
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def _beside(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return contextlib.nullcontext()
        # The source may still be computed, and the target may still be read.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        return stream


@functools.cache
def host_of(device: torch.device, *, pins: bool, overlaps: bool) -> Host:
    """Return the `Host` that all models on `device` share."""
    return Host(device, pins=pins, overlaps=overlaps)


@dataclass(frozen=True, slots=True)
class StorageView:
    """Describes a tensor within its storage, so that the tensor can be rebuilt from another storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Return a description of `tensor` within its storage."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def of_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that this describes as a view of another storage, which can be on any device."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def show_in(views: Iterable[tuple[torch.Tensor, StorageView]], storage: torch.UntypedStorage) -> None:
    """Make each tensor the view of `storage` that belongs to it. The tensors keep their identity."""
    for tensor, view in views:
        put(tensor, view.of_storage(storage))


def put(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Make `tensor` hold `data`, which may be on another device. Return the data to put to undo this."""
    if torch_private.may_hold(tensor, data):
        before, tensor.data = tensor.data, data
        return before
    # For out-of-tree devices. To undo it, swap again: only the swapped tensor counts changes together with its views.
    version = tensor._version
    torch.utils.swap_tensors(tensor, data)
    if tensor._version < version:  # setting it makes the tensor count changes apart from its views
        torch_private.set_versions((tensor,), (version,))
    return data


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a state value, also of tensor subclasses, but no scalars such as step counts."""
    if isinstance(value, ShardedTensor):
        yield value.local
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.dim():
        yield value


@dataclass(frozen=True, slots=True)
class Copied:
    """A handle that waits for a copy."""

    event: torch.Event | None
    device: torch.device

    def wait(self) -> None:
        """Make the current stream wait for the copy. This does not block the host."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


@dataclass(slots=True)
class _Leaving:
    """A tensor that is being copied to the host."""

    home: torch.Tensor
    tensor: torch.Tensor | None
    copied: Copied

    def release(self) -> None:
        """Make later computation wait for the copy, and release the tensor's device memory."""
        if self.tensor is not None:
            self.copied.wait()
        self.tensor = None

    def wait(self) -> torch.Tensor:
        """Block the host until the copy is complete, and return the tensor on the host."""
        self.release()
        if self.copied.event is not None:
            self.copied.event.synchronize()
        return self.home
