"""Compare the weights of replicas: find a bit that has flipped in one of them, name it, and heal it if asked.

A rank adds up its weights as 64-bit integers: one pass over them, which notices every flip. Only if sums differ does it
compare parameters, and the optimizer state kept for them, one by one. The values that most replicas have are right.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.core.errors import ConfigError, ReplicaError, first_of
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.process import this_process
from fullshard.engine.bucket import Bucket
from fullshard.engine.kinds import inner_tensors
from fullshard.engine.schedule import Schedule
from fullshard.engine.sharded_tensor import ShardedTensor

_SHOWN = 3
_FACTOR = 1_000_003
_WEIGHTS = ("", "weights")
"""The rest of an item's key for weights; for state it is an optimizer's class and the state's name."""
_EVEN_HINT = (
    "as many replicas say one thing as the other, so you decide: a value that is far off is the wrong one, and "
    "model.heal_replicas(from_rank=...) gives all of them the weights of that rank; or go on from a checkpoint"
)
_HINT = (
    "go on from a checkpoint; training.replica_check = heal (model.set_replica_check('heal')) takes the weights of "
    "the other replicas. A host that is named more than once has broken memory"
)

Item = tuple[str, str, str]
"""A parameter's name, and which of its tensors: see `_WEIGHTS`."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank, its place in the mesh, and the hashes of its values."""

    rank: int
    where: str
    row: int
    column: int
    hashes: Mapping[Item, bytes]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.where})"


