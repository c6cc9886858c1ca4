"""Loops over prepared loaders on several ranks: rank 0 reads for all, and steps that are not filled up.

pytest tests/api/test_loops.py
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import random
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration, ParallelismConfig
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from fullshard.api import Accelerator
from fullshard.api.data import ShardedDataLoader
from fullshard.core.errors import ConfigError, DataError
from tests.distributed import run_ranks


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Unseen(Dataset[int]):
    """May only be read on rank 0."""

    def __init__(self, rank: int, fails_at: int = -1) -> None:
        self.rank, self.fails_at = rank, fails_at

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        assert self.rank == 0
        if index == self.fails_at:
            raise OSError("the disk is gone")
        return index


class WithoutLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def accelerator(**loader: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loader))


def numbers(count: int) -> Any:
    """A dataset of them."""
    return range(count)


def lengths(samples: list[int]) -> torch.Tensor:
    """Collates to what differs in shape from batch to batch."""
    return torch.tensor([*samples, *[-1] * max(samples)])


def _epochs(kind: str, count: int, how: dict[str, Any]) -> Any:
    made = accelerator(**how)
    warnings.simplefilter("ignore")  # of streams, which are always even
    data: Any = Stream(count) if kind == "stream" else list(range(count))
    loader = made.prepare(
        DataLoader(data, batch_size=4, shuffle=kind == "shuffled", collate_fn=lengths if kind == "ragged" else None)
    )
    seen = [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for _ in range(2) for batch in loader]
    return seen, len(loader) if kind != "stream" else 0


@pytest.mark.parametrize("kind", ["shuffled", "stream", "ragged"])
@pytest.mark.parametrize("how", [{}, {"split_batches": True}, {"even_batches": False}], ids=str)
def test_what_rank_0_reads_for_all_is_what_each_would_have_read(kind: str, how: dict[str, Any]) -> None:
    for count in (1, 9, 16):
        alone = run_ranks(_epochs, 2, kind, count, {**how, "dispatch_batches": False})
        assert run_ranks(_epochs, 2, kind, count, {**how, "dispatch_batches": True}) == alone


class Shuffled(IterableDataset[int]):
    """A stream in an order that no seed gives; of each worker its part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        mine = range(21) if worker is None else range(worker.id, 21, worker.num_workers)
        return iter(random.Random().sample(mine, len(mine)))


def _shuffled(num_workers: int, tiles: int) -> list[list[int]]:
    parallelism = ParallelismConfig(dp_shard_size=2, tp_size=tiles) if tiles > 1 else None
    made = Accelerator(cpu=True, parallelism_config=parallelism)
    loader = made.prepare(DataLoader(Shuffled(), batch_size=4, num_workers=num_workers))
    this: Any = multiprocessing.current_process()
    with mock.patch.dict(this._config, daemon=False):  # or it may not have workers
        return [made.gather_for_metrics(batch).tolist() for batch in loader]


@pytest.mark.parametrize(
    ("ranks", "num_workers", "tiles"), [(2, 0, 1), pytest.param(2, 2, 1, marks=pytest.mark.full), (4, 0, 2)]
)
def test_a_stream_in_an_order_of_each_ranks_own_loses_nothing(ranks: int, num_workers: int, tiles: int) -> None:
    first, *others = run_ranks(_shuffled, ranks, num_workers, tiles)
    assert sorted(number for step in first for number in step) == list(range(21))
    assert all(other == first for other in others)


def _only_rank_0_reads(fails_at: int) -> Any:
    made = accelerator(dispatch_batches=True)
    loader = made.prepare(DataLoader(Unseen(made.process_index, fails_at), batch_size=2))
    try:
        return [batch.tolist() for batch in loader]
    except (OSError, DataError) as error:
        return f"{type(error).__name__}: {error}"


def test_only_rank_0_touches_the_dataset() -> None:
    assert run_ranks(_only_rank_0_reads, 2, -1) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]


def test_a_failure_of_rank_0_reaches_all() -> None:
    first, second = run_ranks(_only_rank_0_reads, 2, 5)
    assert first == "OSError: the disk is gone"
    assert second.startswith(
        "DataError: rank 0, which reads the data for all ranks (dispatch_batches), failed: OSError"
    )


