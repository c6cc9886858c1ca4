"""Resharding arithmetic: any saved layout fills any wanted interval, each element read exactly once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.format import PieceRecord
from fullshard.checkpoint.readers import plan_reads
from fullshard.checkpoint.verify import coverage_problems
from fullshard.core.layout import BucketLayout, Interval, ParameterSpec


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[PieceRecord]]:
    """Elements, and pieces that cover them, by ranks in any order."""
    numel = draw(st.integers(0, 200))
    edges = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=8))})
    ranks = draw(st.permutations(range(len(edges))))
    pieces = [
        PieceRecord(rank=r, start=a, stop=b) for r, a, b in zip(ranks, edges[:-1], edges[1:], strict=False) if b > a
    ]
    return numel, pieces


@given(cuts(), st.data())
def test_reads_fill_the_wanted_interval_in_order(saved: tuple[int, list[PieceRecord]], data: st.DataObject) -> None:
    numel, pieces = saved
    assert coverage_problems(pieces, numel) == []
    start = data.draw(st.integers(0, numel))
    wanted = Interval(start, data.draw(st.integers(start, numel)))
    source = np.arange(numel)
    files = {piece.rank: source[piece.interval.start : piece.interval.stop] for piece in pieces}
    out = np.full(wanted.numel, -1)
    end = 0
    for read in plan_reads(pieces, wanted):
        assert read.target.start == end
        assert read.source.numel == read.target.numel > 0
        end = read.target.stop
        out[read.target.start : read.target.stop] = files[read.piece.rank][read.source.start : read.source.stop]
    assert end == wanted.numel
    assert (out == source[wanted.start : wanted.stop]).all()


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_from_one_world_size_to_another_and_back(shapes: list[tuple[int, ...]], before: int, after: int) -> None:
    """With the engine's own layouts: every byte is read once on each way, and the values come back."""
    specs = [ParameterSpec(str(i), shape) for i, shape in enumerate(shapes)]
    layouts = [BucketLayout.build(specs, itemsize=4, world_size=size) for size in (before, after, before)]
    for index, spec in enumerate(specs):
        values = np.arange(spec.numel)
        held = _split(layouts[0], index, values)
        for old, new in itertools.pairwise(layouts):
            pieces = _pieces(old, index)
            assert coverage_problems(pieces, spec.numel) == []
            moved, num_read = {}, 0
            for rank in range(new.world_size):
                wanted = new.interval(index, rank)
                reads = plan_reads(pieces, wanted)
                num_read += sum(read.source.numel for read in reads)
                parts = [held[read.piece.rank][read.source.start : read.source.stop] for read in reads]
                moved[rank] = np.concatenate(parts) if parts else values[:0]
            assert num_read == spec.numel
            held = moved
        expected = _split(layouts[0], index, values)
        assert all((held[rank] == expected[rank]).all() for rank in range(before))


def _pieces(layout: BucketLayout, index: int) -> list[PieceRecord]:
    held = enumerate(layout.interval(index, rank) for rank in range(layout.world_size))
    return [PieceRecord(rank=rank, start=own.start, stop=own.stop) for rank, own in held if own.numel]


def _split(layout: BucketLayout, index: int, values: np.ndarray) -> dict[int, np.ndarray]:
    intervals = {rank: layout.interval(index, rank) for rank in range(layout.world_size)}
    return {rank: values[interval.start : interval.stop] for rank, interval in intervals.items()}


@given(cuts(), st.data())
def test_every_loss_is_noticed(saved: tuple[int, list[PieceRecord]], data: st.DataObject) -> None:
    numel, pieces = saved
    if not pieces:
        return
    lost = data.draw(st.sampled_from(pieces))
    assert coverage_problems([p for p in pieces if p is not lost], numel)


def test_problems_name_the_elements_and_the_ranks() -> None:
    def piece(rank: int, start: int, stop: int) -> PieceRecord:
        return PieceRecord(rank=rank, start=start, stop=stop)

    assert coverage_problems([piece(0, 0, 4), piece(1, 6, 10)], 12) == [
        "elements [4, 6) are in no file",
        "elements [10, 12) are in no file",
    ]
    assert coverage_problems([piece(0, 0, 4), piece(1, 2, 10)], 10) == [
        "elements [2, 4) are held by rank 0 and by rank 1"
    ]
    assert coverage_problems([piece(3, 0, 11)], 10) == ["rank 3 holds elements [0, 11), but the tensor has 10"]
    assert coverage_problems([], 0) == []
