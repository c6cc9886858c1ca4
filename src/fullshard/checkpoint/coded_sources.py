"""Sources of weights whose codes and scales are stored as separate tensors in the files."""

import functools
import math
from collections.abc import Callable, Mapping

import torch

from fullshard.checkpoint.chunks import read_across, read_transposed
from fullshard.checkpoint.weight_files import CodedSource, TensorSource
from fullshard.core.boxes import UNCUT, Chunking
from fullshard.core.errors import CheckpointError
from fullshard.core.forms import CPU_PIECE_NUMEL, FORMS, StoredForm
from fullshard.core.layout import Interval
from fullshard.engine.precision import torch_dtype
from fullshard.features.quantized_weights.codecs import codec_of
from fullshard.features.quantized_weights.marks import Mark


def partner(stored: Mapping[str, TensorSource], name: str, key: str) -> TensorSource:
    """Return the tensor `name`, which is needed to decode the tensor `key`, or raise `CheckpointError`."""
    if name not in stored:
        raise CheckpointError(f"{stored[key].where} holds {key}, but no file in its directory holds {name}")
    return stored[name]


def coded_source(
    shape: tuple[int, ...], form: StoredForm, parts: list[TensorSource], *, is_transposed: bool = False
) -> TensorSource:
    """Return the source of a weight from the sources of its codes and scales, each flattened in block order."""
    mark = Mark(form.name, is_transposed) if FORMS[form.name] == form else None
    coded = CodedSource(form, mark, dict(zip((part.name for part in form.parts), parts, strict=True)))
    read: Callable[[Interval, torch.Tensor], None] = functools.partial(_read_decoded, coded, math.prod(shape))
    if is_transposed:
        read = functools.partial(read_transposed, read, shape)
    return TensorSource(shape, torch.bfloat16, parts[0].where, read, coded)


@torch.no_grad()
def _read_decoded(coded: CodedSource, numel: int, interval: Interval, out: torch.Tensor) -> None:
    """Decode the elements in `interval`, counted in block order, into `out`, in pieces to limit memory use."""
    form = coded.form
    for start in range(interval.start // form.atom * form.atom, interval.stop, CPU_PIECE_NUMEL):
        piece = Interval(start, min(start + CPU_PIECE_NUMEL, -(-interval.stop // form.atom) * form.atom, numel))
        values = torch.empty(piece.numel, dtype=out.dtype, device=out.device)
        parts = {
            part.name: torch.empty(part.numel(piece.numel), dtype=torch_dtype(part.dtype), device=out.device)
            for part in form.parts
        }
        coded.fill(piece, parts)
        codec_of(form).decode(list(parts.values()), values)
        wanted = piece.intersect(interval)
        own = values[wanted.start - start : wanted.stop - start]
        out[wanted.start - interval.start : wanted.stop - interval.start].copy_(own)


def fill_cut(
    coded: CodedSource,
    shape: tuple[int, ...],
    chunking: Chunking,
    rank: int,
    interval: Interval,
    out: Mapping[str, torch.Tensor],
) -> bool:
    """Read codes and scales of this rank's elements in `interval`. Return False if tensor parallelism cuts a block."""
    pieces = [piece for part in range(chunking.chunks) for piece in chunking.pieces(shape, part)]
    if chunking.dim == len(shape) - 1 and any(bound % coded.form.atom for piece in pieces for bound in piece):
        return False
    for part in coded.form.parts:
        source, items = coded.parts[part.name], (*shape[:-1], shape[-1] // part.elements)
        if source.shape != items:
            return False
        wanted = Interval(part.numel(interval.start), part.numel(interval.stop)).shift(chunking.start(items, rank))
        read_across(source.read, out[part.name], shape=items, source=UNCUT, target=chunking, wanted=wanted)
    return True
