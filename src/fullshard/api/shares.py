"""One rank's share of a data loader: the samples that the rank reads, in an order that is the same on all ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from fullshard.api.collectives import broadcast_object
from fullshard.api.dealing import Deal, Real
from fullshard.api.forwarding import forwarded
from fullshard.core.errors import ConfigError, DataError, plural

_END = object()
_PIECE = 1000  # indices that ranks agree on at a time, of a sampler without a length
_SHOWN = ("dataset", "batch_size", "drop_last", "collate_fn", "sampler", "batch_sampler")


class Share:
    """One rank's share of a map-style dataset. `deal` divides the order among the ranks."""

    is_always_even = False  # or may be dealt unevenly

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
    def of(loader: DataLoader[Any], rank: int, world_size: int, split_batches: bool) -> Share:
        """Create the right kind of share for a loader, depending on its dataset and sampler."""
        if isinstance(loader.dataset, IterableDataset):
            size, drop_last = loader.batch_size, bool(loader.drop_last)
            return _IterableShare(_deal(size, rank, world_size, split_batches, drop_last), loader)
        # Without automatic batching the sampler may itself yield lists of indices (`sampler=BatchSampler(...)`).
        batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        as_sampler = loader.batch_sampler is None
        if isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__:
            deal = _deal(batches.batch_size, rank, world_size, split_batches, batches.drop_last)
            return Share(deal, batches.sampler, loader.dataset, batches=batches, as_sampler=as_sampler)
        deal = _deal(None, rank, world_size, split_batches, bool(getattr(batches, "drop_last", False)))
        return Share(deal, batches, loader.dataset, batches=batches, as_sampler=as_sampler)

    @property
    def depends_on_epoch(self) -> bool:
        """Return whether the order may differ between epochs, judging by the types of the sampler and the dataset."""
        is_sequential = isinstance(getattr(self._order, "sampler", self._order), SequentialSampler)
        return not is_sequential or callable(getattr(self._dataset, "set_epoch", None))

    def arguments(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the arguments for creating the divided `DataLoader`."""
        common = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        if self._as_sampler:
            return common | {"batch_size": None, "sampler": self._sampler}
        return common | {"batch_sampler": self._sampler}

    def shown(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the attributes that the divided loader copies from the original, so that scripts can read them."""
        own = "sampler" if self._as_sampler else "batch_sampler"
        return {name: getattr(loader, name) for name in _SHOWN if name != own}

    def initial_seed(self) -> int:
        """Return the seed of the loader's own generator, or torch's initial seed if it has none."""
        generator = getattr(self._order, "generator", None)
        return int(generator.initial_seed()) if isinstance(generator, torch.Generator) else torch.initial_seed()

    def length(self) -> int:
        """Return the number of items in the order. Raise `TypeError` if it has no length."""
        return len(cast("Sized", self._order))

    def start_epoch(self, seed: int, epoch: int, skip: int) -> tuple[int, Callable[[], Real | None]]:
        """Prepare an iteration without `skip` items. Return how many to discard, and the last round's real part."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        last: list[Real] = []
        self._sampler.next_iteration = (seed, epoch, skip, last)
        return 0, lambda: last[0] if last else None

    def note_begun(self) -> None:
        """Record that reading has begun. The sampler cannot be iterated again before the next `start_epoch`."""
        self._sampler.next_iteration = None

    def unpack(self, given: Any) -> Iterable[tuple[Any, Real | None]]:
        """Return the batches in an item of the loader, each with the real part of its round, or None if unknown."""
        return [(given, None)]


class _DealtSampler(Sampler[Any]):
    """Yields the lists of indices that a rank reads, in an order that is the same on all ranks."""

    def __init__(self, deal: Deal, order: Iterable[Any], batches: Any) -> None:
        self._deal = deal
        self._order = order
        self.batch_sampler = batches
        self.next_iteration: tuple[int, int, int, list[Real]] | None = None

    even_batches: bool = forwarded("_deal.even", may_set=True)
    """True if an incomplete last step is filled up. Scripts set this attribute, which Accelerate also has."""

    def __getattr__(self, name: str) -> Any:
        # Scripts reach through it: batch_size, drop_last, sampler. Not before __init__ (unpickling).
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return self._deal.rounds(len(cast("Sized", self._order)))

    def __iter__(self) -> Iterator[Any]:
        # Read now and not at the first `next`: another iteration may be prepared in between.
        if self.next_iteration is None:
            raise DataError(
                "the batch sampler of a prepared loader was iterated directly, but only the loader tracks the epoch "
                "and the position",
                hint="iterate over the loader, and skip batches with accelerator.skip_first_batches(loader, n)",
            )
        seed, epoch, skip, last = self.next_iteration
        readers = 1 if self._deal.for_all else self._deal.world_size
        order = _agreed_order(self._order, seed, epoch, readers)
        return (
            self._batches(order, skip, last) if self._order is self.batch_sampler else self._shares(order, skip, last)
        )

    def _shares(self, order: Iterable[Any], skip: int, last: list[Real]) -> Iterator[Any]:
        for of_all, real in self._deal.dealt(order, skip=skip):
            last[:] = [Real(real, self._deal.round_size)]
            yield from self._deal.shares_of(of_all)

    def _batches(self, order: Iterable[Any], skip: int, last: list[Real]) -> Iterator[Any]:
        size = getattr(self.batch_sampler, "batch_size", None)
        is_filled = self._deal.even and self._deal.world_size > 1 and isinstance(size, int)
        equal = _Equal(order, size if is_filled else None)
        for of_all, real in self._deal.dealt(equal, skip=skip):
            sizes = [len(batch) if isinstance(batch, Sized) else None for batch in of_all]
            known = [size for size in sizes if size is not None]
            if len(known) < len(sizes):  # each is whatever the dataset makes of one index
                last[:] = [Real(real, len(sizes), batches=real)]
            else:
                last[:] = [Real(sum(known[:real]) - equal.added, sum(known), batches=real)]
            for (batch,) in self._deal.shares_of(of_all):
                yield batch


class _Equal:
    """Yields batches of equal size. A short last batch is filled up with samples from the start, as in Accelerate."""

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
    """Return the order of one epoch. It is the same on every rank that reads, and again after a restart."""
    set_epoch = getattr(order, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    if isinstance(order, SequentialSampler):
        return order
    own = getattr(order, "generator", _END)
    if (own is None or isinstance(own, torch.Generator)) and not isinstance(order, BatchSampler):
        seeded = copy.copy(order)
        cast("Any", seeded).generator = torch.Generator().manual_seed(seed + epoch)
        return seeded
    if readers == 1 and not hasattr(order, "__len__"):
        return order
    return _drawn(order, seed + epoch, readers)


def _drawn(order: Iterable[Any], seed: int, readers: int) -> Iterator[Any]:
    """Yield the items of an unknown sampler, in the order of rank 0. Generators are seeded while it draws."""
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
def _seeded(order: Any, number: int) -> Iterator[None]:
    """Within the block, seed all generators that `order` may draw from. Restore their states afterwards."""
    everybodys: list[Any] = [torch.default_generator, random]
    if (numpy := sys.modules.get("numpy")) is not None:
        everybodys.append(numpy.random)
    with contextlib.ExitStack() as after:
        for generator in (*everybodys, *_generators_of(order)):
            after.callback(_seed(generator, number))
        yield


class _IterableShare(Share):
    """One rank's share of an iterable dataset, or complete rounds if rank 0 reads the dataset for all ranks."""

    is_always_even = True

    def __init__(self, deal: Deal, loader: DataLoader[Any]) -> None:
        dataset = cast("IterableDataset[Any]", loader.dataset)
        super().__init__(deal, dataset, _DealtDataset(deal, dataset))
        self._num_workers = loader.num_workers

    def arguments(self, loader: DataLoader[Any]) -> dict[str, Any]:
        batched = loader.batch_size is not None
        return {
            "dataset": self._dataset,
            "batch_size": None,  # an item of the dataset is a round
            "collate_fn": _CollateDealt(loader.collate_fn, batched=batched),
        }

    def shown(self, loader: DataLoader[Any]) -> dict[str, Any]:
        return {name: getattr(loader, name) for name in _SHOWN}

    @property
    def depends_on_epoch(self) -> bool:
        dataset = self._order
        has_generator = _is_generator(getattr(dataset, "generator", None))
        return has_generator or callable(getattr(dataset, "set_epoch", None))

    def start_epoch(self, seed: int, epoch: int, skip: int) -> tuple[int, Callable[[], Real | None]]:
        dataset = self._order
        set_epoch, generator = getattr(dataset, "set_epoch", None), getattr(dataset, "generator", None)
        if callable(set_epoch):
            set_epoch(epoch)
        elif _is_generator(generator):
            _seed(generator, seed + epoch)
        if self._num_workers == 0:
            self._dataset.skip = skip
            return 0, lambda: None  # each round says it
        # Workers deal rounds of their own, so only whole rounds can be thrown away, here.
        rounds, rest = divmod(skip, self.deal.round_size)
        if rest:
            raise DataError(
                f"an iterable dataset cannot resume after {plural(skip, 'sample')}, because its workers skip "
                f"{plural(self.deal.round_size, 'sample')} at a time",
                hint="with num_workers > 0, resume with the same global batch size",
            )
        return rounds, lambda: None

    def unpack(self, given: Any) -> Iterable[tuple[Any, Real | None]]:
        batches, samples = given
        real = Real(int(samples), self.deal.round_size)
        return [(batch, real) for batch in batches]


class _DealtDataset(IterableDataset[Any]):
    """Yields the rounds of a stream, each from one worker: shares, and the number of real samples."""

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
    """Collates the items of a `_DealtDataset`. It must support pickling, because it runs in workers."""

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
            "split_batches needs a loader with a batch size, but this loader makes its own batches",
            hint="remove split_batches: each rank then takes complete batches in turn",
        )
    if batch_size % world_size:
        raise ConfigError(
            f"split_batches: a batch of {plural(batch_size, 'sample')} does not divide into {world_size} equal shares",
            hint="use a batch size that is a multiple of the number of processes",
        )
    return Deal(rank, world_size, batch_size // world_size, drop_last)


def _is_generator(value: object) -> bool:
    """Return whether a value is a random generator."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def _generators_of(holder: object) -> Iterator[Any]:
    """Yield the random generators in the attributes of an object, and those in its samplers."""
    for value in getattr(holder, "__dict__", {}).values():
        if _is_generator(value):
            yield value
        elif isinstance(value, Sampler):
            yield from _generators_of(value)


def _seed(generator: Any, number: int) -> Callable[[], object]:
    """Seed a generator, or the module `random` or `numpy.random`. Return a function that restores the old state."""
    back: Callable[[], object]
    if isinstance(generator, torch.Generator):
        back = partial(generator.set_state, generator.get_state())
        generator.manual_seed(number)
    elif hasattr(generator, "getstate"):
        back = partial(generator.setstate, generator.getstate())
        generator.seed(number)
    elif hasattr(generator, "get_state"):
        back = partial(generator.set_state, generator.get_state())
        generator.seed(number % 2**32)
    else:
        bits = generator.bit_generator
        back = partial(setattr, bits, "state", bits.state)
        bits.state = type(bits)(number % 2**64).state
    return back
