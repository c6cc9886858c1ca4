"""Optimizer state in 4 or 8 bits: codes, with one scale for each block of them.

Blocks are counted from the start of a rank's interval. In state dicts such state is values: float32, laid out as its
parameter, so that any number of ranks and any optimizer can load it. Coding it again in the same blocks loses nothing.
"""

from __future__ import annotations

import torch

TORCHAO_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}


def decode(
    codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor | None, *, bits: int, block: int
) -> torch.Tensor:
    """Return the values of whole blocks, in float32; the last block of `block` values may be short.

    4-bit codes are packed two to a byte, the first in the upper half. Without a `book` of values, codes are numbers.
    """
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
    return _named(codes, book) * scales.repeat_interleave(block)[: codes.numel()]


def encode(
    values: torch.Tensor, book: torch.Tensor | None, *, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of `values` (1-D, float32): the nearest codes at the smallest scale that fits a block.

    A block of decoded values gets codes for exactly the same values, bit by bit. See `decode`.
    """
    padded = torch.nn.functional.pad(values, (0, -values.numel() % block))
    blocks = padded.view(padded.numel() // block, block)
    largest = blocks.abs().amax(dim=1)
    extremes = [torch.finfo(torch.float8_e4m3fn).max] if book is None else [float(book.abs().max()), -float(book.min())]
    scales = largest / extremes[0]
    codes = _nearest(blocks, scales, book)
    # The largest value of such a block is an extreme of the book times the scale, rounded: look beside the quotient.
    for near in (largest / extreme for extreme in extremes if extreme > 0):
        for ulps in (0, 1, -1, 2, -2):
            tried = (near.view(torch.int32) + ulps).clamp(min=0).view(torch.float32)
            tried_codes = _nearest(blocks, tried, book)
            is_same = (_named(tried_codes, book) * tried[:, None] == blocks).all(dim=1)
            codes = torch.where(is_same[:, None], tried_codes, codes)
            scales = torch.where(is_same, tried, scales)
    codes = codes.view(-1)[: values.numel()]
    return (codes[0::2] << 4 | codes[1::2] if bits == 4 else codes), scales


def _named(codes: torch.Tensor, book: torch.Tensor | None) -> torch.Tensor:
    return codes.float() if book is None else book[codes.int()]


def _nearest(blocks: torch.Tensor, scales: torch.Tensor, book: torch.Tensor | None) -> torch.Tensor:
    normal = blocks / scales.where(scales > 0, torch.ones_like(scales))[:, None]
    if book is None:
        return normal.to(torch.float8_e4m3fn)
    return torch.bucketize(normal, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)
