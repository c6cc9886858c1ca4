"""Host memory that a state is copied into before it is written in the background."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Kind of file -> name -> tensor."""


class HostMemory:
    """Copies of tensors in one block per state, which is kept: the pages of a new one cost more than the copy."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: this rank's share of what was saved."""
        return sum(block.numel() for block in self._blocks)

    def reuse(self) -> None:
        """Declare all copies unused."""
        self._used = 0

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
        """The same tensors, contiguous in a block of their own."""
        flat = [(kind, name, tensor) for kind, named in tensors.items() for name, tensor in named.items()]
        is_remote = any(tensor.device.type != "cpu" for _, _, tensor in flat)
        block = self._take(sum(_aligned(tensor.nbytes) for _, _, tensor in flat), pinned=is_remote)
        copies: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in tensors}
        at = 0
        for kind, name, tensor in flat:
            copy = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            copies[kind][name] = copy
            at += _aligned(tensor.nbytes)
        if is_remote:
            torch.accelerator.synchronize()
        return copies

    def _take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if self._used == len(self._blocks):
            self._blocks.append(torch.empty(0, dtype=torch.uint8))
        if self._blocks[self._used].numel() < nbytes:
            # Let go of the old block first, so that never both are held.
            self._blocks[self._used] = torch.empty(0, dtype=torch.uint8)
            self._blocks[self._used] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used += 1
        return self._blocks[self._used - 1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
