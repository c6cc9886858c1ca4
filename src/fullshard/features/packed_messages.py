"""Collectives that round values and send them in fewer bytes. They are used only if the user asks for them.

| packing | bytes per element | largest error of an element |
|---|---|---|
| bfloat16 | 2 | 2^-8 of its value |
| int8 | 1 + 4/256 | 1/254 of the largest magnitude in its block of 256 |

The receiver adds up the values in the usual dtype of gradients, so each value is rounded only once, when it is packed.
If one element of a block is not finite, the complete block arrives non-finite, so an overflow is still detected.
"""

from collections.abc import Iterator

import torch

from fullshard.comm.base import Collectives, Packing, Reduction, SplitSizes, Work, WorkOf, own_interval
from fullshard.core.sizes import PACKED_BLOCK_NUMEL as BLOCK_NUMEL
from fullshard.core.sizes import packed_nbytes, round_up

_CHUNK_BLOCKS = 512
"""Number of blocks packed at a time, chosen so that they stay in the cache."""
_LARGEST = 127
_SMALLEST = torch.finfo(torch.float32).tiny
"""Scale: one over less would be infinite. Blocks of magnitudes below 127 times that, 1.5e-36, are off by more."""


class _Packed(Packing):
    """Base class of packings. It runs the collectives; subclasses pack and unpack the messages."""

    def gather(self, collectives: Collectives, full: torch.Tensor, main: torch.Tensor, *, tag: int) -> Work:
        rank, size = collectives.rank, collectives.size
        messages = torch.empty(size * self.nbytes(main.numel()), dtype=torch.uint8, device=full.device)
        self.pack(main, own_interval(messages, rank, size))
        arriving = [collectives.all_gather(messages, tag=tag)]

        def wait() -> torch.Tensor:
            """Wait for the messages, and unpack all of them on the first call."""
            while arriving:
                messages = arriving.pop().wait()
                for source in range(size):
                    self.unpack(own_interval(messages, source, size), own_interval(full, source, size))
            return full

        return WorkOf(wait)

    def reduce(self, collectives: Collectives, full: torch.Tensor, how: Reduction) -> Work:
        rank, size = collectives.rank, collectives.size
        own = own_interval(full, rank, size).clone()  # does not keep `full` alive
        sizes = [self.nbytes(own.numel())] * size
        leaving = torch.empty(sum(sizes), dtype=torch.uint8, device=full.device)
        for to in range(size):
            if to != rank:
                self.pack(own_interval(full, to, size), own_interval(leaving, to, size))
        exchange = collectives.exchange(leaving, torch.empty_like(leaving), SplitSizes(sizes, sizes), tag=how.tag)

        def wait() -> torch.Tensor:
            """Wait for the messages, unpack them, and return the reduced interval. Terms are added in rank order."""
            arriving = exchange.wait()
            total, term = torch.zeros_like(own), torch.empty_like(own)
            for source in range(size):
                if source != rank:
                    self.unpack(own_interval(arriving, source, size), term)
                total.add_(own if source == rank else term)
            total.div_(how.divisor)
            if how.inspector is not None:
                how.inspector(total, {rank: own})
            return total

        return WorkOf(wait)


class _Bfloat16(_Packed):
    """The packing that sends each float32 value as bfloat16, which is its upper 16 bits after rounding."""

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 2)

    @torch.no_grad()
    def pack(self, values: torch.Tensor, into: torch.Tensor) -> None:
        into[: 2 * values.numel()].view(torch.bfloat16).copy_(values)

    @torch.no_grad()
    def unpack(self, message: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(message[: 2 * into.numel()].view(torch.bfloat16))


class _Int8Blocks(_Packed):
    """Sends each block as integers from -127 to 127 and a float32 scale. All integers come before all scales."""

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 1)

    def _chunks(self, message: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (slice of elements, integers, scales) for each group of blocks; shapes (blocks, n) and (blocks, 1)."""
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
        # Reuse this memory; otherwise, the system would allocate and clear new pages for every chunk.
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
