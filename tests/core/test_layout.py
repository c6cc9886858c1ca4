"""The interval layout, over shapes, world sizes and item sizes that nobody would write down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.errors import LayoutError
from fullshard.core.layout import ALIGNMENT_NBYTES, BucketLayout, Interval, ParameterSpec

# Scalars, empty ones, primes, powers of two; small enough to spell out every element.
DIMS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 32, 64])
SHAPES = st.lists(DIMS, max_size=2).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16, 32])
WORLD_SIZES = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64, 100, 257]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BucketLayout, int]:
    """A layout and its item size."""
    specs = [ParameterSpec(f"p{i}", shape) for i, shape in enumerate(draw(st.lists(SHAPES, max_size=6)))]
    itemsize = draw(ITEMSIZES)
    return BucketLayout.build(specs, itemsize=itemsize, world_size=draw(WORLD_SIZES)), itemsize


def fill(layout: BucketLayout) -> list[np.ndarray]:
    """Parameters in which every element is different and none is 0."""
    counter = itertools.count(1)
    return [
        np.fromiter(itertools.islice(counter, spec.numel), dtype=np.int64, count=spec.numel) for spec in layout.specs
    ]


@given(layouts())
def test_parameters_are_aligned_and_do_not_overlap(case: tuple[BucketLayout, int]) -> None:
    layout, itemsize = case
    owner = np.zeros(layout.full_numel, dtype=np.int64)
    for index, (spec, offset) in enumerate(zip(layout.specs, layout.offsets, strict=True)):
        assert offset * itemsize % ALIGNMENT_NBYTES == 0
        assert offset + spec.numel <= layout.full_numel
        assert not owner[offset : offset + spec.numel].any()
        owner[offset : offset + spec.numel] = index + 1
    assert list(layout.offsets) == sorted(layout.offsets)
    assert np.count_nonzero(owner) == layout.numel


@given(layouts())
def test_rank_intervals_tile_the_bucket(case: tuple[BucketLayout, int]) -> None:
    layout, itemsize = case
    intervals = [layout.rank_interval(rank) for rank in range(layout.world_size)]
    assert {interval.numel for interval in intervals} == {layout.shard_numel}
    assert layout.shard_numel * itemsize % ALIGNMENT_NBYTES == 0
    assert intervals[0].start == 0
    assert intervals[-1].stop == layout.full_numel
    assert all(one.stop == other.start for one, other in itertools.pairwise(intervals))


@given(st.integers(0, 40), st.integers(0, 9), WORLD_SIZES)
def test_rows_stay_together_as_torch_chunks_them(rows: int, columns: int, world_size: int) -> None:
    layout = BucketLayout.build([ParameterSpec("p", (rows, columns))], itemsize=4, world_size=world_size, atom=columns)
    most = -(-rows // world_size)
    for rank in range(world_size):
        own = layout.interval(0, rank)
        assert own.numel == max(0, min(most, rows - rank * most)) * columns
        assert own.numel == 0 or own.start == rank * most * columns
    assert layout.shard_numel == most * columns


@given(layouts())
def test_every_element_has_one_owner_in_rank_order(case: tuple[BucketLayout, int]) -> None:
    layout, _ = case
    for index, spec in enumerate(layout.specs):
        intervals = [layout.interval(index, rank) for rank in range(layout.world_size)]
        elements = [i for interval in intervals for i in range(interval.start, interval.stop)]
        assert elements == list(range(spec.numel))
        assert all(0 <= interval.start <= interval.stop <= spec.numel for interval in intervals)


@given(layouts())
def test_shard_slice_is_the_interval_inside_the_shard(case: tuple[BucketLayout, int]) -> None:
    layout, _ = case
    for rank in range(layout.world_size):
        taken = np.zeros(layout.shard_numel, dtype=bool)
        for index in range(len(layout.specs)):
            interval, place = layout.interval(index, rank), layout.shard_slice(index, rank)
            assert place.stop - place.start == interval.numel
            if interval.numel:
                assert place.start + rank * layout.shard_numel == layout.offsets[index] + interval.start
                assert place.stop <= layout.shard_numel
                assert not taken[place].any()
                taken[place] = True


@given(layouts())
def test_shard_then_unshard_is_the_identity(case: tuple[BucketLayout, int]) -> None:
    layout, _ = case
    parameters = fill(layout)
    shards = np.zeros((layout.world_size, layout.shard_numel), dtype=np.int64)
    for rank, shard in enumerate(shards):
        for index, parameter in enumerate(parameters):
            interval = layout.interval(index, rank)
            shard[layout.shard_slice(index, rank)] = parameter[interval.start : interval.stop]
    full = np.concatenate(shards)  # what an all-gather makes
    for parameter, spec, offset in zip(parameters, layout.specs, layout.offsets, strict=True):
        assert np.array_equal(full[offset : offset + spec.numel], parameter)
    assert np.count_nonzero(full) == layout.numel, "padding must stay as it was"


@given(layouts())
def test_shards_are_no_larger_than_alignment_asks_for(case: tuple[BucketLayout, int]) -> None:
    layout, _ = case
    end = max((o + s.numel for s, o in zip(layout.specs, layout.offsets, strict=True)), default=0)
    assert layout.shard_numel < -(-end // layout.world_size) + layout.alignment


@settings(max_examples=50)
@given(layouts(), st.integers(1, 64))
def test_the_same_parameters_give_the_same_layout(case: tuple[BucketLayout, int], world_size: int) -> None:
    layout, itemsize = case
    one = BucketLayout.build(layout.specs, itemsize=itemsize, world_size=world_size)
    other = BucketLayout.build(list(layout.specs), itemsize=itemsize, world_size=world_size)
    assert one == other
    assert hash(one) == hash(other)


@given(st.tuples(*[st.integers(0, 30)] * 4))
def test_intersection_is_what_both_contain(numbers: tuple[int, int, int, int]) -> None:
    a, b, c, d = numbers
    one, other = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    common = one.intersect(other)
    elements = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    assert set(range(common.start, common.stop)) == elements
    assert one.start <= common.start <= common.stop <= one.stop
    assert common.numel == len(elements)
    assert common.shift(7).numel == common.numel


def test_the_picture_in_the_module_docstring() -> None:
    specs = [ParameterSpec("a", (3, 4)), ParameterSpec("b", (5,)), ParameterSpec("c", ()), ParameterSpec("d", (0, 2))]
    layout = BucketLayout.build(specs, itemsize=4, world_size=3)
    assert layout.offsets == (0, 12, 20, 24)
    assert layout.shard_numel == 8
    assert [layout.interval(0, r) for r in range(3)] == [Interval(0, 8), Interval(8, 12), Interval(12, 12)]
    assert [layout.interval(1, r) for r in range(3)] == [Interval(0, 0), Interval(0, 4), Interval(4, 5)]
    assert layout.shard_slice(1, 1) == slice(4, 8)
    assert layout.shard_slice(2, 2) == slice(4, 5)
    assert [layout.interval(3, r).numel for r in range(3)] == [0, 0, 0]


def test_most_slices_are_empty_at_large_world_sizes() -> None:
    specs = [ParameterSpec(f"p{i}", (64, 64)) for i in range(10)]
    layout = BucketLayout.build(specs, itemsize=2, world_size=1024)
    sizes = [layout.interval(i, r).numel for i in range(10) for r in range(1024)]
    assert sum(size > 0 for size in sizes) <= 1024 + 10
    assert sum(sizes) == 10 * 64 * 64


@pytest.mark.parametrize(("itemsize", "world_size"), [(3, 1), (0, 1), (24, 2), (4, 0), (4, -1)])
def test_impossible_sizes_are_refused(itemsize: int, world_size: int) -> None:
    with pytest.raises(LayoutError, match=f"items of {itemsize} bytes across {world_size} ranks"):
        BucketLayout.build([ParameterSpec("p", (4,))], itemsize=itemsize, world_size=world_size)


def test_bad_parameters_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'p' is listed twice"):
        BucketLayout.build([ParameterSpec("p", (4,)), ParameterSpec("p", (4,))], itemsize=4, world_size=1)


@pytest.mark.parametrize(
    ("offsets", "shard_numel", "message"),
    [
        ((0, 4), 16, "'b' at offset 4 overlaps"),
        ((0, 10), 16, "'b' at offset .* overlaps the previous parameter or is not aligned"),
        ((0, 8), 4, "16 elements do not fit into 2 aligned intervals of 4"),
        ((0, 8), 10, "16 elements do not fit into 2 aligned intervals of 10"),
    ],
)
def test_the_checker_does_not_trust_the_builder(offsets: tuple[int, int], shard_numel: int, message: str) -> None:
    specs = (ParameterSpec("a", (8,)), ParameterSpec("b", (8,)))
    with pytest.raises(LayoutError, match=message):
        BucketLayout(specs, offsets, shard_numel, world_size=2, alignment=4)
