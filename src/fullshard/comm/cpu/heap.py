"""Gives free pages of the allocator's heap back to the system in the course of a step.

Activations and reduced gradients take turns: one goes as the other comes. But the allocator seldom has room for a
gradient of many MiB where activations were, because what lives longer, optimizer state and the odd small block, lies
between them. So a heap grows to hold both, full of holes. Whole pages of these holes are given back, every so many
bytes of new gradients and before a very long one, and are mapped again when they are used.

And tensors of some MiB get pages of their own, which are gone when the tensor is: glibc would do so only above 32 MiB
once it has seen tensors that large come and go.

That takes time, about half a millisecond per MiB, and so is only done where it matters: not in small models, and not
while the process is smaller than it has been before, as most of a backward is that begins with many activations. The
holes it leaves are mostly filled by the next forward. What is not, is given back before the forward's last unit: the
logits that follow are often the most there is of a step, and holes beside them would make that more with each step.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path

import torch

from fullshard.comm.host_pages import HostPages
from fullshard.config.switches import HEAP

TRIM_NBYTES = 2**26
"""Between one time and the next, of what was newly allocated."""
OWN_PAGES_NBYTES = 2**21
"""Tensors of so many bytes or more do not go into the heap. Less would save more memory, and take more time."""
_M_MMAP_THRESHOLD = -3
"""From malloc.h."""
_NOW, _MOST = "VmRSS", "VmHWM"
"""Resident memory now, and the most there ever was."""


class Heap:
    """This process's heap, where its C library is glibc; elsewhere nothing happens.

    Made as the first model is sharded or quantised, from when on it counts what a forward makes the process larger by.
    """

    def __init__(self) -> None:
        is_wanted = HEAP.read() != "keep"
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None) if is_wanted else None
        self._set_option = library.mallopt if self._trim is not None else None
        self._grown = 0
        self._full_nbytes = _resident_nbytes() if self._trim is not None else 0

    def note(self, nbytes: int) -> None:
        """A gradient of `nbytes` bytes was allocated."""
        self._grown += nbytes
        if self._grown >= TRIM_NBYTES:
            self._grown = 0
            if is_at_peak(TRIM_NBYTES):
                self.trim()

    def begin_last_unit(self) -> None:
        """The last unit of a forward is about to run: give back what a forward did not fill, if that may be much."""
        if self._trim is None:
            return
        if _resident_nbytes() >= self._full_nbytes + TRIM_NBYTES:
            self.trim()
            self._full_nbytes = _resident_nbytes()

    def trim(self) -> None:
        """Give back whole free pages."""
        if self._set_option is not None:
            self._set_option(_M_MMAP_THRESHOLD, OWN_PAGES_NBYTES)
            self._set_option = None
        if self._trim is not None:
            self._trim(ctypes.c_size_t(0))


def is_at_peak(nbytes: int) -> bool:
    """Whether `nbytes` more would make this process's resident memory larger than it ever was; True if not known."""
    resident = _resident()
    return not resident or resident[_NOW] + nbytes > resident[_MOST]


def _resident_nbytes() -> int:
    """Bytes of resident memory; 0 where the system does not say. Asked where the answer is short: every step does."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # by `pathlib` it takes several times as long
        try:
            return int(os.read(file, 256).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(file)
    except OSError:  # not Linux
        return 0


def _resident() -> dict[str, int]:
    """Bytes of resident memory, `_NOW` and `_MOST`; empty where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: 1024 * int(fields[name].split()[0]) for name in (_NOW, _MOST)}
    except (OSError, KeyError):  # not Linux
        return {}


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def allocated_nbytes() -> int | None:
    """Bytes that the C library has handed out and not got back, in its heaps and in pages of their own.

    None where it does not say: glibc does since 2.33.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Allocated
    found = ask()
    return int(found.uordblks + found.hblkhd)


@functools.cache
def heap() -> Heap:
    """The one of this process."""
    return Heap()


class CpuPages(HostPages):
    """What a CPU does about pages of its memory, whether ranks share them or not: the allocator's heap."""

    are_dear = True

    def begin_training(self) -> None:
        """The heap is as full as it was before; what it grows by from here on counts."""
        heap()

    def begin_last_unit(self) -> None:
        """Give back what the forward did not fill."""
        heap().begin_last_unit()


def pages_of(device: torch.device) -> HostPages:
    """Those of a rank that shares none with others."""
    return CpuPages() if device.type == "cpu" else HostPages()
