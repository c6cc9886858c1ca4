"""Host memory next to a device: its buffers, and copies between host and device in both directions.

    to the device    compute shards for a unit's all-gather, copied on a separate stream as soon as the all-gather is
                     issued, and activations, one unit ahead of backward (`pages`)
    to the host      reduced gradients, copied on another stream while backward continues, and activations, during
                     forward

Each copy is waited for where its result is used. The `wait` of an all-gather makes the compute stream wait. The `wait`
of a gradient blocks the host, because any code may read the resulting plain tensor. `settle` waits for copies that
still read host memory. Without streams each copy is complete when the call returns, and nothing else changes.

On a CPU, host and device are the same and nothing is moved, except in a rehearsal. "The host" is then a separate
allocation, and copies and events are the same as for any other device.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from fullshard.comm.base import Work, WorkOf
from fullshard.comm.device import has_streams

LEAVING = 1
"""Maximum number of gradients in flight to the host before computation waits for the oldest; it bounds their memory."""


class Host:
    """Host memory for one device, and the copies between the two.

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
        """Return uninitialised host memory of shape (numel,)."""
        return torch.empty(numel, dtype=dtype, device=self._place, pin_memory=self._pins)

    def copying_to_device(self) -> AbstractContextManager[object]:
        """Enqueue copies inside the block on a separate stream, after all computation launched so far.

        Memory allocated inside belongs to the copy stream. Its owner must make the compute stream use it before freeing
        it, and it must not be reused earlier than that; the wait at the beginning ensures this.
        """
        return self._beside(self._to_device)

    def arriving(self, work: Work) -> Work:
        """Return `work`, launched inside `copying_to_device`, with a wait that includes the copies."""
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
        """Copy the result of `work` from the device to the host as soon as it is available."""
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
        """Return whether host and device have the same type, so that a tensor does not show where it is."""
        return self._place.type == self._device.type

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return tensor.device.type == self._place.type

    def copy_of(self, flat: torch.Tensor, *, to_host: bool) -> torch.Tensor:
        """Copy a 1-D tensor to the other side on the compute stream; host copies are complete after `finish`."""
        return self._like(flat, on_host=to_host).copy_(flat, non_blocking=self._pins)

    def copies(self, tensors: Sequence[torch.Tensor], *, to_host: bool) -> tuple[list[torch.Tensor], Copied]:
        """Copy 1-D tensors to the other side on a separate stream, after all computation launched so far.

        Wait before you read the copies or free the source tensors.
        """
        stream = self._to_host if to_host else self._to_device
        with self._beside(stream):
            made = [self._like(tensor, on_host=to_host) for tensor in tensors]
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor, non_blocking=stream is not None)
        return made, self._copied(stream)

    def _copied(self, stream: torch.Stream | None) -> Copied:
        """Return a handle to wait for all work launched on a stream so far."""
        return Copied(None if stream is None else stream.record_event(), self._device)

    def _like(self, flat: torch.Tensor, *, on_host: bool) -> torch.Tensor:
        if on_host:
            return self.empty(flat.numel(), flat.dtype)
        return torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all copies made by `copy_of` are complete."""
        if self._pins:
            torch.accelerator.current_stream(self._device).synchronize()

    def settle(self) -> None:
        """Wait until no gather reads host memory, so that it may change at any time."""
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
    """Return the `Host` shared by all models that compute on `device`."""
    return Host(device, pins=pins, overlaps=overlaps)


@dataclass(frozen=True, slots=True)
class StorageView:
    """The layout needed to rebuild a tensor from its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Return the layout of `tensor` in its storage."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def of_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with the same layout in another storage, on any device."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True)
class Copied:
    """A handle to wait for the end of a copy."""

    event: torch.Event | None
    device: torch.device

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


@dataclass(slots=True)
class _Leaving:
    """A tensor that is being copied to the host."""

    home: torch.Tensor
    tensor: torch.Tensor | None
    copied: Copied

    def release(self) -> None:
        """Let later computation reuse the tensor's device memory once the copy is complete."""
        if self.tensor is not None:
            self.copied.wait()
        self.tensor = None

    def wait(self) -> torch.Tensor:
        """Block until the tensor is on the host."""
        self.release()
        if self.copied.event is not None:
            self.copied.event.synchronize()
        return self.home