def _without_length() -> Any:
    loader = accelerator(dispatch_batches=True).prepare(DataLoader(numbers(9), batch_size=2, sampler=WithoutLength()))
    return [batch.tolist() for batch in loader]


def test_a_sampler_without_a_length_can_be_read_by_rank_0_for_all() -> None:
    assert run_ranks(_without_length, 2) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]


class Endless(Sampler[int]):
    """Goes on with another order at the end of each."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(6).tolist()


class EndlessWithoutLength(Sampler[int]):
    __iter__ = Endless.__iter__


def _endless(kind: Any, resumes: bool) -> list[list[int]]:
    torch.manual_seed(random.SystemRandom().randrange(2**31))  # ranks that draw on their own
    loader = accelerator(data_seed=3).prepare(DataLoader(numbers(6), batch_size=3, sampler=kind()))
    if resumes:
        for number, _ in enumerate(loader):
            if number == 1:
                break
        loader.load_state_dict(loader.state_dict())
    return [batch.tolist() for batch in itertools.islice(loader, 4)]


@pytest.mark.parametrize("kind", [Endless, EndlessWithoutLength])
def test_a_sampler_may_have_no_end(kind: Any) -> None:
    assert all(len(batch) == 3 for batch in _endless(kind, False))
    (first, second), resumed = run_ranks(_endless, 2, kind, False), run_ranks(_endless, 2, kind, True)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [list(range(6))] * 4
    assert [rank[:2] for rank in resumed] == [first[2:], second[2:]]


class OfAnotherLength(Sampler[int]):
    """Each rank would end it somewhere else."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1500 - 900 * dist.get_rank()))


def _of_another_length() -> int:
    loader = accelerator(data_seed=3).prepare(DataLoader(numbers(1500), batch_size=150, sampler=OfAnotherLength()))
    return sum(len(batch) for batch in loader)


def test_a_sampler_ends_where_rank_0_has_its_end() -> None:
    assert run_ranks(_of_another_length, 2, timeout=60) == [750, 750]


def _position(dispatch: bool) -> Any:
    loader = accelerator(dispatch_batches=dispatch).prepare(DataLoader(numbers(32), batch_size=4, shuffle=True))
    begun = [batch.tolist() for batch in itertools.islice(loader, 2)]
    loader.load_state_dict({**loader.state_dict()})
    return begun, [batch.tolist() for batch in loader]


def test_a_position_is_the_same_whoever_reads() -> None:
    assert run_ranks(_position, 2, True) == run_ranks(_position, 2, False)


@pytest.mark.parametrize("count", [1, 3, 8, 9, 16, 21, 24])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_batches_are_accelerates(count: int, drop_last: bool, split_batches: bool, world_size: int) -> None:
    accelerate_data = pytest.importorskip("accelerate.data_loader")
    loader = DataLoader(numbers(count), batch_size=4 * (world_size if split_batches else 1), drop_last=drop_last)
    for rank in range(world_size):
        theirs = accelerate_data.prepare_data_loader(
            loader, torch.device("cpu"), world_size, rank, split_batches=split_batches, even_batches=False
        )
        ours = ShardedDataLoader(
            loader, rank=rank, world_size=world_size, split_batches=split_batches, even_batches=False
        )
        expected = [batch.tolist() for batch in theirs]
        assert [batch.tolist() for batch in ours] == expected
        assert len(ours) == len(expected)


def test_a_loader_can_be_told_at_any_time() -> None:
    loader = ShardedDataLoader(DataLoader(numbers(5), batch_size=2), rank=1, world_size=2)
    sampler: Any = loader.batch_sampler
    assert len(list(loader)) == 2 and sampler.even_batches
    sampler.even_batches = False
    assert len(list(loader)) == len(loader) == 1


def _loop(count: int) -> tuple[int, list[str]]:
    made = accelerator(even_batches=False)
    _, loader = made.prepare(nn.Linear(1, 1), DataLoader(numbers(count), batch_size=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = sum(1 for _ in loader)
    return steps, [str(one.message) for one in caught if one.category is UserWarning]


def _looked_at_by_rank_0() -> list[int]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(16)), batch_size=4, shuffle=True)
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), data)
    if accelerator.is_main_process:
        next(iter(loader))
    return [int(i) for (x,) in loader for i in x]


