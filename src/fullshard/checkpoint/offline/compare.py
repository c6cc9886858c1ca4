"""The differences between two checkpoints of any kinds: names, shapes, dtypes and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fullshard.checkpoint.elements import tensor_bytes
from fullshard.checkpoint.format import StateValueRecord, TensorRecord
from fullshard.checkpoint.offline.source import Kind, Progress, Source, chunks, silent
from fullshard.core.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: `model` or `optimizer`.
        name: of the tensor, or of what the whole optimizer differs in.
        what: `only in A`, `only in B`, `shape`, `dtype`, `values` or `setting`.
        a, b: the two sides, as text.
        max_abs: largest absolute difference of two values, for `values`; infinite where one is no number.
        count: elements that differ in a bit, for `values`.
    """

    kind: Kind
    name: str
    what: str
    a: str = ""
    b: str = ""
    max_abs: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        if self.what == "values":
            return f"{self.name}: {self.count} elements differ, by at most {self.max_abs:g}"
        return f"{self.name}: {self.what}" + (f" {self.a} and {self.b}" if self.a or self.b else "")


def compare(a: Source, b: Source, *, progress: Progress = silent) -> Iterator[Difference]:
    """Return the differences in the order of names; none if both hold the same bits.

    Names of tied tensors are all compared, so it does not matter under which one a checkpoint stores them.
    """
    for kind in ("model", "optimizer"):
        mine, theirs = _by_name(a, kind), _by_name(b, kind)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in theirs or name not in mine:
                yield Difference(kind, name, "only in A" if name in mine else "only in B")
                continue
            (own, record), (other, other_record) = mine[name], theirs[name]
            if record.shape != other_record.shape:
                yield Difference(kind, name, "shape", str(record.shape), str(other_record.shape))
                continue
            if record.dtype != other_record.dtype:
                yield Difference(kind, name, "dtype", record.dtype, other_record.dtype)
            found = _values(a, b, kind, own, other, record, progress)
            if found.count:
                yield found
    yield from _settings(a, b)


def _by_name(source: Source, kind: Kind) -> dict[str, tuple[str, TensorRecord]]:
    """Return, by name, the name that a tensor is stored under, and its record."""
    found: dict[str, tuple[str, TensorRecord]] = {}
    for stored_kind, name, record in source.contents.tensors():
        if stored_kind == kind:
            found |= dict.fromkeys((name, *record.aliases), (name, record))
    return found


def _values(
    a: Source, b: Source, kind: Kind, own: str, other: str, record: TensorRecord, progress: Progress
) -> Difference:
    largest, count = 0.0, 0
    for part in chunks(record):
        x, y = a.read(kind, own, part), b.read(kind, other, part)
        progress(part.numel * itemsize(record.dtype))
        if x.dtype == y.dtype and (tensor_bytes(x) == tensor_bytes(y)).all():
            continue
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        p, q = x.to(wide), y.to(wide)
        same = (p == q) | (p.isnan() & q.isnan())
        if x.dtype == y.dtype:  # then the bits count, not the values
            same = (x.view(-1, 1).view(torch.uint8) == y.view(-1, 1).view(torch.uint8)).all(dim=1)
        distance = torch.where(p == q, 0.0, (p - q).abs()).nan_to_num(nan=float("inf"))
        count += int((~same).sum())
        largest = max(largest, float(distance.max()))
    return Difference(kind, own, "values", max_abs=largest, count=count)


def _settings(a: Source, b: Source) -> Iterator[Difference]:
    """Return the differences between the optimizers in anything but tensors."""
    mine, theirs = a.contents.optimizer, b.contents.optimizer
    if mine is None or theirs is None:
        if mine is not theirs:
            yield Difference("optimizer", "the optimizer", "only in A" if mine else "only in B")
        return
    if mine.kind and theirs.kind and mine.kind != theirs.kind:
        yield Difference("optimizer", "the optimizer's class", "setting", mine.kind, theirs.kind)
    if len(mine.groups) != len(theirs.groups):
        count = str(len(mine.groups)), str(len(theirs.groups))
        yield Difference("optimizer", "parameter groups", "setting", *count)
    for number, (one, other) in enumerate(zip(mine.groups, theirs.groups, strict=False)):
        for key in sorted(one.options.keys() | other.options.keys()):
            x, y = one.options.get(key), other.options.get(key)
            if x != y:
                yield Difference("optimizer", f"group {number}: {key}", "setting", str(x), str(y))
        if set(one.parameters) != set(other.parameters):
            strangers = sorted(set(one.parameters) ^ set(other.parameters))
            yield Difference("optimizer", f"group {number}: parameters", "setting", "differ in", ", ".join(strangers))
    for name in sorted(mine.state.keys() & theirs.state.keys()):
        for key, value in mine.state[name].items():
            other_value = theirs.state[name].get(key)
            if isinstance(value, StateValueRecord) and value != other_value:
                yield Difference("optimizer", f"{name}/{key}", "setting", str(value.value), str(other_value))
