"""Compare two checkpoints of any kind: missing tensors, shapes, dtypes and values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fullshard.checkpoint.elements import tensor_bytes
from fullshard.checkpoint.offline.source import Kind, Source, chunks


class Difference(NamedTuple):
    """A difference in one tensor. `max_abs` is the largest between two values, or infinity if only one is NaN."""

    kind: Kind
    name: str
    what: str
    max_abs: float = 0.0


def compare(a: Source, b: Source) -> Iterator[Difference]:
    """Yield the differences between two sources, sorted by name. If all tensors are bit-identical, yield nothing."""
    mine, theirs = (
        {(k, n): (name, r) for k, name, r in s.contents.tensors() for n in (name, *r.aliases)} for s in (a, b)
    )
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in mine or key not in theirs:
            yield Difference(*key, f"only in {'A' if key in mine else 'B'}")
            continue
        kind, (own, record), (other, other_record) = key[0], mine[key], theirs[key]
        shown = [f"{r.dtype} of shape {list(r.shape)}" for r in (record, other_record)]
        if shown[0] != shown[1]:
            yield Difference(*key, " and ".join(shown))
        is_same, largest = True, 0.0
        for part in chunks(record) if record.shape == other_record.shape else ():
            x, y = a.read(kind, own, part), b.read(kind, other, part)
            if x.dtype != y.dtype or (tensor_bytes(x) != tensor_bytes(y)).any():
                p, q = (t.to(torch.complex128 if x.is_complex() else torch.float64) for t in (x, y))
                distance = torch.where((p == q) | (p.isnan() & q.isnan()), 0.0, (p - q).abs())
                largest = max(largest, float(distance.nan_to_num(nan=float("inf")).max()))
                is_same = is_same and x.dtype != y.dtype and largest == 0
        if not is_same:
            yield Difference(*key, f"values differ by at most {largest:g}", largest)
