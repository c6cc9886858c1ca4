"""How a data loader is dealt to the ranks: compared with Accelerate's, and against its own promises.

pytest tests/api/test_data_loader.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from fullshard.api.data import ShardedDataLoader, skip_first_batches
from fullshard.api.dealing import Deal
from fullshard.api.optimizer import AcceleratedOptimizer
from fullshard.api.state import GradientState
from fullshard.api.teaching import teach_libraries
from fullshard.core.errors import ConfigError, DataError

Draw = Callable[[int], list[int]]
"""So many numbers in an order of a generator's."""


class Numbers(Dataset[int]):
    """The numbers 0 to count - 1, recording what was read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    """The same as a stream without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Shuffling(Sampler[int]):
    """A sampler of the user's own that draws from a global generator and has no `generator`."""

    def __init__(self, count: int, draw: Draw) -> None:
        self.count, self.draw = count, draw

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.count))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def epoch(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


def shares(loader: DataLoader[Any], world_size: int, **options: Any) -> list[list[list[int]]]:
    """One epoch per rank. Seeds are given, so no process group is needed to agree on one."""
    options = {"data_seed": 3} | options
    return [epoch(ShardedDataLoader(loader, rank=r, world_size=world_size, **options)) for r in range(world_size)]


@given(
    count=st.integers(0, 40),
    per_rank=st.integers(1, 5),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    skip=st.integers(0, 45),
)
def test_dealing_keeps_its_promises(count: int, per_rank: int, world_size: int, drop_last: bool, skip: int) -> None:
    deals = [Deal(rank, world_size, per_rank, drop_last) for rank in range(world_size)]
    dealt = [
        [(share, real) for of_all, real in deal.dealt(range(count), skip=skip) for share in deal.shares_of(of_all)]
        for deal in deals
    ]
    rounds = {len(d) for d in dealt}
    assert rounds == {deals[0].rounds(max(0, count - skip))}, "ranks differ in their number of steps"
    seen: list[int] = []
    for step in zip(*dealt, strict=True):
        real = {r for _, r in step}
        assert len(real) == 1
        flat = [item for share, _ in step for item in share]
        assert world_size == 1 or len(flat) == per_rank * world_size
        seen += flat[: real.pop()]
    everything = list(range(skip, count))
    kept = len(everything) // (per_rank * world_size) * per_rank * world_size if drop_last else len(everything)
    assert seen == everything[:kept]


@pytest.mark.parametrize("count", [1, 3, 8, 9, 16, 21, 24])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_batches_as_accelerate(count: int, drop_last: bool, split_batches: bool, world_size: int) -> None:
    accelerate_data = pytest.importorskip("accelerate.data_loader")
    batch_size = 4 * world_size if split_batches else 4
    loader = DataLoader(numbers(count), batch_size=batch_size, drop_last=drop_last)
    theirs = [
        epoch(
            accelerate_data.prepare_data_loader(
                loader, torch.device("cpu"), world_size, rank, split_batches=split_batches
            )
        )
        for rank in range(world_size)
    ]
    assert shares(loader, world_size, split_batches=split_batches) == theirs


def test_shuffling_equals_accelerates_seedable_sampler_and_differs_by_epoch() -> None:
    accelerate_data = pytest.importorskip("accelerate.data_loader")
    loader = DataLoader(numbers(24), batch_size=4, shuffle=True)
    theirs = accelerate_data.prepare_data_loader(
        loader, torch.device("cpu"), 2, 1, use_seedable_sampler=True, data_seed=5
    )
    ours = ShardedDataLoader(loader, rank=1, world_size=2, data_seed=5)
    first, second = epoch(ours), epoch(ours)
    assert [first, second] == [epoch(theirs), epoch(theirs)]
    assert first != second
    ours.set_epoch(0)
    assert epoch(ours) == first


def test_every_sample_is_seen_once_by_some_rank() -> None:
    for batches in shares(DataLoader(numbers(24), batch_size=4, shuffle=True), 3):
        assert len(batches) == 2
    flat = sorted(i for rank in shares(DataLoader(numbers(24), batch_size=4, shuffle=True), 3) for b in rank for i in b)
    assert flat == list(range(24))


def test_the_order_does_not_depend_on_the_world_size() -> None:
    def orders(world_size: int) -> list[list[int]]:
        loader = DataLoader(numbers(24), batch_size=12, shuffle=True)
        ranks = shares(loader, world_size, split_batches=True)
        return [[i for share in step for i in share] for step in zip(*ranks, strict=True)]

    assert orders(1) == orders(2) == orders(4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_datasets_are_dealt_too(num_workers: int) -> None:
    loader = DataLoader(Stream(10), batch_size=2, num_workers=num_workers)
    ranks = shares(loader, 2)
    if num_workers == 0:
        assert ranks == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    else:  # the stream ignores its workers, so each of them deals all of it
        assert [len(rank) for rank in ranks] == [6, 6]
        assert sorted(i for rank in ranks for b in rank for i in b) == sorted([*range(10), 0, 1] * 2)


def test_the_remainder_tells_real_samples_from_repetitions() -> None:
    for dataset in (numbers(10), Stream(10)):
        loader = ShardedDataLoader(DataLoader(dataset, batch_size=2), rank=0, world_size=2, data_seed=0)
        seen = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
        assert seen == [(False, None), (False, None), (True, 2)]
        assert (loader.end_of_dataloader, loader.remainder) == (False, None)


def test_one_rank_alone_gets_a_short_last_batch() -> None:
    assert epoch(ShardedDataLoader(DataLoader(numbers(5), batch_size=2))) == [[0, 1], [2, 3], [4]]


def test_batches_of_the_users_own_making_are_dealt_whole() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    loader = DataLoader(numbers(9), batch_sampler=batches)
    ranks = shares(loader, 2)
    assert ranks == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [0]]]


