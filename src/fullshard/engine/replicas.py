"""Compare the weights of replicas: find a bit that has flipped in one of them, name it, and heal it if asked.

A rank adds up its weights as 64-bit integers: one pass over them, which notices every flip. Only if sums differ does it
compare parameters, and the optimizer state kept for them, one by one. The values that most replicas have are right.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import ConfigError, ReplicaError, first_of
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.place import this_process
from fullshard.engine.bucket import Bucket
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.wrap.extended import inner_tensors

OnDifference = Literal["raise", "heal", "off"]
_SHOWN = 3
_BLOCK = 4096
"""Elements compared at a time when the first one that differs is looked for."""
_FACTOR = 1_000_003
_WEIGHTS = ("", "weights")
"""The rest of an item's key for weights; for state it is an optimizer's class and the state's name."""

Item = tuple[str, str, str]
"""A parameter's name, and which of its tensors: see `_WEIGHTS`."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """One rank's values of every item that replicas have too."""

    rank: int
    where: str
    row: int
    column: int
    hashes: dict[Item, bytes]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.where})"


@dataclass(frozen=True, slots=True)
class _Difference:
    """An item that differs between replicas.

    Attributes:
        column: the replicas' place along the shard axis.
        item: the item itself.
        held: the value of each replica, by row.
    """

    column: int
    item: Item
    held: list[tuple[bytes, _Holding]]

    @property
    def right(self) -> bytes | None:
        """Return what most of them have; None if there is no majority."""
        value, count = Counter(value for value, _ in self.held).most_common(1)[0]
        return value if 2 * count > len(self.held) else None

    def row_of(self, value: bytes | None) -> int:
        """Return the first row that has it."""
        return next(holding.row for found, holding in self.held if found == value)


