"""Whole matrices for optimizers: how they are dealt, and how their pieces travel.

pytest tests/features/matrices/test_matrices.py
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from fullshard.comm.base import Collectives, SplitSizes
from fullshard.comm.select import choices_for
from fullshard.core.layout import BucketLayout, Interval, ParameterSpec
from fullshard.features.matrices.exchange import gathered, sent
from fullshard.optim.newton_schulz import orthogonalized
from fullshard.plan.dealing import Dealing, Matrix, deal, matrices_in, matrix_shape
from fullshard.plan.matrices import MatrixWork
from tests.distributed import run_ranks
from tests.matrices import balance, sent_numel

CPU = torch.device("cpu")

# -- dealing ------------------------------------------------------------------------------------------------------


def llama(layers: int, *, shard_size: int, replicate_size: int = 1, experts: int = 0) -> Dealing:
    """The matrices of a model of Llama's shape, 8B if it has 32 layers; with experts of Qwen3-30B-A3B's, 48."""
    d, kv, f = (2048, 512, 768) if experts else (4096, 1024, 14336)
    batch = (experts,) if experts else ()
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (*batch, f, d), (*batch, f, d), (*batch, d, f)]
    specs = [ParameterSpec(str(i), shape) for i, shape in enumerate(shapes)]
    layout = BucketLayout.build(specs, itemsize=2, world_size=shard_size)
    matrices = [m for b in range(layers) for i in range(len(specs)) for m in matrices_in(b, layout, i, flatten=False)]
    return deal([layout] * layers, matrices, replicate_size=replicate_size, shard_size=shard_size)


@pytest.mark.parametrize(
    ("shape", "flatten", "expected"),
    [
        ((8, 4), False, (1, 8, 4)),
        ((5, 8, 4), False, (5, 8, 4)),  # experts
        ((8, 4, 3), True, (1, 8, 12)),  # a convolution
        ((8, 4, 3, 3), False, (1, 8, 36)),
        ((8,), False, (1, 1, 8)),
    ],
)
def test_what_a_parameter_is_as_matrices(shape: tuple[int, ...], flatten: bool, expected: tuple[int, int, int]) -> None:
    assert matrix_shape(shape, flatten=flatten) == expected


@pytest.mark.parametrize(
    ("layers", "experts", "shard_size", "replicate_size"),
    [(32, 0, 2, 1), (32, 0, 3, 1), (32, 0, 64, 1), (32, 0, 8, 128), (32, 0, 1024, 1), (48, 128, 1024, 1)],
)
def test_dealt_evenly(layers: int, experts: int, shard_size: int, replicate_size: int) -> None:
    dealing = llama(layers, experts=experts, shard_size=shard_size, replicate_size=replicate_size)
    assert balance(dealing) <= 1.15
    assert sum(dealing.work()) == sum(matrix.flops for matrix in dealing.matrices)


@pytest.mark.parametrize("shape", [(24, 72), (511, 511), (512, 300), (600, 1025), (1025, 600)])
def test_the_work_is_that_of_the_products_which_are_made(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counted:
        orthogonalized(torch.empty(shape, device="meta"))
    assert counted.get_total_flops() == Matrix(0, Interval(0, shape[0] * shape[1]), *shape).flops


def test_matrices_stay_where_they_are() -> None:
    """On two ranks few are cut, and those that are not do not travel, but for some that make it even."""
    dealing = llama(32, shard_size=2)
    sent = sum(sum(sent_numel(dealing, 0, rank)) for rank in range(2))
    assert sent < 0.25 * 2 * (2 - 1) / 2 * sum(matrix.numel for matrix in dealing.matrices)


@pytest.mark.parametrize(("shard_size", "count"), [(1, 32), (2, 32), (8, 8), (64, 2), (128, 1), (1024, 1)])
def test_buckets_that_travel_together(shard_size: int, count: int) -> None:
    """A rank sends no more than half a bucket at once; the more ranks, the more buckets that is."""
    dealing = llama(32, shard_size=shard_size)
    assert [number for numbers in dealing.exchanges for number in numbers] == list(range(32))
    assert len(dealing.exchanges) == count
    for numbers in dealing.exchanges:
        sent = sum(dealing.layouts[number].shard_numel for number in numbers)
        assert len(numbers) == 1 or sent <= dealing.layouts[0].full_numel / 2


@pytest.mark.parametrize(("shard_size", "most"), [(16, 1.3), (64, 1.15)])
def test_no_rank_waits_long_for_another_in_an_exchange(shard_size: int, most: float) -> None:
    """What arrives at the busiest rank of each is near the mean, and so is what the busiest computes with it."""
    dealing = llama(32, shard_size=shard_size)
    moved = sum(map(dealing.arriving, range(len(dealing.matrices))))
    assert dealing.busiest_numel <= most * moved / shard_size
    work = [dealing.work(exchange) for exchange in dealing.exchanges]
    assert [sum(of_rank) for of_rank in zip(*work, strict=True)] == dealing.work()
    assert sum(map(max, work)) <= 1.2 * sum(map(sum, work)) / shard_size


def test_few_matrices_are_held_at_once() -> None:
    """On eight ranks those of three exchanges in eight, of the fullest rank; on one rank those of three layers."""
    for shard_size, exchanges in ((8, 8), (1, 32)):
        dealing = llama(32, shard_size=shard_size)
        mean = sum(matrix.numel for matrix in dealing.matrices) / shard_size
        assert 3 / exchanges * mean <= MatrixWork(dealing).owned_nbytes / 2 <= 1.2 * 3 / exchanges * mean


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_matrices(seed: int) -> None:
    """Whatever the shapes: what is sent is what is gathered, and every element of a matrix comes once."""
    generator = random.Random(seed)
    shard_size, replicate_size = generator.choice([(1, 1), (1, 3), (2, 1), (3, 2), (5, 1), (40, 1)])
    layouts, matrices = [], list[Matrix]()
    for bucket in range(3):
        shapes = [
            generator.choice([(7, 3), (2, 5, 4), (1, 1), (64, 8), (0, 4), (3, 2, 2, 2)])
            for _ in range(generator.randrange(5))
        ]
        specs = [ParameterSpec(str(i), shape) for i, shape in enumerate(shapes)]
        layouts.append(BucketLayout.build(specs, itemsize=4, world_size=shard_size))
        for index in range(len(shapes)):
            matrices += matrices_in(bucket, layouts[bucket], index, flatten=False)
    dealing = deal(layouts, matrices, replicate_size=replicate_size, shard_size=shard_size)
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(matrices))}
    for bucket in range(3):
        for row in range(replicate_size):
            leaving = [sent(dealing, bucket, row, rank) for rank in range(shard_size)]
            for owner in range(shard_size):
                arriving = gathered(dealing, bucket, row, owner)
                assert arriving == [leaving[source][owner] for source in range(shard_size)]
                for piece in (piece for pieces in arriving for piece in pieces):
                    assert dealing.owners[piece.matrix] == (row, owner)
                    found[piece.matrix].append((piece.interval.start, piece.interval.stop))
    for matrix, pieces in zip(matrices, found.values(), strict=True):
        ends = [matrix.interval.start, *(stop for _, stop in pieces)]
        assert pieces == list(itertools.pairwise(ends))
        assert ends[-1] == matrix.interval.stop


# -- traveling ---------------------------------------------------------------------------------------------------


def check_exchange(collectives: Collectives) -> None:
    """Parts of all lengths, two exchanges under way at once, and a sum between them."""
    size, rank = collectives.size, collectives.rank

    def numel(source: int, to: int, turn: int) -> int:
        return (3 * source + 5 * to + turn) % 7 * (1 if turn else 4000)

    for dtype in (torch.bfloat16, torch.float32):
        works, sums, expected = [], [], []
        for turn in range(2):
            splits = SplitSizes(
                [numel(rank, to, turn) for to in range(size)], [numel(s, rank, turn) for s in range(size)]
            )
            leaving = torch.cat([torch.full((n,), 10 * rank + to) for to, n in enumerate(splits.leaving)]).to(dtype)
            theirs = [torch.full((n,), 10 * source + rank) for source, n in enumerate(splits.arriving)]
            expected.append(torch.cat(theirs).to(dtype))
            works.append(
                collectives.exchange(leaving, torch.empty(sum(splits.arriving), dtype=dtype), splits, tag=turn)
            )
            sums.append(collectives.reduce_scatter(torch.ones(size * 4), tag=7 + turn))
        assert all(bool((summed.wait() == size).all()) for summed in sums)
        for work, wanted in zip(works, expected, strict=True):
            assert torch.equal(work.wait(), wanted)


def check_all_collectives() -> None:
    for candidate in choices_for(dist.group.WORLD, CPU):
        check_exchange(candidate.collectives)


@pytest.mark.parametrize("size", [1, 3])
def test_exchange(size: int) -> None:
    run_ranks(check_all_collectives, size)