@pytest.mark.parametrize("batches", [[[0, 1], [2, 3], [4]], [[0], [1, 2], [3, 4, 5]]])
def test_repeated_batches_of_the_users_own_making_are_told(batches: list[list[int]]) -> None:
    loader = DataLoader(numbers(9), batch_sampler=batches)
    steps = list(zip(*(ShardedDataLoader(loader, rank=r, world_size=2, data_seed=0) for r in range(2)), strict=True))
    last = ShardedDataLoader(loader, rank=0, world_size=2, data_seed=0)
    for _ in last:
        ragged, padded = last.real_rows(len(steps[-1][0][0]) + len(steps[-1][1][0])), last.real_rows(2 * 7)
    assert (ragged, padded) == (len(batches[-1]), 7)


def test_what_a_worker_is_told_reaches_the_stream() -> None:
    class Range(Stream):
        start = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.start, self.count))

    def tell(worker: int) -> None:  # as torch's page on IterableDataset has it
        info: Any = get_worker_info()
        info.dataset.start = info.dataset.count - 2

    loader = DataLoader(Range(10), batch_size=2, num_workers=1, worker_init_fn=tell)
    assert shares(loader, 2) == [[[8, 9]], [[8, 9]]]


def test_a_sampler_that_is_a_batch_sampler() -> None:
    class Table(Numbers):
        def __getitem__(self, indices: Any) -> Any:
            return torch.tensor(indices)

    table = Table(8)
    loader = DataLoader(table, batch_size=None, sampler=BatchSampler(range(8), 2, drop_last=False))
    assert shares(loader, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda count: torch.randperm(count).tolist(),
        lambda count: random.sample(range(count), count),
        lambda count: numpy.random.permutation(count).tolist(),
    ],
    ids=["torch", "random", "numpy"],
)
def test_unknown_samplers_repeat_after_a_restart_and_leave_the_global_generators_alone(draw: Draw) -> None:
    def read_from(number: int, loader: Any) -> tuple[list[list[int]], list[int]]:
        """An epoch, and what everybody draws after it."""
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(number)
        return epoch(loader), draw(6)

    def own() -> ShardedDataLoader:
        return ShardedDataLoader(DataLoader(numbers(6), batch_size=2, sampler=Shuffling(6, draw)), data_seed=1)

    first, following = read_from(98, own())
    assert following == read_from(98, DataLoader(numbers(6), batch_size=2))[1]
    assert read_from(99, own())[0] == first


