"""Host memory beside a device: the buffers there, and the two ways between host and device.

    to the device    compute shards for a unit's gather, on a stream of their own, as early as that is issued; and
                     activations, one unit ahead of backward (`pages`)
    to the host      reduced gradients, on another stream, while backward goes on; and activations, during forward

Each copy is waited for where its result is used: a gather's `wait` has the computing stream wait, a gradient's blocks
the host, because ordinary tensors follow there that any code may read. `settle` waits for copies that still read
host memory. Without streams each copy is over when the call returns, and nothing else is different.

On a CPU, device and host are one and nothing is moved, except in a rehearsal: "the host" is then further memory, and
copies and events are the same as for any other device.
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
"""Gradients that may be on their way to the host before computing waits for the oldest; bounds their memory."""


class Host:
    """Host memory beside one device, and the copies to and from it.

    Args:
        device: the one that computes. With a CPU, or the meta device, copies are plain ones.
        pins: whether to page-lock buffers.
        overlaps: whether to copy beside computing.
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
        """Return uninitialised host memory, shape (numel,)."""
        return torch.empty(numel, dtype=dtype, device=self._place, pin_memory=self._pins)

    def copying_to_device(self) -> AbstractContextManager[object]:
        """Launch copies inside beside computing, after everything that computing has launched so far.

        Memory allocated inside belongs to the copying stream. Its owner has the computing stream use it before freeing
        it, so it must not be used again before that; the wait at the beginning ensures this.
        """
        return self._beside(self._to_device)

    def arriving(self, work: Work) -> Work:
        """Return `work`, launched inside `copying_to_device`, so that waiting for it waits for the copies too."""
        if self._to_device is not None:
            self._reading = self._to_device.record_event()
            copied = Copied(self._reading, self._device)

            def wait() -> torch.Tensor:
                copied.wait()
                return work.wait()

            return WorkOf(wait)
        if self._has_streams:  # page-locked memory is read late even so
            self._reading = torch.accelerator.current_stream(self._device).record_event()
        return work

    def send(self, work: Work) -> Work:
        """Copy the result of `work`, a tensor on the device, to the host as soon as the result exists."""
        with self._beside(self._to_host):
            tensor = work.wait()
            home = self.empty(tensor.numel(), tensor.dtype)
            home.copy_(tensor, non_blocking=self._to_host is not None)
        # Outside the stream's context: recorded after the copy, and nothing else is launched there in between.
        leaving = _Leaving(home, None if self._to_host is None else tensor, self._copied(self._to_host))
        self._leaving.append(leaving)
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().release()  # otherwise every gradient would stay on the device until the end
        return leaving

    @property
    def is_here(self) -> bool:
        """Return whether host and device are of one kind, so that a tensor does not show where it is."""
        return self._place.type == self._device.type

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return tensor.device.type == self._place.type

    def copy_of(self, flat: torch.Tensor, *, to_host: bool) -> torch.Tensor:
        """Copy a 1-D tensor to the other side, in the computing stream; on the host it is ready after `finish`."""
        return self._like(flat, on_host=to_host).copy_(flat, non_blocking=self._pins)

    def copies(self, tensors: Sequence[torch.Tensor], *, to_host: bool) -> tuple[list[torch.Tensor], Copied]:
        """Copy 1-D tensors to the other side beside computing, after everything that computing has launched.

        Wait before reading the copies, or freeing the tensors they are made of.
        """
        stream = self._to_host if to_host else self._to_device
        with self._beside(stream):
            made = [self._like(tensor, on_host=to_host) for tensor in tensors]
            for copy, tensor in zip(made, tensors, strict=True):
                copy.copy_(tensor, non_blocking=stream is not None)
        return made, self._copied(stream)

    def _copied(self, stream: torch.Stream | None) -> Copied:
        """Return the end of everything launched on a stream so far."""
        return Copied(None if stream is None else stream.record_event(), self._device)

    def _like(self, flat: torch.Tensor, *, on_host: bool) -> torch.Tensor:
        if on_host:
            return self.empty(flat.numel(), flat.dtype)
        return torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all copies made by `copy_of` are there."""
        if self._pins:
            torch.accelerator.current_stream(self._device).synchronize()

    def settle(self) -> None:
        """Wait until no gather reads host memory: after that, it may change at any time."""
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def _beside(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return contextlib.nullcontext()
        # The source may just have been computed, and the target may still be read.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        return stream


@functools.cache
def host_of(device: torch.device, *, pins: bool, overlaps: bool) -> Host:
    """Return the host of all models that compute on `device`."""
    return Host(device, pins=pins, overlaps=overlaps)


@dataclass(frozen=True, slots=True)
class StorageView:
    """Say how to rebuild a tensor from its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Return the recipe that makes `tensor` of its storage."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def of_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Make the same tensor of another storage, on any device."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True)
class Copied:
    """The end of a copy that may be under way."""

    event: torch.Event | None
    device: torch.device

    def wait(self) -> None:
        """Have the current stream wait for the copy."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


@dataclass(slots=True)
class _Leaving:
    """A tensor on its way to the host."""

    home: torch.Tensor
    tensor: torch.Tensor | None
    copied: Copied

    def release(self) -> None:
        """Let what computes after the copy use the device's memory again."""
        if self.tensor is not None:
            self.copied.wait()
        self.tensor = None

    def wait(self) -> torch.Tensor:
        """Block until the tensor is on the host."""
        self.release()
        if self.copied.event is not None:
            self.copied.event.synchronize()
        return self.home
