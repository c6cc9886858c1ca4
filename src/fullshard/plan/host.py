"""Costs of an accelerator's host: the time to issue a step, which virtual time also uses, and pinned memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Assumed costs of the host in seconds, for PyTorch's eager mode: Python, the dispatcher, autograd and the driver.

    Attributes:
        launch: issuing one operation that has a kernel.
        view: issuing one operation that has no kernel.
        collective: launching one collective.
        message: a message between hosts that all ranks wait for, multiplied by the logarithm to base 2 of their number.
    """

    launch: float = 8e-6
    view: float = 2e-6
    collective: float = 25e-6
    message: float = 30e-6

    def seconds(self, kernels: float, views: float) -> float:
        """Return the seconds that the host needs to issue some operations with kernels, and some views without."""
        return kernels * self.launch + views * self.view


def page_locked_nbytes(nbytes: int) -> int:
    """Return the host memory that one page-locked buffer of `nbytes` takes.

    Torch rounds up to a power of two (`CachingHostAllocatorImpl::allocate` in its ATen/core/CachingHostAllocator.h):
    1.25 GiB took 2.00 GiB on an H200. From 2.13 on, it does not round sizes above
    `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N`. This function does not read that variable.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def many_page_locked_nbytes(nbytes: int) -> int:
    """Return the host memory that many page-locked buffers of `nbytes` in total take.

    Their sizes are unknown, so assume that the logarithms are evenly distributed. Each buffer with a size between 1 and
    2 takes 2, and the mean of these sizes is 1 / ln 2.
    """
    return round(nbytes * 2 * math.log(2))