class Buckets(BatchSampler):
    """Shuffles its batches with a generator of its own, over a sampler that has one, too."""

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator().manual_seed(8)
        super().__init__(RandomSampler(range(count), generator=torch.Generator().manual_seed(9)), 2, False)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches), generator=self.generator)])


def test_a_batch_sampler_with_a_generator_repeats_after_a_restart() -> None:
    def make() -> ShardedDataLoader:
        loader = DataLoader(numbers(12), batch_sampler=Buckets(12))
        return ShardedDataLoader(loader, rank=1, world_size=2, data_seed=7)

    whole = make()
    first, second = epoch(whole), epoch(whole)
    assert first != second
    loader = make()
    assert epoch(loader) == first
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == second
    ranks = shares(DataLoader(numbers(12), batch_sampler=Buckets(12)), 2)
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(12))


class Drawn(Sampler[int]):
    """Shuffles with a generator of its own, of whatever make."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.own.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 12


class Named(Drawn):
    """The same, under the name that torch's samplers have for it."""

    def __init__(self, generator: Any) -> None:
        super().__init__(generator)
        self.generator = generator


@pytest.mark.parametrize("kind", [Drawn, Named])
@pytest.mark.parametrize("make", [numpy.random.default_rng, numpy.random.RandomState, random.Random])
def test_samplers_with_a_generator_of_another_library_repeat_after_a_restart(kind: Any, make: Any) -> None:
    def loader() -> ShardedDataLoader:
        batches = BatchSampler(kind(make(3)), 2, drop_last=False)
        return ShardedDataLoader(DataLoader(numbers(12), batch_sampler=batches), data_seed=7)

    whole = loader()
    first, second = epoch(whole), epoch(whole)
    assert first != second
    resumed = loader()
    resumed.load_state_dict({"seed": 7, "epoch": 1, "consumed": 4})
    assert epoch(resumed) == second[2:]
    own = make(3)
    held, expected = kind(own), kind(make(3))
    epoch(ShardedDataLoader(DataLoader(numbers(12), batch_size=2, sampler=held), data_seed=7))
    assert list(held) == list(expected)  # it draws for others as if nothing had been


