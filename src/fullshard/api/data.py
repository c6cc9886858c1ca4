"""A data loader whose batches are divided over the ranks.

`ShardedDataLoader` takes any `torch.utils.data.DataLoader` and gives every rank its share of each step, with a number
of steps that is the same on all ranks (a rank that stopped early would leave the others waiting in a collective). The
order depends on a seed and the epoch alone, never on the number of ranks, so a run can resume on any number of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fullshard.api import torch_private
from fullshard.api.collectives import broadcast_object, send_to_device
from fullshard.api.dealing import Real
from fullshard.api.dispatching import dispatched
from fullshard.api.forwarding import forwarded
from fullshard.api.shares import Share
from fullshard.api.state import GradientState
from fullshard.core.errors import DataError
from fullshard.features.watchdog import ORDERS

_END = object()
_NUMBERS = itertools.count()
_INHERITED = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class ShardedDataLoader(DataLoader[Any]):
    """A rank's part of a data loader.

    Every step deals `batch_size` samples to each rank (or `batch_size` samples over all ranks with `split_batches`).
    An incomplete last step is filled up with samples from the start of the epoch, unless the loader drops it or is told
    to leave it uneven; `remainder` tells how many of its samples are real. Samplers with a `generator` (so all of
    torch's) are seeded with seed + epoch, and so are those that other samplers hold, NumPy's and Python's too, and the
    global ones, while they draw; their order is rank 0's.

    The epoch advances after each iteration, by the same rule at any number of ranks: one that came to its end counts;
    so does one that was broken off, unless an optimizer was prepared and none was to step since it began. That was a
    look, maybe of one rank alone: the next iteration begins where it began.

    Args:
        loader: the loader to divide.
        rank: this rank.
        world_size: number of ranks.
        device: where batches are put; None leaves them where they are.
        split_batches: the loader's batch size is that of all ranks together.
        data_seed: base seed of the order; by default that of the loader's own generator, else torch's initial seed.
        non_blocking: copy to the device without waiting (pays off with pinned memory).
        gradient_state: told where in the epoch the loop is.
        synchronize: called at the start of every epoch, on all ranks.
        even_batches: fill up an incomplete last step, so that all ranks have as many batches of the same size. It can
            be changed at any time, as `loader.batch_sampler.even_batches`. Iterable datasets are always even.
        dispatch_batches: rank 0 reads the batches of all ranks and sends each its own. None: that of an iterable
            dataset, which may give every rank another order.
        on_uneven: called at the start of an epoch in which some ranks have more batches than others.

    Raises:
        ConfigError: `split_batches` with a batch size that is not a multiple of the world size, or with batches of the
            user's own making; or workers that are forked, beside a device that does not bear it.
        DataError: the loader divides its data over the ranks already.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        split_batches: bool = False,
        data_seed: int | None = None,
        non_blocking: bool = False,
        gradient_state: GradientState | None = None,
        synchronize: Callable[[], None] | None = None,
        even_batches: bool = True,
        dispatch_batches: bool | None = False,
        on_uneven: Callable[[], None] | None = None,
    ) -> None:
        _refuse_sharded(loader, world_size)
        share = Share.of(loader, rank, world_size, split_batches)
        dispatch = isinstance(loader.dataset, IterableDataset) if dispatch_batches is None else dispatch_batches
        share.deal.for_all = dispatch and world_size > 1
        share.deal.even = even_batches or share.is_always_even
        inherited = {name: getattr(loader, name) for name in _INHERITED if hasattr(loader, name)}
        self.base_dataloader: DataLoader[Any] = DataLoader(**share.arguments(loader), **inherited)
        # Scripts read their own settings from it; the other loader does the reading.
        vars(self).update(vars(self.base_dataloader) | share.shown(loader))
        self.share = share
        self._place = _LoopPlace()  # copies made by `skipping` share it
        self.end_of_dataloader = False
        self.order_number = 0  # of this iteration's order: ranks with another read other samples than they should
        self._real: Real | None = None  # of the step just handed out, if it was filled up
        self._target = device
        self._non_blocking = non_blocking
        self.gradient_state = gradient_state or GradientState()
        self._synchronize = synchronize
        self._on_uneven = on_uneven
        self._skip_each = 0
        seed = share.initial_seed() if data_seed is None else data_seed
        said = (seed, next(_NUMBERS))
        self._seed, self._number = broadcast_object(said) if world_size > 1 else said

    epoch: int = forwarded("_place.epoch")
    """Iterations so far, or the number given to `set_epoch`."""
    iteration: int = forwarded("epoch")
    """The epoch, under Accelerate's name."""

    @property
    def total_batch_size(self) -> int:
        """Samples per step over all ranks (batches per step, if the loader makes batches of no stated size)."""
        return self.share.deal.round_size * self.share.samples_per_item

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset. Raises `TypeError` if it has no length."""
        return len(cast("Sized", self.dataset))

    @property
    def remainder(self) -> int | None:
        """Real samples of the step just handed out if it was filled up, else None."""
        return None if self._real is None else self._real.samples

    def real_rows(self, gathered: int) -> int:
        """Return how many rows gathered in the current step are no repetitions: the first ones."""
        ranks = self.share.deal.world_size
        return gathered if self._real is None or ranks == 1 else self._real.rows(gathered, ranks)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; one that goes on where a loaded position is goes on there."""
        self._place.set_epoch(epoch, self._updates)

    def __len__(self) -> int:
        return max(0, self.share.deal.rounds(self.share.length()) - self._skip_each)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._synchronize is not None:
            self._synchronize()
        if self._on_uneven is not None and not self.share.deal.even and self._is_uneven():
            self._on_uneven()
        place, state, deal = self._place, self.gradient_state, self.share.deal
        around = (self.end_of_dataloader, self._real, self.order_number) if place.under_way else None
        before, updates = place.copy(), state.updates
        skip = place.begin(self._skip_each * deal.round_size, self._updates)
        discard, last_real = self.share.start_epoch(self._seed, self.epoch, skip)
        if deal.for_all:
            iterator = dispatched(functools.partial(self._read, discard), last_real, deal.world_size)
        else:
            iterator = self._read(discard)
        loops = state.enter_loader(self)
        self.order_number = self.epoch if self.share.depends_on_epoch else 0
        place.under_way.append(self)
        self._note_order()
        try:
            following: Any = next(iterator, _END)
            while following is not _END:
                batch, real = following
                following = next(iterator, _END)
                self.end_of_dataloader = following is _END
                real = last_real() if self.end_of_dataloader and real is None else real
                self._real = real if deal.even and real is not None and real.samples != real.dealt else None
                place.consumed += deal.round_size
                own = place.copy()
                yield batch if self._target is None else send_to_device(batch, self._target, self._non_blocking)
                if place.was_looked_at:
                    place.put_back(own)
            place.end()
        finally:
            place.under_way.remove(self)
            if self not in place.under_way:
                self.end_of_dataloader, self._real, self.order_number = False, None, 0
                state.leave_loader(self)
            elif around is not None:
                self.end_of_dataloader, self._real, self.order_number = around
            self._note_order()
            if around is not None and place.under_way:  # within a loop over the same loader, which goes on
                state.resume_loops(loops, self)
                place.end_within(before, is_look=updates == state.updates)

    @property
    def _updates(self) -> int | None:
        """The number of optimizer updates so far; None: none was prepared."""
        return self.gradient_state.updates if self.gradient_state.has_optimizer else None

    def _is_uneven(self) -> bool:
        length = self._length()
        return length is not None and self.share.deal.is_uneven(length)

    def _length(self) -> int | None:
        try:
            return self.share.length()
        except (TypeError, NotImplementedError):  # a sampler without a length, which rank 0 alone reads
            return None

    def _note_order(self) -> None:
        """Note the innermost iteration, for the backward of all ranks, if they must all be in the same one."""
        deal, is_stream = self.share.deal, isinstance(self.dataset, IterableDataset)
        if deal.world_size == 1 or deal.for_all or is_stream or not (deal.even and self.share.depends_on_epoch):
            return
        name = (self._number, self._length())
        if self._place.under_way:
            ORDERS[name] = self._place.under_way[-1].order_number
        else:
            ORDERS.pop(name, None)

    def _read(self, discard: int) -> Iterator[tuple[Any, Real | None]]:
        """Yield batches, with the real part of their rounds if it is known; skip the loader's first ones."""
        given = iter(self.base_dataloader)
        self.share.note_begun()
        for _ in range(discard):
            next(given, _END)
        for batch in given:
            yield from self.share.unpack(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the loop: seed, epoch and items used. Valid at any number of ranks."""
        consumed = self._place.position(self._updates)
        return {"seed": self._seed, "epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position: the next iteration starts after the last batch that was handed out.

        Raises:
            DataError: the position is not one of this kind of loader.
        """
        if set(state) != {"seed", "epoch", "consumed"}:
            raise DataError(f"not the position of a data loader: keys {sorted(state)}, expected seed, epoch, consumed")
        self._seed = state["seed"]
        self._place.move_to(state["epoch"], state["consumed"])

    def skipping(self, batches: int) -> ShardedDataLoader:
        """Return a copy whose iterations leave out the first `batches` steps; the copy and this one share their place.

        Where a position was loaded, it leaves out that many of the whole epoch: the script has counted for itself.
        """
        other = copy.copy(self)
        other.base_dataloader = copy.copy(self.base_dataloader)
        torch_private.forget_iteration(other.base_dataloader)
        other._skip_each = self._skip_each + batches
        return other


@dataclass(slots=True)
class _LoopPlace:
    """The place of a loop.

    Attributes:
        epoch: that of the iteration which runs, was broken off or comes next.
        consumed: items that were used in it.
        loaded: of them those that a run before this one had used; until the iteration counts.
        start: of them those that it left out at its start.
        begun: updates of optimizers when it began; None: no optimizer was prepared.
        under_way: the loaders of iterations that have begun, and are neither over nor broken off.
        was_looked_at: within an iteration another was read to its end, which was but a look.
    """

    epoch: int = 0
    consumed: int = 0
    loaded: int = 0
    start: int = 0
    begun: int | None = None
    under_way: list[ShardedDataLoader] = field(default_factory=list)
    was_looked_at: bool = False

    def begin(self, skip: int, updates: int | None) -> int:
        """Begin an iteration.

        Args:
            skip: items that a script has it leave out; 0 if it says nothing.
            updates: of optimizers so far; None: none was prepared.

        Returns:
            How many are left out.
        """
        if self.consumed != self.start and self._counts(updates):
            self.move_to(self.epoch + 1)
        self.start = self.consumed = skip or self.loaded
        self.begun, self.was_looked_at = updates, False
        return self.start

    def end(self) -> None:
        """End the iteration."""
        self.move_to(self.epoch + 1)

    def end_within(self, before: _LoopPlace, *, is_look: bool) -> None:
        """End or break off an iteration that was within another, which was at `before`."""
        is_broken_off = self.consumed != 0
        if is_look and is_broken_off:
            self.put_back(before)
        elif is_look:
            # Only if the other goes on: an iterator that a script has left lying makes no look of all later epochs.
            self.was_looked_at = True

    def put_back(self, before: _LoopPlace) -> None:
        """Restore the place from before a look, which leaves no trace."""
        for name in ("epoch", "consumed", "loaded", "start", "begun", "was_looked_at"):
            setattr(self, name, getattr(before, name))

    def position(self, updates: int | None) -> int:
        """Return how many items of the epoch a run that goes on from here has used."""
        is_over_look = not self.under_way and not self._counts(updates)
        return self.loaded if is_over_look else self.consumed

    def set_epoch(self, epoch: int, updates: int | None) -> None:
        is_to_go_on = self.consumed == self.start or not self._counts(updates)
        self.move_to(epoch, self.loaded if is_to_go_on else 0)

    def copy(self) -> _LoopPlace:
        return dataclasses.replace(self)

    def move_to(self, epoch: int, loaded: int = 0) -> None:
        """Make the next iteration that of `epoch`, going on after so many items."""
        self.epoch, self.consumed, self.loaded, self.start = epoch, loaded, loaded, loaded

    def _counts(self, updates: int | None) -> bool:
        """Return whether the broken-off iteration counts as done; else it was a look, maybe of this rank alone."""
        return updates is None or updates > (self.begun or 0)


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like `loader` that leaves out the first `num_batches` batches of every iteration.

    Map-style datasets are not read for skipped batches; iterable ones have to be.
    """
    if not isinstance(loader, ShardedDataLoader):
        loader = ShardedDataLoader(loader)
    return loader.skipping(num_batches)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the object that orders a loader's samples, inside the one that makes batches of them if there is one."""
    return getattr(loader.batch_sampler, "sampler", None) or loader.sampler


def _refuse_sharded(loader: DataLoader[Any], world_size: int) -> None:
    """Refuse data that was divided over the ranks already: divided again, most of it would never be seen."""
    if world_size == 1:
        return
    if isinstance(sampler_of(loader), DistributedSampler):
        raise DataError(
            "the data loader has a DistributedSampler, so it divides the data over the ranks already",
            hint="pass the loader without it (shuffle=True instead); prepare() divides the data",
        )
    if getattr(loader.dataset, "_distributed", None) is not None:
        raise DataError(
            "the dataset was divided with split_dataset_by_node, and would be divided a second time",
            hint="pass the whole dataset; prepare() divides the data",
        )
