"""What scripts do by habit gives what Accelerate gives them: each of these runs with both, on one rank and on two.

pytest tests/api/test_accelerate_habits.py
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from fullshard.api.collectives import broadcast_object
from tests.distributed import preload, run_ranks

preload("accelerate")

Habit = Callable[[Any], Any]


def _library(name: str) -> SimpleNamespace:
    """The names that scripts import, from one of the two, in a process that has seen no Accelerator yet."""
    from accelerate.state import AcceleratorState, GradientState

    from fullshard.api import accelerator_state

    accelerator_state.AcceleratorState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options = importlib.import_module("fullshard.api" if name == "fullshard" else "accelerate.utils")
    return SimpleNamespace(name=name, Accelerator=importlib.import_module(name).Accelerator, options=options)


def _with_both(habit: Habit) -> tuple[Any, Any]:
    return habit(_library("accelerate")), habit(_library("fullshard"))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


# -- several Accelerators ---------------------------------------------------------------------------------------


def metrics_of_a_second_accelerator(library: Any) -> Any:
    loader = library.Accelerator(cpu=True).prepare(DataLoader(numbers(11), batch_size=4))
    other = library.Accelerator(cpu=True)
    return [other.gather_for_metrics(x).tolist() for (x,) in loader]


def steps_of_a_second_accelerator(library: Any) -> Any:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = library.Accelerator(cpu=True)
    model, optimizer, loader = first.prepare(model, optimizer, DataLoader(numbers(14), batch_size=1))
    other = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
    steps = []
    for (x,) in loader:
        with other.accumulate(model):
            other.backward(model(x[None].float()).sum())
            optimizer.step()
            optimizer.zero_grad()
            steps.append((first.sync_gradients, first.gradient_accumulation_steps))
    return steps


def a_run_after_one_that_ended_within_a_step(library: Any) -> Any:
    begun = library.Accelerator(cpu=True, gradient_accumulation_steps=4)
    with begun.accumulate():
        pass
    following = library.Accelerator(cpu=True, gradient_accumulation_steps=4)
    synced = []
    for _ in range(4):
        with following.accumulate():
            synced.append(following.sync_gradients)
    return synced


# -- loops ------------------------------------------------------------------------------------------------------


def steps_that_each_take_the_first_batch(library: Any) -> Any:
    torch.manual_seed(3)
    accelerator, model = library.Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(numbers(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = set()
    for _ in range(3):
        (x,) = next(iter(loader))
        seen.add(tuple(x.tolist()))
        accelerator.backward(model(x[:, None].float()).sum())
        optimizer.step()
        optimizer.zero_grad()
    return len(seen)


def a_script_that_resumes_within_an_epoch(library: Any) -> Any:
    made = [_prepared(library) for _ in range(2)]
    (accelerator, _, begun), (resumed, _, loader) = made
    with tempfile.TemporaryDirectory() as own:
        directory = broadcast_object(own)
        for number, _ in enumerate(begun):
            if number == 1:
                accelerator.save_state(directory)
                break
        resumed.wait_for_everyone()
        resumed.load_state(directory)
        resumed.wait_for_everyone()
    loops = [resumed.skip_first_batches(loader, 2), loader]
    return [x.tolist() for loop in loops for (x,) in loop]


def _prepared(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(16), batch_size=2))
    return accelerator, model, loader


# -- values -----------------------------------------------------------------------------------------------------


def parts_of_a_dataset(library: Any) -> Any:
    from datasets import Dataset

    accelerator = library.Accelerator(cpu=True)
    parts = []
    for count in (1, 4, 5):
        for padding in (False, True):
            whole = Dataset.from_dict({"x": list(range(count))})
            with accelerator.split_between_processes(whole, apply_padding=padding) as part:
                parts.append((type(part).__name__, part["x"][:]))
    return parts


def parts_of_anything_else(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    parts = []
    for whole in ([1], [1, 2, 3], torch.arange(3), {"a": [1, 2, 3], "b": ["x", "y", "z"]}, [], "abc"):
        with accelerator.split_between_processes(whole) as part:
            parts.append(part.tolist() if isinstance(part, torch.Tensor) else part)
    return parts


class Average:
    """What is no scheduler, though it has its methods."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def what_prepare_leaves_alone(library: Any) -> Any:
    average, text = Average(), "text"
    accelerator = library.Accelerator(cpu=True)
    return [kept is given for kept, given in zip(accelerator.prepare(average, text), (average, text), strict=True)]


class Augmented(Dataset[int]):
    """Another one in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index


def a_dataset_that_is_told_the_epoch(library: Any) -> Any:
    loader = library.Accelerator(cpu=True).prepare(DataLoader(Augmented(), batch_size=2))
    return [[x.tolist() for x in loader] for _ in range(2)]


class Backwards(BatchSampler):
    """With a way of its own, and a short batch at the end."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch[::-1] for batch in super().__iter__()])


class Named(BatchSampler):
    """With nothing of its own in how it goes through its batches."""


def metrics_with_a_batch_sampler_of_ones_own(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    seen = []
    for kind in (Backwards, Named):
        for count in (3, 8, 11, 14):
            loader = DataLoader(numbers(count), batch_sampler=kind(SequentialSampler(range(count)), 4, False))
            loader = accelerator.prepare(loader)
            seen.append((len(loader), loader.total_batch_size, loader.total_dataset_length))
            for (x,) in loader:
                rows = [f"row {number}" for number in x.tolist()]
                seen += [accelerator.gather_for_metrics(x).tolist(), accelerator.gather_for_metrics(rows)]
    return seen


def what_a_prepared_loader_shows(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    data = numbers(11)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=4, drop_last=True))
    both = [(one.dataset is data, one.total_dataset_length, one.iteration, one.num_workers) for one in (loader, stream)]
    of_stream = (type(stream.dataset), stream.batch_size, stream.drop_last, stream.batch_sampler.batch_size)
    sampler = loader.batch_sampler
    return both, of_stream, loader.total_batch_size, sampler.batch_size, sampler.drop_last


class Stream(IterableDataset[int]):
    """Numbers, as many as it says."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "habit",
    [
        metrics_of_a_second_accelerator,
        steps_of_a_second_accelerator,
        a_run_after_one_that_ended_within_a_step,
        steps_that_each_take_the_first_batch,
        a_script_that_resumes_within_an_epoch,
        metrics_with_a_batch_sampler_of_ones_own,
        what_a_prepared_loader_shows,
        parts_of_a_dataset,
        what_prepare_leaves_alone,
        parts_of_anything_else,
        a_dataset_that_is_told_the_epoch,
    ],
)
def test_the_same_as_with_accelerate(habit: Habit, world_size: int) -> None:
    for theirs, ours in run_ranks(_with_both, world_size, habit):
        assert ours == theirs