class DrawnStream(IterableDataset[torch.Tensor]):
    """Shuffles with NumPy's generator."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, self.generator.permutation(12).tolist())


def test_a_stream_with_numpys_generator_goes_on_in_its_order() -> None:
    whole = ShardedDataLoader(DataLoader(DrawnStream(), batch_size=2), data_seed=7)
    first, second = epoch(whole), epoch(whole)
    assert first != second
    resumed = ShardedDataLoader(DataLoader(DrawnStream(), batch_size=2), data_seed=7)
    resumed.load_state_dict({"seed": 7, "epoch": 1, "consumed": 4})
    assert epoch(resumed) == second[2:]


@pytest.mark.parametrize("dataset", [Numbers(23), Stream(23)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_position_resumes_in_mid_epoch(dataset: Any, num_workers: int) -> None:
    shuffle = isinstance(dataset, Numbers)

    def make() -> ShardedDataLoader:
        loader = DataLoader(dataset, batch_size=2, shuffle=shuffle or None, num_workers=num_workers)
        return ShardedDataLoader(loader, rank=1, world_size=2, data_seed=7)

    whole = make()
    expected = epoch(whole) + epoch(whole)
    loader = make()
    seen: list[list[int]] = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 4:
            state = loader.state_dict()
            break
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert seen + epoch(resumed) + epoch(resumed) == expected


def test_a_position_resumes_on_another_number_of_ranks() -> None:
    def make(rank: int, world_size: int) -> ShardedDataLoader:
        loader = DataLoader(numbers(24), batch_size=2, shuffle=True)
        return ShardedDataLoader(loader, rank=rank, world_size=world_size, data_seed=7)

    start = [make(rank, 2) for rank in range(2)]
    seen: list[int] = []
    for loader in start:
        for count, batch in enumerate(loader):
            seen += batch[0].tolist()
            if count == 2:
                break
    state = start[0].state_dict()
    assert state["consumed"] == 12
    for rank in range(3):
        loader = make(rank, 3)
        loader.load_state_dict(state)
        seen += [i for batch in epoch(loader) for i in batch]
    assert sorted(seen) == list(range(24))


def test_skipping_reads_nothing_and_counts_epochs_with_the_original() -> None:
    dataset = Numbers(12)
    loader = ShardedDataLoader(DataLoader(dataset, batch_size=2, shuffle=True), rank=0, world_size=2, data_seed=7)
    first, second = epoch(loader), epoch(loader)
    loader.set_epoch(0)
    dataset.read.clear()
    rest = skip_first_batches(loader, 2)
    assert len(rest) == 1
    assert epoch(rest) == first[2:]
    assert len(dataset.read) == 2
    assert epoch(loader) == second


def test_a_loop_that_breaks_off_sees_other_samples_the_next_time() -> None:
    loader = ShardedDataLoader(DataLoader(numbers(24), batch_size=4, shuffle=True), data_seed=5)
    again = ShardedDataLoader(DataLoader(numbers(24), batch_size=4, shuffle=True), data_seed=5)
    first, second, third = epoch(again), epoch(again), epoch(again)
    assert [next(iter(loader))[0].tolist() for _ in range(2)] == [first[0], second[0]]
    state = loader.state_dict()
    assert epoch(loader) == third
    loader.load_state_dict(state)
    assert epoch(loader) == second[1:], "what was saved after a loop goes on in it"
    loader.set_epoch(0)
    next(iter(loader))
    loader.set_epoch(0)
    assert epoch(loader) == first


@pytest.fixture(autouse=True)
def _no_loop_before() -> None:
    GradientState._reset_state()


def shuffled(*, world_size: int = 1) -> ShardedDataLoader:
    loader = DataLoader(numbers(23), batch_size=4 // world_size, shuffle=True)
    return ShardedDataLoader(loader, world_size=world_size, data_seed=5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("look", [list, lambda loader: next(iter(loader))])
def test_a_look_within_a_loop_leaves_the_loop_as_it_is(look: Any, has_optimizer: bool, world_size: int) -> None:
    state = GradientState()
    state.has_optimizer = has_optimizer
    loader, whole = shuffled(world_size=world_size), shuffled(world_size=world_size)
    inner = ShardedDataLoader(DataLoader(numbers(1)))
    first, second = epoch(whole), epoch(whole)
    ends = [(whole.end_of_dataloader, whole.remainder) for _ in whole]
    read: list[list[int]] = []
    seen = []
    for batch in loader:
        position = loader.state_dict()
        assert position == {"seed": 5, "epoch": 0, "consumed": 4 * len(read) + 4}
        look(loader)
        assert state.active_dataloader is loader
        seen.append((state.end_of_dataloader, loader.remainder))
        for _ in inner:
            look(loader)
            assert state.active_dataloader is inner
        next(iter(loader))
        assert look is list or loader.state_dict() == position
        read.append(batch[0].tolist())
    assert (read, seen) == (first, ends)
    assert not state.in_dataloader
    assert epoch(loader) == second


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_counts_as_an_epoch_is_the_same_at_any_number_of_ranks(world_size: int) -> None:
    state = GradientState()
    loader = shuffled(world_size=world_size)

    def look() -> int:
        next(iter(loader))
        return loader.epoch

    assert [look(), look()] == [0, 1], "no optimizer was prepared: every iteration counts"
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter]), scaler=None)
    assert [look(), look()] == [1, 1]
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert [look(), look()] == [2, 2]
    list(loader)
    assert loader.epoch == 3, "what came to its end counts anyway"
    assert look() == 3
    left_lying = iter(loader)
    next(left_lying)
    for expected in (4, 5):
        list(loader)
        assert loader.epoch == expected
    del left_lying
    assert not state.in_dataloader and look() == 5
    state.begin_run()
    assert look() == 6, "a later Accelerator has no optimizer yet"
    optimizer.step()
    assert [look(), look()] == [7, 7], "and knows of the earlier one's as soon as that steps"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_look_after_loading_uses_nothing_up(world_size: int) -> None:
    state = GradientState()
    state.has_optimizer, state.updates = True, 7
    whole, loader = shuffled(world_size=world_size), shuffled(world_size=world_size)
    first, second, third = epoch(whole), epoch(whole), epoch(whole)
    next(iter(loader))
    assert loader.state_dict()["consumed"] == 0, "what is saved after a look begins where it began"
    loader.load_state_dict({"seed": 5, "epoch": 0, "consumed": 8})
    for _ in range(2):
        next(iter(loader))
        assert loader.state_dict() == {"seed": 5, "epoch": 0, "consumed": 8}
        loader.set_epoch(0)
    assert epoch(loader) == first[2:]
    assert epoch(loader) == second
    loader.load_state_dict({"seed": 5, "epoch": 1, "consumed": 8})
    assert next(iter(loader))[0].tolist() == second[2]
    state.updates += 1
    assert loader.state_dict()["consumed"] == 12
    assert epoch(loader) == third
    loader.set_epoch(0)
    assert epoch(loader) == first


def test_a_script_that_skips_for_itself_after_loading_skips_once() -> None:
    def make() -> ShardedDataLoader:
        return ShardedDataLoader(DataLoader(numbers(24), batch_size=4, shuffle=True), data_seed=5)

    whole = make()
    first, second = epoch(whole), epoch(whole)
    loader = make()
    for number, _ in enumerate(loader):
        if number == 1:
            break
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    rest = iter(skip_first_batches(resumed, 2))
    assert next(rest)[0].tolist() == first[2]
    once_more = make()
    once_more.load_state_dict(resumed.state_dict())  # of the loader that was prepared, which knows of the other
    assert [batch[0].tolist() for batch in rest] == epoch(once_more) == first[3:]
    assert epoch(resumed) == epoch(once_more) == second


@pytest.mark.parametrize("bound_before", [False, True])
def test_accelerates_function_that_skips_never_reads_in_another_order(bound_before: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    teach_libraries()
    loader = ShardedDataLoader(DataLoader(numbers(24), batch_size=4, shuffle=True), data_seed=5)
    first = epoch(ShardedDataLoader(DataLoader(numbers(24), batch_size=4, shuffle=True), data_seed=5))
    if not bound_before:
        assert epoch(accelerate.skip_first_batches(loader, 2)) == first[2:]
        return
    with pytest.raises(
        DataError, match=r"(.|\n)*hint: iterate over the loader, and skip batches with accelerator.skip_first_batches"
    ):
        epoch(accelerate.skip_first_batches.__wrapped__(loader, 2))


def test_skipping_on_a_plain_loader() -> None:
    loader = DataLoader(numbers(7), batch_size=2)
    assert epoch(skip_first_batches(loader, 2)) == [[4, 5], [6]]


def test_the_gradient_state_follows_the_innermost_loop_and_forgets_broken_ones() -> None:
    state = GradientState()
    outer = ShardedDataLoader(DataLoader(numbers(2), batch_size=1))
    inner = ShardedDataLoader(DataLoader(numbers(1), batch_size=1))
    assert not state.end_of_dataloader
    for _ in outer:
        assert not state.end_of_dataloader
        for _ in inner:
            assert state.end_of_dataloader
        break
    assert not state.in_dataloader


@pytest.mark.parametrize(
    ("loader", "options", "error", "message"),
    [
        (DataLoader(numbers(8), batch_size=3), {"split_batches": True}, ConfigError, "3 samples does not divide"),
        (DataLoader(numbers(8), batch_sampler=[[0]]), {"split_batches": True}, ConfigError, "its own batches"),
        (
            DataLoader(numbers(8), sampler=DistributedSampler(numbers(8), num_replicas=2, rank=0)),
            {},
            DataError,
            "DistributedSampler",
        ),
    ],
)  # fmt: skip
def test_loaders_that_cannot_be_divided(loader: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardedDataLoader(loader, rank=0, world_size=2, data_seed=0, **options)


def test_positions_of_something_else_are_refused() -> None:
    loader = ShardedDataLoader(DataLoader(numbers(4)))
    with pytest.raises(DataError, match="a data loader must have the keys seed, epoch and consumed"):
        loader.load_state_dict({"_sampler_iter_yielded": 3})


def test_a_seed_comes_from_the_loaders_generator() -> None:
    generator = torch.Generator().manual_seed(41)
    loader = ShardedDataLoader(DataLoader(numbers(9), shuffle=True, generator=generator))
    order = [i for batch in epoch(loader) for i in batch]
    assert order == list(RandomSampler(range(9), generator=torch.Generator().manual_seed(41)))