class Replicas:
    """The replicas of one model.

    Args:
        mesh: the ranks that share the model; those with the same place along the shard axis are replicas.
        buckets: all buckets of the model.
        optimizers: the optimizers that have stepped the model.

    Attributes:
        policy: the reaction to weights that differ: an error on all ranks, the majority's weights, or nothing.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Callable[[], Sequence[Bucket]],
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    ) -> None:
        self._mesh, self._buckets, self._optimizers = mesh, buckets, optimizers
        self.policy: OnDifference = "raise"

    def choose(self, policy: str) -> None:
        """Set `policy`.

        Raises:
            ConfigError: there is no such policy, or there are no replicas to heal from.
        """
        if policy not in get_args(OnDifference):
            raise ConfigError(f"no policy {policy!r} for replicas that differ", hint="use raise, heal or off")
        if policy == "heal" and self._mesh.replicate_size == 1 < self._mesh.world_size:
            raise ConfigError(
                "replica_check = heal, and every weight is on one rank only: there is nothing to heal from",
                hint="replicas are those of NO_SHARD and HYBRID_SHARD; use raise, or leave it out",
            )
        self.policy = policy  # type: ignore[assignment]

    @property
    def has_any(self) -> bool:
        """Return whether there is another replica of this rank's part."""
        return self._mesh.replicate_size > 1

    @torch.no_grad()
    def digest(self) -> int:
        """Return 64 bits, signed, of all weights of this rank; any changed bit changes the number."""
        stored = [tensor for bucket in self._buckets() for tensor in bucket.stored if tensor.numel()]
        parts = [_sum(tensor).to(self._mesh.device) for tensor in stored]
        found = 0
        for part in torch.stack(parts).tolist() if parts else ():
            found = (found * _FACTOR + part) & (2**64 - 1)  # an odd factor loses no bit
        return found - 2**64 if found >= 2**63 else found

    def settle(self, step: int) -> None:
        """Find out where digests differ, and heal it or raise. A collective.

        Args:
            step: the step of this process, counted from 1.

        Raises:
            ReplicaError: on all ranks, unless all was healed.
        """
        differences = _differences(self._compare())
        weights = sorted({difference.item[0] for difference in differences if difference.item[1:] == _WEIGHTS})
        if not weights:
            return  # the difference is in padding between parameters
        odd = _odd_ones(differences)
        subject = f"replicas hold different weights: {first_of(weights, _SHOWN)}"
        if odd is None:
            apart = _first_apart(differences)
            text = f"{subject} of {' and '.join(map(str, apart))}{self._values(weights[0], apart)}"
        else:
            text = f"{subject} of {' and '.join(map(str, odd))}, unlike {self._mesh.replicate_size - 1} other replicas"
        heals = self.policy == "heal" and odd is not None
        named = apart if odd is None else odd
        if self._mesh.is_first:
            details = {"ranks": [h.rank for h in named], "parameters": weights[:_SHOWN], "healed": heals}
            # Before the error, which ends the run, so that its report contains this.
            JOURNAL.note(Happening.REPLICA, text, rank=named[0].rank, **details)
        if not heals:
            raise ReplicaError(f"rank {self._mesh.rank}, step {step} of this process: {text}", hint=_hint(odd is None))
        self._copy({(each.column, each.item): each.row_of(each.right) for each in differences})
        self._say(f"{text}; it has their weights and optimizer state again")

    def heal_from(self, rank: int) -> list[str]:
        """Give all replicas the weights and optimizer state of the one that `rank` is in. A collective.

        Returns:
            The parameters that differed.
        """
        holdings = self._compare()
        row = next((holding.row for holding in holdings if holding.rank == rank), None)
        if row is None:
            raise ConfigError(f"heal_replicas(from_rank={rank}): no such rank shares this model")
        wrong = {(difference.column, difference.item): row for difference in _differences(holdings)}
        self._copy(wrong)
        return sorted({item[0] for _, item in wrong})

    # -- what there is ------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[tuple[Item, torch.Tensor]]:
        for bucket in self._buckets():
            for index, parameter in enumerate(bucket.sharded_parameters):
                yield from _pieces((parameter.name, *_WEIGHTS), bucket.weights(index))
                for optimizer in self._optimizers():
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            local = value.local if isinstance(value, ShardedTensor) else value.detach()
                            yield from _pieces((parameter.name, type(optimizer).__name__, str(key)), local)

    @torch.no_grad()
    def _compare(self) -> list[_Holding]:
        """Return what every rank has, the same on all of them. A collective."""
        mesh = self._mesh
        hashes = {item: _hash(tensor) for item, tensor in self._items()}
        own = _Holding(mesh.rank, this_process(), mesh.replicate_rank, mesh.shard_rank, hashes)
        return mesh.all_gather_object(own)

    @torch.no_grad()
    def _values(self, name: str, apart: Sequence[_Holding]) -> str:
        """Return the first element of a parameter that differs, as two ranks have it. A collective."""
        mesh, rank = self._mesh, self._mesh.rank
        held, start = self._local(name) if any(holding.rank == rank for holding in apart) else (None, 0)
        blocks = None if held is None else (start, [_hash(block) for block in held.split(_BLOCK)])
        (start, first), (_, second) = filter(None, mesh.all_gather_object(blocks))
        begin = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b) * _BLOCK
        block = None if held is None else (rank, held[begin : begin + _BLOCK].cpu().clone())
        (one, a), (other, b) = filter(None, mesh.all_gather_object(block))
        differs = (a.view(torch.uint8).view(len(a), -1) != b.view(torch.uint8).view(len(b), -1)).any(1)
        place = int(differs.nonzero()[0])
        number = start + begin + place
        return f"; element {number} is {a[place].item():g} on rank {one}, {b[place].item():g} on rank {other}"

    def _local(self, name: str) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a parameter, and the number of the part's first element."""
        for bucket in self._buckets():
            for index, parameter in enumerate(bucket.sharded_parameters):
                start = bucket.layout.interval(index, self._mesh.shard_rank).start
                for (found, *_), held in _pieces((parameter.name, *_WEIGHTS), bucket.weights(index)):
                    if found == name:
                        return held.reshape(-1), start if found == parameter.name else 0
        raise AssertionError(name)

    @torch.no_grad()
    def _copy(self, sources: dict[tuple[int, Item], int]) -> None:
        """Copy items, by column, from the replica in that row. A collective of each column's ranks."""
        mesh, group = self._mesh, self._mesh.replicate_group
        assert group is not None  # noqa: S101 -- something differs, so there are replicas
        held = dict(self._items())
        for (column, item), row in sorted(sources.items()):
            if column != mesh.shard_rank:
                continue
            tensor = held[item]
            sent = tensor.reshape(-1).view(torch.uint8).to(mesh.device, copy=True)
            dist.broadcast(sent, src=dist.get_global_rank(group, row), group=group)
            if mesh.replicate_rank != row:
                tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
        for bucket in self._buckets():
            bucket.touch()  # gathered values are of the old weights

    def _say(self, text: str) -> None:
        if self._mesh.is_first:
            sys.stderr.write(f"fullshard: {text}\n")
            sys.stderr.flush()