def test_a_look_that_one_rank_takes_alone_leaves_the_order_alone() -> None:
    """With Accelerate it waits for the other ranks."""
    first, second = run_ranks(_looked_at_by_rank_0, 2, timeout=30)
    assert sorted([*first, *second]) == list(range(16))


def test_uneven_steps_are_said_before_a_rank_waits_for_another() -> None:
    first, second = run_ranks(_loop, 2, 3)
    assert (first[0], second[0]) == (2, 1)
    assert all("gives some ranks more batches in this epoch" in lines[0] for _, lines in (first, second))
    assert run_ranks(_loop, 2, 4) == [(2, []), (2, [])]


def _joined(count: int) -> tuple[int, str]:
    made = accelerator()
    model, loader = made.prepare(nn.Linear(1, 1), DataLoader(numbers(count), batch_size=1))
    steps, error = 0, ""
    try:
        with made.join_uneven_inputs([model], even_batches=False):
            for _ in loader:
                steps += 1
    except ConfigError as refusal:
        error = str(refusal)
    assert loader.batch_sampler.even_batches and len(list(loader)) == 2
    return steps, error


def test_an_uneven_loop_of_a_sharded_model_is_an_error_on_every_rank() -> None:
    for rank, (steps, error) in enumerate(run_ranks(_joined, 2, 3)):
        assert steps == 0 and error.startswith(f"rank {rank}: even_batches=False gives some ranks more batches")
        assert "a sharded model must run on all ranks" in error
    assert run_ranks(_joined, 2, 4) == [(2, "")] * 2


def _streams_are_even() -> list[str]:
    made = accelerator(even_batches=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = made.prepare(DataLoader(Stream(3), batch_size=1))
    assert len(list(loader)) == 2
    return [str(one.message) for one in caught if one.category is UserWarning]


def test_a_stream_cannot_be_uneven() -> None:
    for (line,) in run_ranks(_streams_are_even, 2):
        assert "only supported for map-style datasets" in line


def test_the_order_that_was_not_asked_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Accelerator(cpu=True).prepare(DataLoader(numbers(4), shuffle=True))
    made = accelerator(use_seedable_sampler=False)
    made.prepare(DataLoader(numbers(4)))
    assert "use_seedable_sampler" not in capsys.readouterr().err
    made.prepare(DataLoader(numbers(4), shuffle=True), DataLoader(numbers(5), shuffle=True))
    assert capsys.readouterr().err.count("use_seedable_sampler=False has no effect") == 1


def test_joining_says_what_it_has_no_effect_on() -> None:
    made = accelerator()
    made.prepare(DataLoader(Stream(3)))
    with (
        pytest.warns(UserWarning, match="only supported for map-style datasets"),
        pytest.warns(UserWarning, match="no effect on Linear"),
        made.join_uneven_inputs([nn.Linear(1, 1)], even_batches=False),
    ):
        pass


def test_batches_go_to_the_device_unless_they_are_to_stay() -> None:
    loader, places = DataLoader(TensorDataset(torch.empty(1, device="meta"))), accelerator()
    stays = Accelerator(cpu=True, device_placement=False)
    for prepared in (stays.prepare(loader), places.prepare_data_loader(loader, device_placement=False)):
        assert [value.is_meta for (value,) in prepared] == [True]
    with pytest.raises(NotImplementedError, match="meta tensor"):  # which cannot be copied
        list(places.prepare(loader))


def test_no_batch_is_cut_into_slices() -> None:
    with pytest.raises(ConfigError, match="slice_fn_for_dispatch is not supported"):
        accelerator().prepare_data_loader(DataLoader(numbers(4)), slice_fn_for_dispatch=len)


def _pickled() -> Any:
    made = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = made.prepare(model, optimizer, DataLoader(numbers(4)))
    for _ in loader:
        copied = pickle.loads(pickle.dumps(made))  # noqa: S301 -- our own
    assert copied.state is made.state and vars(copied.gradient_state) is vars(made.gradient_state)
    assert (copied.num_processes, copied.device, copied.mixed_precision) == (2, made.device, "bf16")
    copied.prepare(nn.Linear(2, 2))
    return copied.gather(torch.tensor([made.process_index])).tolist(), len(copied._models), len(made._models)


def test_an_accelerator_can_be_pickled_without_what_it_prepared() -> None:
    assert run_ranks(_pickled, 2) == [([0, 1], 1, 1)] * 2
