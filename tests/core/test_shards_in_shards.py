"""Where the elements of one cut of a tensor lie in another.

pytest tests/core/test_shards_in_shards.py
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.checkpoint.chunks import read_across
from fullshard.core.boxes import Chunking
from fullshard.core.layout import Interval


def flattened(whole: torch.Tensor, chunking: Chunking) -> torch.Tensor:
    groups = [group.chunk(chunking.chunks, chunking.dim) for group in whole.chunk(chunking.groups, chunking.dim)]
    parts = range(max(map(len, groups)))
    return torch.cat([torch.cat([group[part] for group in groups], chunking.dim).reshape(-1) for part in parts])


def any_tiling(shape: list[int], data: st.DataObject) -> Chunking:
    dim = data.draw(st.integers(0, len(shape) - 1))
    groups = data.draw(st.sampled_from([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]))
    return Chunking(dim, data.draw(st.integers(1, 4)), groups)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_any_interval_of_any_cut_out_of_any_other(shape: list[int], data: st.DataObject) -> None:
    tilings = [any_tiling(shape, data) for _ in range(2)]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    source, target = (flattened(whole, chunking) for chunking in tilings)
    start = data.draw(st.integers(0, whole.numel()))
    wanted = Interval(start, data.draw(st.integers(start, whole.numel())))
    memory = torch.full((wanted.numel + 3,), -1)

    def read(part: Interval, out: torch.Tensor) -> None:
        out.copy_(source[part.start : part.stop])

    read_across(read, memory[2:-1], shape=tuple(shape), source=tilings[0], target=tilings[1], wanted=wanted)
    assert memory.tolist() == [-1, -1, *target[wanted.start : wanted.stop].tolist(), -1]


def test_a_part_is_what_chunk_makes_of_it() -> None:
    for length, parts in itertools.product(range(1, 9), range(1, 6)):
        whole = torch.arange(length * 3).view(3, length)
        chunking = Chunking(1, parts)
        chunks = [*whole.chunk(parts, 1), *[whole[:, :0]] * parts][:parts]
        for part, chunk in enumerate(chunks):
            [(start, _, size)] = chunking.pieces((3, length), part)
            assert chunking.sizes((3, length), part) == tuple(chunk.shape)
            assert torch.equal(whole[:, start : start + size], chunk)


def test_no_more_is_read_than_whole_rows() -> None:
    """Half of the columns of the rows that an interval touches, from a tile that has all of them."""
    read: list[Interval] = []

    def note(part: Interval, out: torch.Tensor) -> None:
        read.append(part)
        out.zero_()

    out = torch.empty(8)
    read_across(note, out, shape=(100, 8), source=Chunking(0, 1), target=Chunking(1, 2), wanted=Interval(40, 48))
    assert read == [Interval(80, 96)]


def test_what_is_in_one_part_is_flattened_as_if_it_were_not_cut() -> None:
    assert Chunking(1, 1).is_row_by_row and Chunking(0, 2).is_row_by_row
    assert not Chunking(1, 2).is_row_by_row and not Chunking(0, 2, groups=2).is_row_by_row
