"""Read stored tensors for ranks that hold other parts of them, because tensor parallelism splits them differently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.tensors import LocalTensor
from fullshard.core.boxes import UNCUT, Chunking, IntervalBox, boxes, in_whole, replaced, strides_of
from fullshard.core.layout import Interval


def fill_local(local: LocalTensor, read: Callable[[Interval, torch.Tensor], None]) -> None:
    """Fill this rank's part of a tensor, whatever its memory layout is.

    `read(interval, out)` reads an interval of the full tensor, flattened row by row.
    """
    plain = local.held.contiguous()  # a copy if its memory layout differs
    read_across(read, plain.view(-1), shape=local.shape, source=UNCUT, target=local.chunking, wanted=local.interval)
    if plain.data_ptr() != local.held.data_ptr():
        local.held.copy_(plain)


def read_across(
    read: Callable[[Interval, torch.Tensor], None],
    out: torch.Tensor,
    *,
    shape: tuple[int, ...],
    source: Chunking,
    target: Chunking,
    wanted: Interval,
) -> None:
    """Read the elements `wanted` of a tensor of `shape`, flattened in the order of `target`, into `out` of shape (n,).

    `read(interval, out)` reads an interval of the tensor, flattened in the order of `source`. If the two orders differ,
    complete rows of the source's chunks are read, and the wanted elements are copied out of them.
    """
    if source == target or (source.is_row_by_row and target.is_row_by_row):
        read(wanted, out)
        return
    for patch in patches(shape, source, target, wanted):
        rows = torch.empty(patch.source.numel, dtype=out.dtype)
        read(patch.source, rows)
        block = rows.view(patch.source_sizes)
        for dim, (offset, size) in enumerate(zip(patch.source_offsets, patch.sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        start = int(out.storage_offset()) + patch.target
        out.as_strided(patch.sizes, patch.target_strides, start).copy_(block)


def read_transposed(
    read: Callable[[Interval, torch.Tensor], None], shape: Sequence[int], wanted: Interval, out: torch.Tensor
) -> None:
    """Read the elements `wanted` of a tensor of `shape`, flattened row by row, into `out` of shape (n,).

    `read` works as in `read_across`, but the source stores the tensor with its last two dims swapped. Every matrix
    that contains a wanted element is read completely, one at a time.
    """
    rows, columns = shape[-2:]
    for start in range(wanted.start // (rows * columns) * rows * columns, wanted.stop, rows * columns):
        whole = Interval(start, start + rows * columns)
        matrix, part = out.new_empty(columns, rows), whole.intersect(wanted)
        read(whole, matrix.view(-1))
        own = matrix.mT.reshape(-1)[part.start - start : part.stop - start]
        out[part.start - wanted.start : part.stop - wanted.start].copy_(own)


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of elements to copy from a tensor in source order to a tensor in target order.

    `source` is the interval to read in source order, which forms a box of `source_sizes`. The elements to copy are a
    box of `sizes` at `source_offsets` inside it. `target` and `target_strides` are the offset and the strides of these
    elements among the wanted ones.
    """

    source: Interval
    source_sizes: tuple[int, ...]
    source_offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


def patches(shape: tuple[int, ...], source: Chunking, target: Chunking, wanted: Interval) -> Iterator[Patch]:
    """Yield patches that together copy the `wanted` elements of a tensor from `source` to `target` order.

    `wanted` is an interval in the order of `target`. Patches read intervals in the order of `source`.
    """
    start = 0
    for part in range(target.parts):
        sizes = target.sizes(shape, part)
        own = wanted.intersect(Interval(start, start + math.prod(sizes)))
        for box in boxes(sizes, own.shift(-start)) if own.numel else ():
            for piece in in_whole(box, target, shape, part):
                yield from _from(shape, source, piece, own.start - wanted.start)
        start += math.prod(sizes)


def _from(shape: tuple[int, ...], source: Chunking, wanted: IntervalBox, offset: int) -> Iterator[Patch]:
    """Yield patches that copy the box `wanted` from the source's parts to element `offset` of the wanted interval."""
    dim, start = source.dim, 0
    first, last = wanted.offsets[dim], wanted.offsets[dim] + wanted.sizes[dim]
    for part in range(source.parts):
        held = source.sizes(shape, part)
        for whole, inner, length in source.pieces(shape, part):
            low, high = max(first, whole), min(last, whole + length)
            if low >= high:
                continue
            sizes = replaced(wanted.sizes, dim, high - low)
            inside = replaced(wanted.offsets, dim, low - whole + inner)
            # The smallest contiguous range in the chunk: full slices of all dims after the first with several elements.
            split = next((d for d, size in enumerate(sizes) if size > 1), len(sizes) - 1)
            covering = (*sizes[: split + 1], *held[split + 1 :])
            corner = (*inside[: split + 1], *(0 for _ in held[split + 1 :]))
            begin = start + sum(a * b for a, b in zip(corner, strides_of(held), strict=True))
            yield Patch(
                source=Interval(begin, begin + math.prod(covering)),
                source_sizes=covering,
                source_offsets=tuple(a - b for a, b in zip(inside, corner, strict=True)),
                sizes=sizes,
                target=offset + wanted.start + (low - first) * wanted.strides[dim],
                target_strides=wanted.strides,
            )
        start += math.prod(held)
