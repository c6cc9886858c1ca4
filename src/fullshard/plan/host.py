"""The host of an accelerator: its time to issue a step, the same in virtual time, and its page-locked memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host, assumed: PyTorch's eager mode in Python, the dispatcher, autograd and the driver.

    Attributes:
        launch: of an operation with a kernel.
        view: of one without.
        collective: of launching one.
        message: of a message between hosts that all ranks wait for, per doubling of their number.
    """

    launch: float = 8e-6
    view: float = 2e-6
    collective: float = 25e-6
    message: float = 30e-6

    def seconds(self, kernels: float, views: float) -> float:
        """Return the seconds of that many operations with a kernel, and without."""
        return kernels * self.launch + views * self.view


def page_locked_nbytes(nbytes: int) -> int:
    """Return the host memory that one page-locked buffer of `nbytes` takes.

    Torch rounds up to a power of two (`CachingHostAllocatorImpl::allocate` in its ATen/core/CachingHostAllocator.h):
    1.25 GiB took 2.00 GiB on an H200. From 2.13 on it does not round above
    `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N`, which this function does not read.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def many_page_locked_nbytes(nbytes: int) -> int:
    """Return the same for many buffers, `nbytes` in all, of unknown sizes whose logarithms are spread evenly.

    Every buffer of a size between 1 and 2 takes 2, and the mean of those sizes is 1 / ln 2.
    """
    return round(nbytes * 2 * math.log(2))
