"""Reading a tensor that is stored cut one way by a rank that has it cut another way, because of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullshard.checkpoint.tensors import LocalTensor
from fullshard.core.chunking import UNCUT, Chunking, patches
from fullshard.core.layout import Interval


def fill_local(local: LocalTensor, read: Callable[[Interval, torch.Tensor], None]) -> None:
    """Fill what this rank holds of a tensor, in whatever order its memory is.

    Args:
        local: see `LocalTensor`.
        read: fills a tensor, shape (m,), with an interval of the whole one, flattened row by row.
    """
    plain = local.held.contiguous()  # a copy if its memory is in another order
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
    """Fill `out`, shape (n,), with elements `wanted` of a tensor flattened as `target` says.

    Where the cuts differ, whole rows of the source's tiles are read, and what was asked for taken out of them.

    Args:
        read: fills a tensor, shape (m,), with an interval of the tensor flattened as `source` says.
        out: on any device.
        shape: of the whole tensor.
        source: how what is read is cut.
        target: how what is wanted is.
        wanted: an interval of it.
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