class Replicas:
    """The replicas of one model.

    Args:
        model: the model; ranks with the same place along the shard axis of its mesh are replicas.
        optimizers: those that have stepped it.
    """

    def __init__(self, model: Schedule, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._mesh, self._optimizers = model, model.mesh, optimizers

    def _buckets(self) -> list[Bucket]:
        return [bucket for unit in self._model.units for bucket in unit.buckets]

    @torch.no_grad()
    def digest(self) -> int:
        """Return 64 bits, signed, of all weights of this rank; any changed bit changes the number."""
        parts = [_sum(stored).to(self._mesh.device) for bucket in self._buckets() for stored in bucket.stored]
        found = 0
        for part in torch.stack(parts).tolist() if parts else ():
            found = (found * _FACTOR + part) & (2**64 - 1)  # an odd factor loses no bit
        return found - 2**64 if found >= 2**63 else found

    def settle(self, *, heals: bool) -> None:
        """Find out where digests differ, and heal it, if that is wanted, or raise. A collective.

        Raises:
            ReplicaError: on all ranks, unless all was healed.
        """
        mesh, differences = self._mesh, differences_of(self._compare())
        weights = [key for key in differences if key[0][1:] == _WEIGHTS]
        if not weights:
            return  # the difference is in padding between parameters
        rows: dict[tuple[Item, int], int] = {}
        odd: dict[int, Holding] = {}
        for key, held in differences.items():
            values = [holding.hashes[key[0]] for holding in held]
            right, count = Counter(values).most_common(1)[0]
            if 2 * count > len(values):
                rows[key] = held[values.index(right)].row
                odd |= {h.rank: h for h, value in zip(held, values, strict=True) if value != right}
        is_even = len(rows) < len(differences)
        if is_even:
            item, (one, *others) = weights[0][0], differences[weights[0]]
            named = [one, next(other for other in others if other.hashes[item] != one.hashes[item])]
            end = self._first_element(item, *named)
        else:
            named = [odd[rank] for rank in sorted(odd)]
            end = f", unlike {mesh.replicate_size - 1} other replicas"
        names = list(dict.fromkeys(item[0] for item, _ in weights))
        text = f"replicas hold different weights: {first_of(names, _SHOWN)} of {' and '.join(map(str, named))}{end}"
        heals = heals and not is_even
        if mesh.is_first:
            details = {"ranks": [h.rank for h in named], "parameters": names[:_SHOWN], "healed": heals}
            # Before the error, which ends the run, so that its report contains this.
            JOURNAL.note(Happening.REPLICA, text, rank=named[0].rank, **details)
        if not heals:
            text = f"rank {mesh.rank}, step {self._model.steps + 1} of this process: {text}"
            raise ReplicaError(text, hint=_EVEN_HINT if is_even else _HINT)
        self._copy(rows)
        if mesh.is_first:
            sys.stderr.write(f"fullshard: {text}; it has their weights and optimizer state again\n")
            sys.stderr.flush()

    def heal_from(self, rank: int) -> list[str]:
        """Give all replicas the weights and optimizer state of the one that `rank` is in. A collective.

        Returns:
            The parameters that differed.
        """
        holdings = self._compare()
        row = next((holding.row for holding in holdings if holding.rank == rank), None)
        if row is None:
            raise ConfigError(f"heal_replicas(from_rank={rank}): no such rank shares this model")
        wrong = dict.fromkeys(differences_of(holdings), row)
        self._copy(wrong)
        return sorted({name for (name, *_), _ in wrong})

    # -- what there is ------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[tuple[Item, torch.Tensor, int]]:
        """Yield this rank's part of each item, and the number of its first element."""
        for bucket in self._buckets():
            for index, parameter in enumerate(bucket.sharded_parameters):
                start = bucket.layout.interval(index, self._mesh.shard_rank).start
                yield from _pieces((parameter.name, *_WEIGHTS), bucket.weights(index), start)
                for optimizer in self._optimizers:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            local = value.local if isinstance(value, ShardedTensor) else value.detach()
                            yield from _pieces((parameter.name, type(optimizer).__name__, str(key)), local, start)

    @torch.no_grad()
    def _compare(self) -> list[Holding]:
        """Return what every rank has, the same on all of them. A collective."""
        mesh = self._mesh
        hashes = {item: _hash(tensor) for item, tensor, _ in self._items()}
        return mesh.all_gather_object(Holding(mesh.rank, this_process(), mesh.replicate_rank, mesh.shard_rank, hashes))

    @torch.no_grad()
    def _first_element(self, wanted: Item, one: Holding, other: Holding) -> str:
        """Return the first element of an item that differs, as two replicas have it. A collective."""
        said = ""
        if self._mesh.shard_rank == one.column:
            own, start = next((tensor, start) for item, tensor, start in self._items() if item == wanted)
            theirs = self._held_in(one.row, own)
            if self._mesh.rank == other.rank:
                place = int((_bytes(theirs) != _bytes(own)).any(1).nonzero()[0])
                a, b = (held.reshape(-1)[place].item() for held in (theirs, own))
                said = f"; element {start + place} is {a:g} on rank {one.rank}, {b:g} on rank {other.rank}"
        return "".join(self._mesh.all_gather_object(said))

    def _held_in(self, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the replica in that row has in place of a tensor. A collective of this rank's replicas."""
        sent = tensor.reshape(-1).view(torch.uint8).to(self._mesh.device, copy=True)
        dist.broadcast(sent, group=self._mesh.replicate_group, group_src=row)
        return sent.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    @torch.no_grad()
    def _copy(self, rows: Mapping[tuple[Item, int], int]) -> None:
        """Copy items from the replicas in these rows. A collective of each column's ranks."""
        held = {item: tensor for item, tensor, _ in self._items()}
        for (item, column), row in rows.items():
            if column == self._mesh.shard_rank:
                held[item].copy_(self._held_in(row, held[item]))
        for bucket in self._buckets():
            bucket.touch()  # gathered values are of the old weights


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that change if any bit of the tensor changes."""
    words = torch.int64 if tensor.nbytes % 8 == tensor.storage_offset() * tensor.itemsize % 8 == 0 else torch.uint8
    return tensor.detach().reshape(-1).view(words).sum(dtype=torch.int64)


def _pieces(item: Item, tensor: torch.Tensor, start: int) -> Iterator[tuple[Item, torch.Tensor, int]]:
    """Yield the tensors to compare: the tensor itself, or those that it wraps."""
    if not torch_private.has_own_dispatch(type(tensor)):
        yield item, tensor, start
        return
    for name, inner in inner_tensors(tensor).items():
        yield (f"{item[0]}.{name}", *item[1:]), inner, 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, shape (elements, bytes)."""
    return tensor.detach().reshape(-1, 1).view(torch.uint8)


def _hash(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(_bytes(tensor).cpu().contiguous().numpy().data, digest_size=8).digest()


def differences_of(holdings: Sequence[Holding]) -> dict[tuple[Item, int], list[Holding]]:
    """Return the replicas, by row, of each item and column in which they differ; in the same order on all ranks."""
    found = {}
    for column in {holding.column for holding in holdings}:
        held = sorted((h for h in holdings if h.column == column), key=lambda h: h.row)
        for item in set.intersection(*(set(h.hashes) for h in held)):
            if len({h.hashes[item] for h in held}) > 1:
                found[item, column] = held
    return dict(sorted(found.items()))
