"""Host memory into which a state is copied before it is written in the background."""

from collections.abc import Mapping

import torch

from fullshard.core.sizes import round_up

_ALIGNMENT = 64
"""In bytes: a cache line, which is a multiple of the size of every dtype."""


class HostMemory:
    """Host memory for copies of tensors, one block per saved state. Blocks are reused, because allocation is slow."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._used: list[torch.Tensor] = []

    def reuse(self) -> None:
        """Discard all copies, so that later copies can reuse their blocks."""
        self._free += self._used
        self._used.clear()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Copy tensors into one block, and return the copies. Both are grouped by kind of file and keyed by name."""
        flat = [tensor for named in tensors.values() for tensor in named.values()]
        is_remote = any(tensor.device.type != "cpu" for tensor in flat)
        block, at = self._take(sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in flat), pinned=is_remote), 0
        copies: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in tensors}
        for kind, named in tensors.items():
            for name, tensor in named.items():
                copy = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[kind][name] = copy.copy_(tensor, non_blocking=True)
                at += round_up(tensor.nbytes, _ALIGNMENT)
        if is_remote:
            torch.accelerator.synchronize()
        return copies

    def _take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        fitting = (i for i, block in enumerate(self._free) if block.numel() >= nbytes and block.is_pinned() == pinned)
        if (index := next(fitting, None)) is not None:
            block = self._free.pop(index)
        else:
            del self._free[:1]  # drop a block that is too small, so that both never exist at the same time
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used.append(block)
        return block
