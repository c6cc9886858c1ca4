"""A data loader whose batches are divided over the ranks.

`ShardedDataLoader` takes any `torch.utils.data.DataLoader` and gives every rank its share of each step, with a number
of steps that is the same on all ranks (a rank that stopped early would leave the others waiting in a collective). The
order depends on a seed and the epoch alone, never on the number of ranks, so a run can resume on any number of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from fullshard.api.collectives import broadcast_object, send_to_device
from fullshard.api.dealing import Deal, Real
from fullshard.api.dispatching import dispatched
from fullshard.api.forwarding import forwarded
from fullshard.api.state import GradientState
from fullshard.comm import torch_private
from fullshard.comm.device import traits_of
from fullshard.core.errors import ConfigError, DataError

_END = object()
_INHERITED = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
_PIECE = 1000  # indices that ranks agree on at a time, of a sampler without a length
_SHOWN = ("dataset", "batch_size", "drop_last", "collate_fn", "sampler", "batch_sampler")


def _without_fork(context: Any, device: torch.device) -> Any:
    """How workers are started beside a device that a forked process may hang on: anew, unless the script says how."""
    if context is None:
        return "spawn"
    if context.get_start_method() == "fork":
        raise ConfigError(
            f"multiprocessing_context = fork: a process that uses a {device.type.upper()} is not to be forked",
            hint="leave it out: workers are spawned then",
        )
    return context


class ShardedDataLoader(DataLoader[Any]):
    """This rank's part of a data loader.

    Every step deals `batch_size` samples to each rank (or `batch_size` samples over all ranks with `split_batches`).
    An incomplete last step is filled up with samples from the start of the epoch, unless the loader drops it or is told
    to leave it uneven; `remainder` tells how many of its samples are real. Samplers with a `generator` (so all of
    torch's) are seeded with seed + epoch; the order of any other sampler is rank 0's. The epoch advances after each
    iteration, also after one that was broken off.

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
        rounds_per_step: batches that a loader which drops its incomplete last step has of each step.

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
        rounds_per_step: int = 1,
    ) -> None:
        _refuse_sharded(loader, world_size)
        share = _Share.of(loader, rank, world_size, split_batches)
        share.deal.rounds_per_step = rounds_per_step
        dispatch = isinstance(loader.dataset, IterableDataset) if dispatch_batches is None else dispatch_batches
        share.deal.for_all = dispatch and world_size > 1
        share.deal.even = even_batches or share.is_always_even
        inherited = {name: getattr(loader, name) for name in _INHERITED if hasattr(loader, name)}
        if device is not None and inherited["num_workers"] and not traits_of(device).may_fork:
            inherited["multiprocessing_context"] = _without_fork(inherited["multiprocessing_context"], device)
        self.base_dataloader: DataLoader[Any] = DataLoader(**share.arguments(loader), **inherited)
        # Scripts read from it what they gave; what reads is the other one.
        vars(self).update(vars(self.base_dataloader) | share.shown(loader))
        self.share = share
        self._place = _LoopPlace()  # copies made by `skipping` share it
        self.end_of_dataloader = False
        self._real: Real | None = None  # of the step just handed out, if it was filled up
        self._target = device
        self._non_blocking = non_blocking
        self.gradient_state = gradient_state or GradientState()
        self._synchronize = synchronize
        self._on_uneven = on_uneven
        self._skip_each = 0
        self._updates = 0
        seed = share.initial_seed() if data_seed is None else data_seed
        self._seed: int = broadcast_object(seed) if world_size > 1 else seed

    epoch: int = forwarded("_place.epoch")
    """Iterations so far, or what `set_epoch` said."""
    iteration: int = forwarded("epoch")
    """The same, under Accelerate's name."""

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
        """Of rows gathered from all ranks in the current step those that are no repetitions: the first."""
        ranks = self.share.deal.world_size
        return gathered if self._real is None or ranks == 1 else self._real.rows(gathered, ranks)

    def check_whole_steps(self) -> None:
        """Raise `DataError` if an epoch ends within a step of several rounds, as far as its length is known."""
        deal = self.share.deal
        size = deal.round_size * deal.rounds_per_step
        try:
            rest = 0 if deal.drop_last else self.share.length() % size
        except TypeError:
            rest = self._place.consumed % size if self.end_of_dataloader else 0
        if rest:
            raise DataError(
                f"an epoch ends {rest} samples into a step of {size}: its last step would be another one at each "
                "number of ranks",
                hint="DataLoader(drop_last=True) leaves the incomplete step out",
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; one that goes on where a loaded position is goes on there."""
        self._place.set_epoch(epoch)

    def __len__(self) -> int:
        return max(0, self.share.deal.rounds(self.share.length()) - self._skip_each)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._synchronize is not None:
            self._synchronize()
        if self._on_uneven is not None and not self.share.deal.even and self._is_uneven():
            self._on_uneven()
        place = self._place
        # With others a rank may have had a look of its own, which is no epoch; only what all have done together is.
        is_used = self.share.deal.world_size == 1 or self.gradient_state.updates > self._updates
        self._updates = self.gradient_state.updates
        skip = place.begin(self._skip_each * self.share.deal.round_size, is_used=is_used)
        discard = self.share.start_epoch(self._seed, self.epoch, skip)
        deal = self.share.deal
        if deal.for_all:
            iterator = dispatched(functools.partial(self._read, discard), self.share.last_real, deal.world_size)
        else:
            iterator = self._read(discard)
        self.gradient_state.enter_loader(self)
        try:
            following: Any = next(iterator, _END)
            while following is not _END:
                batch, real = following
                following = next(iterator, _END)
                self.end_of_dataloader = following is _END
                real = self.share.last_real() if self.end_of_dataloader and real is None else real
                self._real = real if deal.even and real is not None and real.samples != real.dealt else None
                place.consumed += deal.round_size
                yield batch if self._target is None else send_to_device(batch, self._target, self._non_blocking)
            place.epoch, place.consumed = place.epoch + 1, 0
        finally:
            self.end_of_dataloader, self._real = False, None
            self.gradient_state.leave_loader(self)

    def _is_uneven(self) -> bool:
        try:
            return self.share.deal.is_uneven(self.share.length())
        except TypeError:  # a sampler without a length, which rank 0 alone reads
            return False

    def _read(self, discard: int) -> Iterator[tuple[Any, Real | None]]:
        """Batches, with what is real of their rounds if it is known; after what the loader gives at first."""
        given = iter(self.base_dataloader)
        self.share.note_begun()
        for _ in range(discard):
            next(given, _END)
        for batch in given:
            yield from self.share.unpack(batch)

    def state_dict(self) -> dict[str, int]:
        """Position of the loop: seed, epoch and items used. Valid at any number of ranks."""
        return {"seed": self._seed, "epoch": self.epoch, "consumed": self._place.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position: the next iteration starts after the last batch that was handed out.

        Raises:
            DataError: the position is not one of this kind of loader.
        """
        if set(state) != {"seed", "epoch", "consumed"}:
            raise DataError(f"not the position of a data loader: keys {sorted(state)}, expected seed, epoch, consumed")
        self._seed = state["seed"]
        self._place.epoch, self._place.consumed, self._place.is_loaded = state["epoch"], state["consumed"], True

    def skipping(self, batches: int) -> ShardedDataLoader:
        """A copy whose every iteration leaves out the first `batches` steps; it has its place in common with this one.

        Where a position was loaded, it leaves out that many of the whole epoch: the script has counted for itself.
        """
        other = copy.copy(self)
        other.base_dataloader = copy.copy(self.base_dataloader)
        torch_private.forget_iteration(other.base_dataloader)
        other._skip_each = self._skip_each + batches
        return other


@dataclass(slots=True)
class _LoopPlace:
    """Where a loop is.

    Attributes:
        epoch: that of the iteration which runs, was broken off or comes next.
        consumed: items that were used in it.
        is_loaded: it comes next, and goes on after these.
    """

    epoch: int = 0
    consumed: int = 0
    is_loaded: bool = False

    def begin(self, skip: int, *, is_used: bool) -> int:
        """An iteration begins.

        Args:
            skip: items that a script has it leave out; 0 if it says nothing.
            is_used: if the last one was broken off, what it had is not to come again.

        Returns:
            How many are left out.
        """
        if self.is_loaded:
            skip = skip or self.consumed
        elif self.consumed and is_used:
            self.epoch += 1
        self.consumed, self.is_loaded = skip, False
        return skip

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if not self.is_loaded:
            self.consumed = 0


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader like `loader` that leaves out the first `num_batches` batches of every iteration.

    Map-style datasets are not read for skipped batches; iterable ones have to be.
    """
    if not isinstance(loader, ShardedDataLoader):
        loader = ShardedDataLoader(loader)
    return loader.skipping(num_batches)


class _Share:
    """One rank's share of a map-style dataset. `_IterableShare` is the counterpart for iterable datasets.

    Attributes:
        deal: how the order is dealt.
        samples_per_item: of it, as far as known: 1 if they are dealt one by one.
        is_always_even: it cannot be dealt unevenly.
    """

    is_always_even = False

    def __init__(
        self, deal: Deal, order: Iterable[Any], dataset: Any, *, batches: Any = None, as_sampler: bool = False
    ) -> None:
        self.deal = deal
        self._dataset = dataset
        self.samples_per_item: int = (getattr(batches, "batch_size", None) or 1) if batches is order else 1
        self._order = order
        self._as_sampler = as_sampler
        self._sampler = _DealtSampler(deal, order, batches)

    @staticmethod
    def of(loader: DataLoader[Any], rank: int, world_size: int, split_batches: bool) -> _Share:
        """The right share for a loader."""
        if isinstance(loader.dataset, IterableDataset):
            size, drop_last = loader.batch_size, bool(loader.drop_last)
            return _IterableShare(_deal(size, rank, world_size, split_batches, drop_last), loader)
        # Without automatic batching the sampler may itself yield lists of indices (`sampler=BatchSampler(...)`).
        batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        as_sampler = loader.batch_sampler is None
        if isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__:
            deal = _deal(batches.batch_size, rank, world_size, split_batches, batches.drop_last)
            return _Share(deal, batches.sampler, loader.dataset, batches=batches, as_sampler=as_sampler)
        deal = _deal(None, rank, world_size, split_batches, bool(getattr(batches, "drop_last", False)))
        return _Share(deal, batches, loader.dataset, batches=batches, as_sampler=as_sampler)

    def arguments(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Arguments for the divided loader."""
        common = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        if self._as_sampler:
            return common | {"batch_size": None, "sampler": self._sampler}
        return common | {"batch_sampler": self._sampler}

    def shown(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """What the loader that scripts hold shows of theirs."""
        own = "sampler" if self._as_sampler else "batch_sampler"
        return {name: getattr(loader, name) for name in _SHOWN if name != own}

    def initial_seed(self) -> int:
        generator = getattr(self._order, "generator", None)
        return torch.initial_seed() if generator is None else int(generator.initial_seed())

    def length(self) -> int:
        return len(cast("Sized", self._order))

    def start_epoch(self, seed: int, epoch: int, skip: int) -> int:
        """Prepare the next iteration. Returns how much the loop itself must throw away of what the loader gives."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._sampler.prepare(seed, epoch, skip)
        return 0

    def note_begun(self) -> None:
        """What reads has begun: nothing else may read the same."""
        self._sampler.forget()

    def unpack(self, given: Any) -> Iterable[tuple[Any, Real | None]]:
        """Batches in what the loader gave, each with what is real of its round if that is known."""
        return [(given, None)]

    def last_real(self) -> Real | None:
        """What is real of the last round, once it was dealt."""
        return self._sampler.last_real


class _DealtSampler(Sampler[Any]):
    """This rank's lists of indices, in an order that all ranks agree on."""

    def __init__(self, deal: Deal, order: Iterable[Any], batches: Any) -> None:
        self._deal = deal
        self._order = order
        self.batch_sampler = batches
        self._next: tuple[int, int, int] | None = None
        self.last_real: Real | None = None

    even_batches: bool = forwarded("_deal.even", may_set=True)
    """Whether an incomplete last step is filled up, under Accelerate's name; scripts set it."""

    def __getattr__(self, name: str) -> Any:
        # Scripts reach through it: batch_size, drop_last, sampler. Not before __init__ (unpickling).
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def prepare(self, seed: int, epoch: int, skip: int) -> None:
        self._next = (seed, epoch, skip)
        self.last_real = None

    def forget(self) -> None:
        self._next = None

    def __len__(self) -> int:
        return self._deal.rounds(len(cast("Sized", self._order)))

    def __iter__(self) -> Iterator[Any]:
        # Read now and not at the first `next`: another iteration may be prepared in between.
        if self._next is None:
            raise DataError(
                "the batch sampler of a prepared loader is read by something else than its loader, which knows the "
                "epoch and where in it the loop is",
                hint="leave batches out with accelerator.skip_first_batches(loader, n), and read the loader",
            )
        seed, epoch, skip = self._next
        readers = 1 if self._deal.for_all else self._deal.world_size
        return self._shares(_agreed_order(self._order, seed, epoch, readers), skip)

    def _shares(self, order: Iterable[Any], skip: int) -> Iterator[Any]:
        if self._order is self.batch_sampler:
            yield from self._batches(_Equal(order, self._size_to_keep()), skip)
            return
        for of_all, real in self._deal.dealt(order, skip=skip):
            self.last_real = Real(real, self._deal.round_size)
            yield from self._deal.shares_of(of_all)

    def _batches(self, order: _Equal, skip: int) -> Iterator[Any]:
        for of_all, real in self._deal.dealt(order, skip=skip):
            sizes = [len(batch) if isinstance(batch, Sized) else None for batch in of_all]
            known = [size for size in sizes if size is not None]
            if len(known) < len(sizes):  # each is whatever the dataset makes of one index
                self.last_real = Real(real, len(sizes), batches=real)
            else:
                self.last_real = Real(sum(known[:real]) - order.added, sum(known), batches=real)
            for (batch,) in self._deal.shares_of(of_all):
                yield batch

    def _size_to_keep(self) -> int | None:
        """Samples that a batch is to have on every rank; None: as many as it has."""
        size = getattr(self.batch_sampler, "batch_size", None)
        return size if self._deal.even and self._deal.world_size > 1 and isinstance(size, int) else None


class _Equal:
    """Batches of one size, of which the last may be shorter: it is filled up from the start, as Accelerate does.

    Attributes:
        added: samples that it was filled up with.
    """

    def __init__(self, batches: Iterable[Any], size: int | None) -> None:
        self._batches = batches
        self._size = size
        self.added = 0

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        first: Any = next(batches, _END)
        if first is _END:
            return
        batch = first
        for following in batches:
            yield batch
            if isinstance(batch, Sized) and len(batch) != self._size:
                self._size = None  # they differ anyway
            batch = following
        if self._size is not None and isinstance(batch, list):
            self.added = max(0, self._size - len(batch))
            batch = [*batch, *itertools.islice(itertools.cycle(first), self.added)]
        yield batch


def _agreed_order(order: Iterable[Any], seed: int, epoch: int, readers: int) -> Iterable[Any]:
    """The order of one epoch, the same on every rank that reads and after a restart."""
    set_epoch = getattr(order, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    if isinstance(order, SequentialSampler):
        return order
    if hasattr(order, "generator") and not isinstance(order, BatchSampler):
        seeded = copy.copy(order)
        cast("Any", seeded).generator = torch.Generator().manual_seed(seed + epoch)
        return seeded
    if readers == 1 and not hasattr(order, "__len__"):
        return order
    return _drawn(order, seed + epoch, readers)


def _drawn(order: Iterable[Any], seed: int, readers: int) -> Iterator[Any]:
    """What a sampler of unknown make gives, which may never end.

    It draws from the global generators, or holds some: they are seeded for the time of the draw. To be safe from
    anything else that differs between processes, rank 0's order is everybody's.
    """
    size = len(order) if isinstance(order, Sized) else _PIECE
    items: Iterator[Any] | None = None
    for piece in itertools.count():
        with _seeded(order, seed + piece * _PIECE):
            items = iter(order) if items is None else items
            drawn = list(itertools.islice(items, size + 1))  # one more, to see whether that was all
        is_all = len(drawn) <= size
        if readers > 1:
            drawn, is_all = broadcast_object((drawn, is_all))  # as many pieces, too, as rank 0 has
        yield from drawn
        if is_all:
            return


@contextlib.contextmanager
def _seeded(order: Any, seed: int) -> Iterator[None]:
    """Seed all generators that `order` may draw from, and give them their states back."""
    numpy: Any = sys.modules.get("numpy")
    held = [*getattr(order, "__dict__", {}).values()]
    held += getattr(getattr(order, "sampler", None), "__dict__", {}).values()
    own = [each for each in held if isinstance(each, torch.Generator)]
    states = [generator.get_state() for generator in own]
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            for generator in (torch.default_generator, *own):
                generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


class _IterableShare(_Share):
    """One rank's share of an iterable dataset: whoever reads the stream keeps a part of each round, or all of it."""

    is_always_even = True

    def __init__(self, deal: Deal, loader: DataLoader[Any]) -> None:
        super().__init__(deal, (), _DealtDataset(deal, cast("IterableDataset[Any]", loader.dataset)))
        self._num_workers = loader.num_workers

    def arguments(self, loader: DataLoader[Any]) -> dict[str, Any]:
        batched = loader.batch_size is not None
        return {
            "dataset": self._dataset,
            "batch_size": None,  # what the dataset gives is a round
            "collate_fn": _CollateDealt(loader.collate_fn, batched=batched),
        }

    def shown(self, loader: DataLoader[Any]) -> dict[str, Any]:
        return {name: getattr(loader, name) for name in _SHOWN}

    def initial_seed(self) -> int:
        generator = getattr(self._dataset.dataset, "generator", None)
        return int(generator.initial_seed()) if isinstance(generator, torch.Generator) else torch.initial_seed()

    def length(self) -> int:
        return len(cast("Sized", self._dataset.dataset))

    def start_epoch(self, seed: int, epoch: int, skip: int) -> int:
        dataset = self._dataset.dataset
        set_epoch, generator = getattr(dataset, "set_epoch", None), getattr(dataset, "generator", None)
        if callable(set_epoch):
            set_epoch(epoch)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed + epoch)
        if self._num_workers == 0:
            self._dataset.skip = skip
            return 0
        # Workers deal rounds of their own, so only whole rounds can be thrown away, here.
        rounds, rest = divmod(skip, self.deal.round_size)
        if rest:
            raise DataError(
                f"cannot continue after {skip} samples of an iterable dataset in steps of {self.deal.round_size}",
                hint="with num_workers > 0, resume with the same global batch size",
            )
        return rounds

    def unpack(self, given: Any) -> Iterable[tuple[Any, Real | None]]:
        batches, samples = given
        real = Real(int(samples), self.deal.round_size)
        return [(batch, real) for batch in batches]

    def last_real(self) -> Real | None:
        return None


class _DealtDataset(IterableDataset[Any]):
    """The rounds of a stream: this rank's share or, if it reads for all, the share of each; and the real samples.

    A whole round at a time, so that it comes from one worker: each of them deals rounds of its own.
    """

    def __init__(self, deal: Deal, dataset: IterableDataset[Any]) -> None:
        self.deal = deal
        self.dataset = dataset
        self.skip = 0

    def __iter__(self) -> Iterator[tuple[list[list[Any]], int]]:
        rounds = self.deal.dealt(self.dataset, skip=self.skip)
        return ((list(self.deal.shares_of(of_all)), real) for of_all, real in rounds)

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn reaches through `get_worker_info().dataset`. Not before __init__ (unpickling).
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("deal", "dataset", "skip"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)


class _CollateDealt:
    """Collates what a `_DealtDataset` gives; in a worker process, so it must pickle."""

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate = collate
        self._batched = batched

    def __call__(self, dealt: tuple[list[list[Any]], int]) -> tuple[list[Any], int]:
        shares, real = dealt
        return [self._collate(share if self._batched else share[0]) for share in shares], real


def _deal(batch_size: int | None, rank: int, world_size: int, split_batches: bool, drop_last: bool) -> Deal:
    if not split_batches or world_size == 1:
        return Deal(rank, world_size, batch_size or 1, drop_last)
    if batch_size is None:
        raise ConfigError(
            "split_batches needs a loader with a batch size, and this one makes batches of its own",
            hint="leave split_batches out: each rank then takes whole batches in turn",
        )
    if batch_size % world_size:
        raise ConfigError(
            f"split_batches: a batch of {batch_size} does not divide into {world_size} equal shares",
            hint="use a batch size that is a multiple of the number of processes",
        )
    return Deal(rank, world_size, batch_size // world_size, drop_last)


def _refuse_sharded(loader: DataLoader[Any], world_size: int) -> None:
    """Data that was divided over the ranks once must not be divided again: most of it would never be seen."""
    if world_size == 1:
        return
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "the data loader has a DistributedSampler, so it divides the data over the ranks already",
            hint="pass the loader without it (shuffle=True instead); prepare() divides the data",
        )
    if getattr(loader.dataset, "_distributed", None) is not None:
        raise DataError(
            "the dataset was divided with split_dataset_by_node, and would be divided a second time",
            hint="pass the whole dataset; prepare() divides the data",
        )
