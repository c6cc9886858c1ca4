"""Encode optimizer state in 4 or 8 bits, with one scale per block of codes.

Blocks are counted from the start of a rank's interval. State dicts contain the decoded state in float32, with the same
layout as the parameter. They can therefore be loaded on any number of ranks and by any optimizer. When the state is
encoded again with the same blocks, the result is the same codes.
"""

import torch

TORCHAO_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}


def decode(
    codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor | None, *, bits: int, block: int
) -> torch.Tensor:
    """Return the decoded values in float32.

    A block has `block` values, except that the last one may be shorter. In 4-bit state, a byte contains two codes, the
    first of them in the upper half. `book` maps codes to unscaled values; if it is None, the codes are the unscaled
    values.
    """
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
    return _named(codes, book) * scales.repeat_interleave(block)[: codes.numel()]


def encode(
    values: torch.Tensor, book: torch.Tensor | None, *, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of `values` (1-D, float32). Decoded values are encoded exactly as before."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % block))
    blocks = padded.view(padded.numel() // block, block)
    largest = blocks.abs().amax(dim=1)
    extremes = [torch.finfo(torch.float8_e4m3fn).max] if book is None else [float(book.abs().max()), -float(book.min())]
    scales = largest / extremes[0]
    codes = _nearest(blocks, scales, book)
    # The largest value of a decoded block is a rounded product of scale and code book extreme: try nearby quotients.
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