def _hint(is_even: bool) -> str:
    if is_even:
        return (
            "as many replicas say one thing as the other, so you decide: a value that is far off is the wrong one, and "
            "model.heal_replicas(from_rank=...) gives all of them the weights of that rank; or go on from a checkpoint"
        )
    return (
        "go on from a checkpoint; training.replica_check = heal (model.set_replica_check('heal')) takes the weights of "
        "the other replicas. A host that is named more than once has broken memory"
    )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that change if any bit of the tensor changes."""
    words = torch.int64 if tensor.nbytes % 8 == tensor.storage_offset() * tensor.itemsize % 8 == 0 else torch.uint8
    return tensor.detach().reshape(-1).view(words).sum(dtype=torch.int64)


def _pieces(item: Item, tensor: torch.Tensor) -> Iterator[tuple[Item, torch.Tensor]]:
    """Yield the tensors to compare: the tensor itself, or those that it wraps."""
    if not torch_private.has_own_dispatch(type(tensor)):
        yield item, tensor
        return
    for name, inner in inner_tensors(tensor).items():
        yield (f"{item[0]}.{name}", *item[1:]), inner


def _hash(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().reshape(-1).view(torch.uint8).cpu().contiguous().numpy()
    return hashlib.blake2b(data.data, digest_size=8).digest()


def _differences(holdings: Sequence[_Holding]) -> list[_Difference]:
    """Return the differences between items that all replicas have."""
    columns: dict[int, list[_Holding]] = {}
    for holding in sorted(holdings, key=lambda h: h.row):
        columns.setdefault(holding.column, []).append(holding)
    items = [(column, item, own) for column, own in columns.items() for item in own[0].hashes]
    shared = [(c, item, own) for c, item, own in items if all(item in holding.hashes for holding in own)]
    found = [_Difference(c, item, [(holding.hashes[item], holding) for holding in own]) for c, item, own in shared]
    return [each for each in found if len({value for value, _ in each.held}) > 1]


def _odd_ones(differences: Sequence[_Difference]) -> list[_Holding] | None:
    """Return the ranks that differ from most of their replicas; None if some item has no majority."""
    if any(each.right is None for each in differences):
        return None
    odd = {holding.rank: holding for each in differences for value, holding in each.held if value != each.right}
    return [odd[rank] for rank in sorted(odd)]


def _first_apart(differences: Sequence[_Difference]) -> tuple[_Holding, _Holding]:
    """Return two replicas whose weights differ in the first parameter that differs anywhere."""
    of_weights = [each for each in differences if each.item[1:] == _WEIGHTS]
    (value, one), *others = min(of_weights, key=lambda each: (each.column, each.item)).held
    return one, next(holding for found, holding in others if found != value)
