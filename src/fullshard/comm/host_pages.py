"""The engine's questions about host memory, beside collectives: all that the engine knows of CPUs.

On a CPU the first touch of a page costs as much as copying it three times, and the ranks of one host can read one
another's pages. `comm.cpu` makes use of both; no other module knows whether it runs on a CPU.
"""

from __future__ import annotations

import torch


class HostPages:
    """Hooks for handling pages of host memory; these do nothing, because an accelerator's allocator needs no help.

    Attributes:
        widens: whether `reduce_scatter` sums in a wider dtype than that of `full` without a copy.
        placed: how many buffers have been given a place where ranks look for one another's. Each rank assigns places
            by itself, so a rank that has assigned fewer, because it failed to shard a model, finds no other's any more.
    """

    widens: bool = False
    placed: int = 0

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory, shape (numel,), from which `reduce_scatter` is fastest."""
        return torch.empty(numel, dtype=dtype, device=device)

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads what this rank has freed: main weights may change after that."""
