"""A data loader that divides its batches over the ranks.

`ShardedDataLoader` takes any `torch.utils.data.DataLoader` and gives every rank its share of each step. All ranks take
the same number of steps, because a rank that stopped early would leave the others waiting in a collective. The order
depends only on a seed and the epoch, never on the number of ranks, so a run can resume on any number of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fullshard.api import torch_private
from fullshard.api.collectives import broadcast_object
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

    In every step, each rank gets `batch_size` samples, or its share of `batch_size` samples with `split_batches`. An
    incomplete last step is filled up with samples from the start of the epoch, unless the loader drops it or keeps it
    uneven. `remainder` is the number of real samples in that step. Samplers with a `generator` (including all of
    torch's) are seeded with seed + epoch, and so are NumPy's and Python's generators, generators inside nested
    samplers, and the global generators while samplers draw numbers. All ranks use the order of rank 0.

    The epoch advances after each iteration, by the same rule on any number of ranks. A completed iteration counts. An
    interrupted one also counts, unless an optimizer was prepared and has not stepped since the iteration began. In that
    case the script only peeked at the loader, maybe on one rank alone, so the next iteration starts at the same
    position.

    Args:
        loader: the loader to divide.
        rank: this rank.
        world_size: number of ranks.
        device: the device that batches are moved to; None leaves them where they are.
        split_batches: whether the loader's batch size counts the samples of all ranks together.
        data_seed: base seed of the order. Defaults to the seed of the loader's generator, or to torch's initial seed.
        non_blocking: copy to the device without waiting (useful with pinned memory).
        synchronize: called at the start of every epoch, on all ranks.
        even_batches: fill up an incomplete last step, so that all ranks have the same number of batches of the same
            size. Scripts can change `loader.batch_sampler.even_batches` at any time. Iterable datasets are always even.
        dispatch_batches: rank 0 reads the batches of all ranks and sends each rank its own. None enables this for an
            iterable dataset, because its order may differ between ranks.
        on_uneven: called at the start of an epoch in which some ranks have more batches than others.
        ranks_per_batch: number of ranks that get the same batch.
        cut: returns this rank's part of a batch, if the ranks that get the same batch divide it.

    Raises:
        ConfigError: `split_batches` is set, but the batch size is not a multiple of the world size or a custom batch
            sampler makes the batches; or workers are forked, but the device does not support forking.
        DataError: the loader already divides its data over the ranks.
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
        synchronize: Callable[[], None] | None = None,
        even_batches: bool = True,
        dispatch_batches: bool | None = False,
        on_uneven: Callable[[], None] | None = None,
        ranks_per_batch: int = 1,
        cut: Callable[[Any], Any] | None = None,
    ) -> None:
        _refuse_sharded(loader, world_size)
        share = Share.of(loader, rank, world_size, split_batches)
        dispatch = isinstance(loader.dataset, IterableDataset) if dispatch_batches is None else dispatch_batches
        share.deal.for_all = dispatch and world_size > 1
        share.deal.even = even_batches or share.is_always_even
        inherited = {name: getattr(loader, name) for name in _INHERITED if hasattr(loader, name)}
        self.base_dataloader: DataLoader[Any] = DataLoader(**share.arguments(loader), **inherited)
        # Scripts read their settings from this loader, but `base_dataloader` reads the data.
        vars(self).update(vars(self.base_dataloader) | share.shown(loader))
        self.share = share
        self._place = _LoopPlace()  # shared with copies made by `skipping`
        self._target = device
        self._non_blocking = non_blocking
        self.gradient_state = GradientState()
        self._synchronize = synchronize
        self._on_uneven, self._cut = on_uneven, cut
        self._skip_each = 0
        seed = share.initial_seed() if data_seed is None else data_seed
        said = (seed, next(_NUMBERS))
        self._seed, self._number = broadcast_object(said) if world_size * ranks_per_batch > 1 else said

    epoch: int = forwarded("_place.current.epoch")
    """The number of iterations so far, or the number that was passed to `set_epoch`."""
    iteration: int = forwarded("epoch")
    """The epoch, under Accelerate's name."""
    end_of_dataloader: bool = forwarded("_place.innermost.is_last")
    """True in the last step."""
    order_number: int = forwarded("_place.innermost.order_number")
    """The number of the order of this iteration. If it differs between ranks, they read the wrong samples."""
    _real: Real | None = forwarded("_place.innermost.real")

    @property
    def total_batch_size(self) -> int:
        """Return the number of samples per step on all ranks, or of batches if the loader's batch size is unknown."""
        return self.share.deal.round_size * self.share.samples_per_item

    @property
    def total_dataset_length(self) -> int:
        """Return the number of samples in the dataset. Raise `TypeError` if it has no length."""
        return len(cast("Sized", self.dataset))

    @property
    def remainder(self) -> int | None:
        """Return the number of real samples in the current step if it contains repetitions, otherwise None."""
        return None if self._real is None else self._real.samples

    def real_rows(self, gathered: int) -> int:
        """Return how many of the rows gathered in the current step belong to real samples. These rows come first."""
        ranks = self.share.deal.world_size
        return gathered if self._real is None or ranks == 1 else self._real.rows(gathered, ranks)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. If a position was loaded, the next iteration still continues from there."""
        self._place.set_epoch(epoch, self._updates)

    def __len__(self) -> int:
        return max(0, self.share.deal.rounds(self.share.length()) - self._skip_each)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._synchronize is not None:
            self._synchronize()
        if self._on_uneven is not None and not self.share.deal.even and self._is_uneven():
            self._on_uneven()
        place, state, deal = self._place, self.gradient_state, self.share.deal
        updates = state.updates
        own = place.begin(self._skip_each * deal.round_size, self._updates)
        own.order_number = own.epoch if self.share.depends_on_epoch else 0
        discard, last_real = self.share.start_epoch(self._seed, own.epoch, own.start)
        read = functools.partial(self._read, discard)
        iterator = dispatched(read, last_real, deal.world_size) if deal.for_all else read()
        place.under_way.append(own)
        state._add_dataloader(self)
        self._note_order()
        try:
            following: Any = next(iterator, _END)
            while following is not _END:
                batch, real = following
                following = next(iterator, _END)
                own.is_last = following is _END
                real = last_real() if own.is_last and real is None else real
                own.real = real if deal.even and real is not None and real.samples != real.dealt else None
                own.consumed += deal.round_size
                place.current = own
                batch = batch if self._cut is None else self._cut(batch)
                yield batch if self._target is None else send_to_device(batch, self._target, self._non_blocking)
            place.current = _Iteration(own.epoch + 1)
        finally:
            place.leave(own, is_look=updates == state.updates)
            state._remove_dataloader(self)
            self._note_order()

    @property
    def _updates(self) -> int | None:
        """Return the number of optimizer updates so far, or None if no optimizer was prepared."""
        return self.gradient_state.updates if self.gradient_state.has_optimizer else None

    def _is_uneven(self) -> bool:
        length = self._length()
        return length is not None and self.share.deal.is_uneven(length)

    def _length(self) -> int | None:
        try:
            return self.share.length()
        except (TypeError, NotImplementedError):  # a sampler without a length, which only rank 0 reads
            return None

    def _note_order(self) -> None:
        """Record the innermost iteration's order, so that backward can check that all ranks use the same order."""
        deal, is_stream = self.share.deal, isinstance(self.dataset, IterableDataset)
        if deal.world_size == 1 or deal.for_all or is_stream or not (deal.even and self.share.depends_on_epoch):
            return
        name = (self._number, self._length())
        if self._place.under_way:
            ORDERS[name] = self.order_number
        else:
            ORDERS.pop(name, None)

    def _read(self, discard: int) -> Iterator[tuple[Any, Real | None]]:
        """Skip `discard` batches, and yield the others, each with the real part of its round, or None if unknown."""
        given = iter(self.base_dataloader)
        self.share.note_begun()
        for _ in range(discard):
            next(given, _END)
        for batch in given:
            yield from self.share.unpack(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the loop's position: seed, epoch and consumed items. Any number of ranks can load it."""
        consumed = self._place.position(self._updates)
        return {"seed": self._seed, "epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load a position. The next iteration starts after the last batch that was yielded before the save.

        Raises:
            DataError: the position does not have the keys of this kind of loader.
        """
        if set(state) != {"seed", "epoch", "consumed"}:
            raise DataError(
                f"the state of a data loader must have the keys seed, epoch and consumed, got {sorted(state)}"
            )
        self._seed = state["seed"]
        self._place.move_to(state["epoch"], state["consumed"])

    def skipping(self, batches: int) -> ShardedDataLoader:
        """Return a copy whose iterations skip the first `batches` steps. Both loaders share their position.

        If a position was loaded, the copy ignores it and skips `batches` steps from the start of the epoch, because the
        script itself has counted the steps to skip.
        """
        other = copy.copy(self)
        other.base_dataloader = copy.copy(self.base_dataloader)
        torch_private.forget_iteration(other.base_dataloader)
        other._skip_each = self._skip_each + batches
        return other


@dataclass(slots=True, eq=False)
class _Iteration:
    """One iteration over a loader."""

    epoch: int = 0
    loaded: int = 0  # the number of items of the epoch that an earlier run consumed
    start: int = 0  # the number of items that are skipped, because an earlier run consumed them or a script skips them
    consumed: int = 0  # the number of items consumed so far, including the skipped ones
    begun: int | None = None  # the number of optimizer updates at its beginning, or None if no optimizer was prepared
    outer: _Iteration | None = None  # the iteration that was current when this one began, if it is still running
    order_number: int = 0
    is_last: bool = False  # whether the current step is the last
    real: Real | None = None  # the real part of the current step if it was filled up

    def counts(self, updates: int | None) -> bool:
        """Return whether an interrupted iteration counts as completed. If not, the script only peeked at the loader."""
        return updates is None or updates > (self.begun or 0)


_NONE = _Iteration()


@dataclass(slots=True)
class _LoopPlace:
    """The position of a loop: its current or next iteration, and the running iterations, outermost first."""

    current: _Iteration = field(default_factory=_Iteration)
    under_way: list[_Iteration] = field(default_factory=list)

    @property
    def innermost(self) -> _Iteration:
        return self.under_way[-1] if self.under_way else _NONE

    def begin(self, skip: int, updates: int | None) -> _Iteration:
        """Begin and return the next iteration, without its first `skip` items if a script asked to skip some."""
        last = self.current
        if last.consumed != last.start and last.counts(updates):
            self.current = _Iteration(last.epoch + 1)
        epoch, loaded = self.current.epoch, self.current.loaded
        start = skip or loaded
        self.current = _Iteration(epoch, loaded, start, start, updates, last if last in self.under_way else None)
        return self.current

    def leave(self, own: _Iteration, *, is_look: bool) -> None:
        """Remove a finished or interrupted iteration. After a peek, make the iteration around it current again."""
        self.under_way.remove(own)
        if self.current is own and is_look and own.outer in self.under_way:
            self.current = own.outer
        own.outer = None

    def position(self, updates: int | None) -> int:
        """Return the number of consumed items in the epoch, after which a resumed run continues."""
        current = self.current
        return current.consumed if current in self.under_way or current.counts(updates) else current.loaded

    def set_epoch(self, epoch: int, updates: int | None) -> None:
        is_to_go_on = self.current.consumed == self.current.start or not self.current.counts(updates)
        self.move_to(epoch, self.current.loaded if is_to_go_on else 0)

    def move_to(self, epoch: int, loaded: int) -> None:
        """Make the next iteration epoch `epoch`, starting after the `loaded` items that an earlier run consumed."""
        self.current = _Iteration(epoch, loaded, loaded, loaded)


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like `loader` that skips the first `num_batches` batches of every iteration.

    Skipped batches of a map-style dataset are not read. Batches of an iterable dataset must be read and discarded.
    """
    if not isinstance(loader, ShardedDataLoader):
        loader = ShardedDataLoader(loader)
    return loader.skipping(num_batches)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that determines the order of a loader's samples, even if it is inside a batch sampler."""
    return getattr(loader.batch_sampler, "sampler", None) or loader.sampler


def _refuse_sharded(loader: DataLoader[Any], world_size: int) -> None:
    """Refuse data that is already divided over the ranks, because most of it would be lost if it were divided again."""
    if world_size == 1:
        return
    if isinstance(sampler_of(loader), DistributedSampler):
        raise DataError(
            "the data loader has a DistributedSampler, so it already splits the data across the ranks",
            hint="pass a loader without it (use shuffle=True instead); prepare() splits the data",
        )
    if getattr(loader.dataset, "_distributed", None) is not None:
        raise DataError(
            "the dataset was already split with split_dataset_by_node, and prepare() would split it again",
            hint="pass the complete dataset; prepare() splits the data",
        )
