"""The costs of an accelerator's host: the time it takes to issue a step, and the size of pinned memory."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The assumed costs of issuing work from the host in PyTorch's eager mode, in seconds."""

    launch: float = 8e-6  # issuing one operation that launches a kernel
    view: float = 2e-6  # issuing one operation that launches no kernel, such as a reshape
    collective: float = 25e-6  # launching one collective
    message: float = 30e-6  # a message between hosts that all ranks wait for, times log2 of the number of ranks

    def seconds(self, kernels: float, views: float) -> float:
        """Return the seconds that the host needs to issue operations that launch kernels, and views that do not."""
        return kernels * self.launch + views * self.view


def page_locked_nbytes(nbytes: int) -> int:
    """Return the host memory that one page-locked buffer of `nbytes` takes.

    PyTorch rounds the size up to a power of two (`CachingHostAllocatorImpl::allocate` in
    ATen/core/CachingHostAllocator.h): a buffer of 1.25 GiB took 2.00 GiB on an H200. Since PyTorch 2.13, it does not
    round sizes above the value set with `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N`. This function does not
    read that variable.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def many_page_locked_nbytes(nbytes: int) -> int:
    """Estimate the host memory taken by many page-locked buffers that hold `nbytes` in total.

    The sizes of the buffers are unknown, so the estimate assumes that their logarithms are uniformly distributed. Each
    buffer with a size between 1 and 2 is rounded up to 2, and the mean of these sizes is 1 / ln 2.
    """
    return round(nbytes * 2 * math.log(2))
