"""Find the sources of a model's tensors in a Hugging Face directory: tensors stored there, or computed from them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.conversion import Group, Outline, Rules
from fullshard.checkpoint.weight_files import CodedSource, TensorSource
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.engine.precision import torch_dtype

_COMPARED_NUMEL = 2**20
"""Number of elements of two tensors that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Match:
    """Sources by the model's names, names of unused stored tensors, and how Transformers' converters use them."""

    sources: dict[str, TensorSource]
    unused: list[str]
    keys: dict[str, list[str]]
    converted: set[str]


def match(stored: Mapping[str, TensorSource], rules: Rules) -> Match:
    """Match the model's tensors with those of a directory. Raise `CheckpointError` if files contradict each other."""
    as_it_is, groups, unused, again = rules.load(stored)
    found: dict[str, TensorSource] = {name: stored[key] for name, key in as_it_is.items()}
    clashes = [
        f"{as_it_is[name]} and {key} are both stored for {name}"
        for name, key in again
        if not are_equal(stored[key], found[name])
    ]
    if clashes:
        raise CheckpointError(
            f"the files hold several values for the same weight of {rules.outline.title}:\n" + "\n".join(clashes),
            hint="load the class that was saved; Transformers itself would silently use the first value",
        )
    outline, keys = rules.outline, {name: [key] for name, key in as_it_is.items()}
    for group in groups:
        together = _Together(group, stored, outline, outline.tensors[group.first].dtype)
        coded = _coded_together(group, stored, outline)
        where = ", ".join(dict.fromkeys(stored[key].where for _, key in group.takes))
        for name, meta in together.metas.items():
            if name in outline.tensors:
                read = functools.partial(together.read, name)
                kept = None if coded is None else coded(name, tuple(meta.shape))
                found[name] = TensorSource(tuple(meta.shape), meta.dtype, where, read, kept)
                keys[name] = [key for _, key in group.takes]
            else:
                unused.append(name)
    return Match(found, unused, keys, keys.keys() - as_it_is.keys())


def read_whole(
    source: TensorSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Read all elements of a source, and return them as a new tensor."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    source.read(Interval(0, whole.numel()), whole.view(-1))
    return whole


def are_equal(one: TensorSource, other: TensorSource) -> bool:
    """Return whether two sources have the same values. Both are read in parts of limited size."""
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    for start in range(0, one.numel, _COMPARED_NUMEL):
        interval = Interval(start, min(start + _COMPARED_NUMEL, one.numel))
        values = [torch.empty(interval.numel, dtype=source.dtype) for source in (one, other)]
        for source, out in zip((one, other), values, strict=True):
            source.read(interval, out)
        if not torch.equal(*values):
            return False
    return True


def _coded_together(
    group: Group, stored: Mapping[str, TensorSource], outline: Outline
) -> Callable[[str, tuple[int, ...]], CodedSource] | None:
    """Return a function that returns the source of a tensor's codes, or None if the group's files have no codes."""
    taken = {key: stored[key].coded for _, key in group.takes}
    first = next((coded for coded in taken.values() if coded is not None), None)
    if first is None:
        return None
    parts: dict[str, _Together] = {}
    is_alike = all(c is not None and (c.form, c.mark) == (first.form, first.mark) for c in taken.values())
    if is_alike and group.keeps_rows and all(_is_by_rows(stored[key]) for key in taken):
        for part in first.form.parts:
            own = {key: coded.parts[part.name] for key, coded in taken.items() if coded is not None}
            parts[part.name] = _Together(group, own, outline, torch_dtype(part.dtype))

    def coded_of(name: str, shape: tuple[int, ...]) -> CodedSource:
        """Return the source of the codes of a tensor whose values have this shape."""
        # If rows are not a multiple of the block size, the source has no mark, so that the values are read instead.
        sources: dict[str, TensorSource] = {}
        for part in first.form.parts if parts else ():
            together = parts[part.name]
            if tuple(together.metas[name].shape) == (*shape[:-1], shape[-1] / part.elements):
                read = functools.partial(together.read, name)
                sources[part.name] = TensorSource(together.metas[name].shape, torch_dtype(part.dtype), "", read)
        is_whole = len(sources) == len(first.form.parts)
        return CodedSource(first.form, first.mark if is_whole else None, sources)

    return coded_of


def _is_by_rows(source: TensorSource) -> bool:
    *others, columns = source.shape
    return source.coded is not None and all(
        source.coded.parts[part.name].shape == (*others, columns / part.elements) for part in source.coded.form.parts
    )


class _Together:
    """The tensors of one group, computed when the first one is read and kept until all of them have been read."""

    def __init__(self, group: Group, stored: Mapping[str, TensorSource], outline: Outline, dtype: torch.dtype) -> None:
        self.group, self._stored, self._outline, self._dtype = group, stored, outline, dtype
        metas = {key: torch.empty(stored[key].shape, dtype=self._dtype, device="meta") for _, key in group.takes}
        self.metas = group.convert_meta(metas, outline)
        self._made: dict[str, torch.Tensor] = {}
        self.has_rows = group.has_rows

    @torch.no_grad()
    def read(self, name: str, interval: Interval, out: torch.Tensor) -> None:
        if not interval.numel:
            self._made.pop(name, None)
            return
        if self.has_rows:
            self._read_rows(interval, out, math.prod(self.metas[name].shape[1:]))
            return
        if name not in self._made:
            self._made = self.group.convert(self._whole, self._outline)
        out.copy_(self._made.pop(name).reshape(-1)[interval.start : interval.stop])

    def _read_rows(self, interval: Interval, out: torch.Tensor, row_numel: int) -> None:
        """Read one row at a time, so that the many experts of a layer are never all in memory."""
        for index in range(interval.start // row_numel, -(-interval.stop // row_numel)):
            row = self.group.row(index, self._whole, self._outline).reshape(-1)
            part = Interval(index * row_numel, (index + 1) * row_numel).intersect(interval)
            start = part.start - index * row_numel
            out[part.start - interval.start : part.stop - interval.start].copy_(row[start : start + part.numel])

    def _whole(self, key: str) -> torch.Tensor:
        return read_whole(self._stored[key], self._stored[key].shape, self._dtype)
