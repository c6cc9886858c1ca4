"""Read stored tensors for ranks that hold other parts of them, because tensor parallelism splits them differently."""

import math
from collections.abc import Callable, Sequence

import torch

from fullshard.checkpoint.tensors import LocalTensor
from fullshard.core.boxes import UNCUT, Chunking, IntervalBox, boxes, in_full_tensor, replaced, strides_of
from fullshard.core.layout import Interval


def fill_local(local: LocalTensor, read: Callable[[Interval, torch.Tensor], None]) -> None:
    """Fill this rank's part of a tensor of any memory layout. `read(interval, out)` reads the flattened full tensor."""
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
    start = 0
    for part in range(target.chunks):
        sizes = target.sizes(shape, part)
        own = wanted.intersect(Interval(start, start + math.prod(sizes)))
        for box in boxes(sizes, own.shift(-start)) if own.numel else ():
            for piece in in_full_tensor(box, target, shape, part):
                _read_box(read, out, shape, source, piece, own.start - wanted.start)
        start += math.prod(sizes)


def read_transposed(
    read: Callable[[Interval, torch.Tensor], None], shape: Sequence[int], wanted: Interval, out: torch.Tensor
) -> None:
    """As `read_across` does, read a source whose last two dims are swapped, one complete matrix at a time."""
    rows, columns = shape[-2:]
    for start in range(wanted.start // (rows * columns) * rows * columns, wanted.stop, rows * columns):
        whole = Interval(start, start + rows * columns)
        matrix, part = out.new_empty(columns, rows), whole.intersect(wanted)
        read(whole, matrix.view(-1))
        own = matrix.mT.reshape(-1)[part.start - start : part.stop - start]
        out[part.start - wanted.start : part.stop - wanted.start].copy_(own)


def _read_box(
    read: Callable[[Interval, torch.Tensor], None],
    out: torch.Tensor,
    shape: tuple[int, ...],
    source: Chunking,
    wanted: IntervalBox,
    offset: int,
) -> None:
    """Read the box `wanted` of a tensor from the parts of the source, to the elements of `out` from `offset`."""
    dim, start = source.dim, 0
    first, last = wanted.offsets[dim], wanted.offsets[dim] + wanted.sizes[dim]
    for part in range(source.chunks):
        held = source.sizes(shape, part)
        for whole, inner, length in source.pieces(shape, part):
            low, high = max(first, whole), min(last, whole + length)
            if low >= high:
                continue
            sizes = replaced(wanted.sizes, dim, high - low)
            inside = replaced(wanted.offsets, dim, low - whole + inner)
            # The smallest contiguous range in the chunk: full slices of all dims after the first with several elements.
            split = next((d for d, size in enumerate(sizes) if size > 1), len(sizes) - 1)
            block = torch.empty((*sizes[: split + 1], *held[split + 1 :]), dtype=out.dtype)
            corner = (*inside[: split + 1], *(0 for _ in held[split + 1 :]))
            begin = start + sum(a * b for a, b in zip(corner, strides_of(held), strict=True))
            read(Interval(begin, begin + block.numel()), block.view(-1))
            for each, (at, outer, size) in enumerate(zip(inside, corner, sizes, strict=True)):
                block = block.narrow(each, at - outer, size)
            to = int(out.storage_offset()) + offset + wanted.start + (low - first) * wanted.strides[dim]
            out.as_strided(sizes, wanted.strides, to).copy_(block)
        start += math.prod(held)
