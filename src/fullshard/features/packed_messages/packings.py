"""Messages with fewer bytes than their numbers have: rounded for the transfer, on purpose and by request only.

| packing | bytes per element | largest error of an element |
|---|---|---|
| bfloat16 | 2 | 2^-8 of itself |
| int8 | 1 + 4/256 | 1/254 of the largest magnitude in its block of 256 |

The receiver adds up in the dtype that gradients have anyway, so roundings do not add up over a sum's terms.
A block with an element that is not finite arrives without a finite one, so that an overflow is still noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fullshard.comm.base import Packing
from fullshard.core.sizes import PACKED_BLOCK_NUMEL as BLOCK_NUMEL
from fullshard.core.sizes import packed_nbytes, round_up

_CHUNK_BLOCKS = 512
"""Blocks that are packed in one go: few enough to stay in the cache."""
_LARGEST = 127
_SMALLEST = torch.finfo(torch.float32).tiny
"""Scale: one over less would be infinite. Blocks of magnitudes below 127 times that, 1.5e-36, are off by more."""


class _Bfloat16(Packing):
    """The upper half of each float32, rounded."""

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 2)

    @torch.no_grad()
    def pack(self, values: torch.Tensor, into: torch.Tensor) -> None:
        into[: 2 * values.numel()].view(torch.bfloat16).copy_(values)

    @torch.no_grad()
    def unpack(self, message: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(message[: 2 * into.numel()].view(torch.bfloat16))


class _Int8Blocks(Packing):
    """Each block of elements as multiples, -127 to 127, of a scale in float32. All multiples first, then all scales."""

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 1)

    def _chunks(self, message: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (which elements, their multiples, the scales of their blocks), shapes (blocks, n) and (blocks, 1)."""
        multiples = message[:numel].view(torch.int8)
        start = round_up(numel, 16)
        scales = message[start : start + 4 * -(-numel // BLOCK_NUMEL)].view(torch.float32).unsqueeze(1)
        whole = numel // BLOCK_NUMEL
        step = _CHUNK_BLOCKS if message.device.type == "cpu" else max(1, whole)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            elements = slice(first * BLOCK_NUMEL, last * BLOCK_NUMEL)
            yield elements, multiples[elements].view(last - first, -1), scales[first:last]
        if numel % BLOCK_NUMEL:
            elements = slice(whole * BLOCK_NUMEL, numel)
            yield elements, multiples[elements].view(1, -1), scales[whole:]

    @torch.no_grad()
    def pack(self, values: torch.Tensor, into: torch.Tensor) -> None:
        # Room that is used again: the system would return, and clear, new memory for every chunk.
        room = torch.empty(0, dtype=torch.float32, device=into.device)
        for elements, multiples, scales in self._chunks(into, values.numel()):
            blocks = values[elements].float().view(multiples.shape)
            room.resize_(multiples.shape)
            torch.amax(torch.abs(blocks, out=room), 1, keepdim=True, out=scales).div_(_LARGEST).clamp_(min=_SMALLEST)
            multiples.copy_(torch.mul(blocks, scales.reciprocal(), out=room).round_())

    @torch.no_grad()
    def unpack(self, message: torch.Tensor, into: torch.Tensor) -> None:
        room = torch.empty(0, dtype=torch.float32, device=message.device)
        for elements, multiples, scales in self._chunks(message, into.numel()):
            blocks = into[elements].view(multiples.shape)
            if blocks.dtype is torch.float32:
                blocks.copy_(multiples).mul_(scales)
            else:
                blocks.copy_(room.resize_(multiples.shape).copy_(multiples).mul_(scales))


PACKINGS: dict[torch.dtype, Packing] = {torch.bfloat16: _Bfloat16(), torch.int8: _Int8Blocks()}
