"""Send the pieces of each matrix to the rank that owns it, and send the pieces of the result back.

    to the owners    each rank sends its pieces of the matrices that other ranks own. Each bucket has its own exchange,
                     except that buckets with few elements per rank share one
    at the owners    each rank computes with its matrices of one exchange while the next exchange is in flight
    back             the same exchanges in reverse, plus an exchange along the replicate axis for each of them if the
                     matrices are distributed over the replicas, too

A rank therefore holds its matrices of at most three exchanges at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fullshard.comm.base import Collectives, SplitSizes, Work
from fullshard.core.errors import OptimizerError
from fullshard.core.events import EventKind
from fullshard.core.layout import Interval
from fullshard.engine.bucket import Bucket
from fullshard.engine.parameter import ShardedParameter
from fullshard.plan.dealing import Dealing, Matrix, deal, matrices_in


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Contiguous elements of a matrix on one rank, given as the matrix number and an interval of the bucket."""

    matrix: int
    interval: Interval


def sent(dealing: Dealing, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
    """Return the pieces of a bucket's matrices that `rank` sends to owners in the replica `row`, grouped by owner."""
    by_owner: list[list[MatrixPiece]] = [[] for _ in range(dealing.shard_size)]
    own = dealing.layouts[bucket].rank_interval(rank)
    for number in dealing.by_bucket[bucket]:
        common, (to_row, owner) = dealing.matrices[number].interval.intersect(own), dealing.owners[number]
        if common.numel and to_row == row:
            by_owner[owner].append(MatrixPiece(number, common))
    return by_owner


def gathered(dealing: Dealing, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
    """Return the pieces of the matrices that `rank` of the replica `row` owns in a bucket, grouped by source rank."""
    by_source: list[list[MatrixPiece]] = [[] for _ in range(dealing.shard_size)]
    layout = dealing.layouts[bucket]
    for number in dealing.by_bucket[bucket]:
        if dealing.owners[number] == (row, rank):
            whole = dealing.matrices[number].interval
            for source in range(whole.start // layout.shard_numel, (whole.stop - 1) // layout.shard_numel + 1):
                by_source[source].append(MatrixPiece(number, whole.intersect(layout.rank_interval(source))))
    return by_source


Give = Callable[[ShardedParameter], torch.Tensor]
"""Returns this rank's interval of the values to send to owners, with shape (n,) or (n, width)."""
Compute = Callable[[ShardedParameter, int, torch.Tensor], torch.Tensor]
"""Returns the result for one matrix, given its parameter, its number within the parameter, and its values of shape
(rows, columns, ...)."""
Take = Callable[[ShardedParameter, torch.Tensor], None]
"""Receives this rank's interval of the results for a parameter's matrices, with shape (n,)."""


class WholeMatrices:
    """Assigns the matrices of an optimizer's parameters on one mesh to its ranks, and exchanges them.

    Every rank must pass the same parameters. `flattened` contains the ids of parameters with three dims that are
    treated as one matrix instead of a batch of matrices.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], flattened: set[int]) -> None:
        split = next((p for p in parameters if p.spec.is_chunked), None)
        if split is not None:
            raise OptimizerError(
                f"{split.name} {tuple(split.shape)} is split by tensor parallelism, and the ranks that shard it hold "
                f"only {tuple(split.spec.sharded_shape)}, so the complete matrix is not available",
                hint="use AdamW with tensor parallelism, or replace tensor parallelism with more ranks to shard over",
            )
        self.mesh = mesh = parameters[0].mesh
        self._lines = [f"{p.name} {tuple(p.shape)}{' flattened' * (id(p) in flattened)}" for p in parameters]
        self._is_agreed = False
        self._buckets = list(dict.fromkeys(p.bucket for p in parameters))
        numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        matrices: list[Matrix] = []
        self._parameter_of: list[ShardedParameter] = []
        self._first: dict[int, int] = {}
        for parameter in parameters:
            bucket = parameter.bucket
            flatten = id(parameter) in flattened
            found = matrices_in(numbers[bucket], bucket.layout, parameter._index, flatten=flatten)
            self._first[id(parameter)] = len(matrices)
            matrices += found
            self._parameter_of += [parameter] * len(found)
        layouts = [bucket.layout for bucket in self._buckets]
        self.dealing = deal(layouts, matrices, replicate_size=mesh.replicate_size, shard_size=mesh.shard_size)

    def owners(self) -> dict[int, list[tuple[int, int]]]:
        """Return the (replicate rank, shard rank) of the owner of each matrix, in lists keyed by parameter id."""
        owners: dict[int, list[tuple[int, int]]] = {key: [] for key in self._first}
        for parameter, owner in zip(self._parameter_of, self.dealing.owners, strict=True):
            owners[id(parameter)].append(owner)
        return owners

    def update(
        self,
        given: Sequence[ShardedParameter],
        dtype: torch.dtype,
        *,
        width: int = 1,
        give: Give,
        compute: Compute,
        take: Take,
    ) -> None:
        """Let the owner of each matrix of the `given` parameters compute the result for it. This is a collective.

        Every rank must pass the same parameters. Matrices are sent and computed in `dtype`. Owners receive `width`
        values for each element.
        """
        if not self._is_agreed:
            self.mesh.check_agreement(self._lines, what="the parameters of an optimizer that needs complete matrices")
            self._is_agreed = True
        travel = _Travel(self, given, dtype, width)
        turns = range(len(travel))
        here, gone = deque(travel.to_owners(turn, give) for turn in turns[:1]), deque[_Coming]()
        for turn in turns:
            # Every rank starts the next exchange before it waits for the matrices of this one.
            here.extend(travel.to_owners(after, give) for after in turns[turn + 1 : turn + 2])
            gone.append(travel.back(turn, self._made(travel.whole(here.popleft()), dtype, compute)))
            if turn:  # one turn later, so that the way back overlaps with computation
                travel.take(turn - 1, gone.popleft(), take)
        for last in turns[-1:]:
            travel.take(last, gone.popleft(), take)

    def _made(self, matrices: dict[int, torch.Tensor], dtype: torch.dtype, compute: Compute) -> dict[int, torch.Tensor]:
        """Compute the flat result for each of this rank's matrices, and let it replace its matrix to save memory."""
        for number in matrices:
            parameter = self._parameter_of[number]
            made = compute(parameter, number - self._first[id(parameter)], matrices[number])
            matrices[number] = made.reshape(-1).to(dtype)
        return matrices


@dataclass(frozen=True, slots=True)
class _Coming:
    """The pieces that this rank receives in one exchange, and the work to wait for."""

    pieces: list[MatrixPiece]
    work: Work
    leaving: torch.Tensor  # this rank's send buffer, which must stay alive during the exchange
    bucket: Bucket
    what: str
    width: int

    def wait(self) -> list[tuple[MatrixPiece, torch.Tensor]]:
        """Wait until the pieces have arrived, and return each with its values."""
        with self.bucket.owner.waiting(f"pieces of matrices {self.what}"):
            received = self.work.wait()
        sizes = [piece.interval.numel * self.width for piece in self.pieces]
        return list(zip(self.pieces, received.split_with_sizes(sizes), strict=True))


class _Travel:
    """The exchanges of one optimizer step."""

    def __init__(self, whole: WholeMatrices, given: Sequence[ShardedParameter], dtype: torch.dtype, width: int) -> None:
        self._whole, self._given = whole, {id(parameter) for parameter in given}
        self._dtype, self._width = dtype, width
        self._mesh, self._dealing = whole.mesh, whole.dealing
        by_bucket: dict[Bucket, list[ShardedParameter]] = {bucket: [] for bucket in whole._buckets}
        for parameter in given:
            by_bucket[parameter.bucket].append(parameter)
        present = [[n for n in numbers if by_bucket[whole._buckets[n]]] for numbers in self._dealing.exchanges]
        self._exchanges = [
            (numbers, [p for n in numbers for p in by_bucket[whole._buckets[n]]]) for numbers in present if numbers
        ]

    def __len__(self) -> int:
        """Return the number of exchanges to the owners, which equals the number of exchanges back."""
        return len(self._exchanges)

    def to_owners(self, turn: int, give: Give) -> _Coming:
        """Start to send the pieces of exchange number `turn` to the owners."""
        numbers, parameters = self._exchanges[turn]
        local = {id(p): give(p) for p in parameters}
        leaving, arriving = self._sent(numbers), self._gathered(numbers)
        sent = [self._part_of(local, piece) for pieces in leaving for piece in pieces]
        return self._exchange(self._mesh.reduce, numbers[0], sent, leaving, arriving, "to owners", self._width)

    def whole(self, arriving: _Coming) -> dict[int, torch.Tensor]:
        """Wait for the pieces of an exchange, and return the complete matrices that this rank owns, keyed by number."""
        pieces_of: dict[int, list[torch.Tensor]] = {}
        for piece, part in arriving.wait():
            pieces_of.setdefault(piece.matrix, []).append(part)
        known = self._dealing.matrices
        wide = [] if self._width == 1 else [self._width]
        return {n: torch.cat(parts).view(known[n].rows, known[n].columns, *wide) for n, parts in pieces_of.items()}

    def back(self, turn: int, results: dict[int, torch.Tensor]) -> _Coming:
        """Start to send the results of exchange number `turn` back to the ranks that hold the pieces."""
        numbers, _ = self._exchanges[turn]
        leaving, arriving = self._gathered(numbers), self._sent(numbers)
        made = [self._part_of_matrix(results, piece) for pieces in leaving for piece in pieces]
        return self._exchange(self._mesh.reduce, numbers[0], made, leaving, arriving, "from owners")

    def take(self, turn: int, arriving: _Coming, take: Take) -> None:
        """Wait for the results of an exchange, and pass this rank's interval of each parameter to `take`."""
        numbers, parameters = self._exchanges[turn]
        received = arriving.wait()
        received += self._across(numbers, received)
        pieces_of: dict[int, list[tuple[MatrixPiece, torch.Tensor]]] = {}
        for piece, part in received:
            pieces_of.setdefault(id(self._whole._parameter_of[piece.matrix]), []).append((piece, part))
        for parameter in parameters:
            own = sorted(pieces_of.get(id(parameter), ()), key=lambda found: found[0].interval.start)
            if own:
                take(parameter, own[0][1] if len(own) == 1 else torch.cat([part for _, part in own]))

    def _across(
        self, numbers: Sequence[int], own: Sequence[tuple[MatrixPiece, torch.Tensor]]
    ) -> list[tuple[MatrixPiece, torch.Tensor]]:
        """Exchange results between replicas. Each replica sends the results for the matrices assigned to it."""
        mesh = self._mesh
        if mesh.replicate_size == 1:
            return []
        rows = range(mesh.replicate_size)
        pieces = [piece for piece, _ in own]
        leaving = [[] if row == mesh.replicate_rank else pieces for row in rows]
        arriving = [
            [] if row == mesh.replicate_rank else [p for ps in self._sent(numbers, row) for p in ps] for row in rows
        ]
        sent = [part for pieces in leaving if pieces for _, part in own]
        return self._exchange(mesh.replicate, numbers[0], sent, leaving, arriving, "to replicas").wait()

    def _exchange(
        self,
        collectives: Collectives,
        first: int,
        sent: Sequence[torch.Tensor],
        leaving: Sequence[Sequence[MatrixPiece]],
        arriving: Sequence[Sequence[MatrixPiece]],
        what: str,
        width: int = 1,
    ) -> _Coming:
        """Start to send pieces to other ranks and to receive theirs. The exchange belongs to bucket number `first`."""
        bucket = self._whole._buckets[first]
        sizes = [[width * sum(p.interval.numel for p in pieces) for pieces in each] for each in (leaving, arriving)]
        splits, device = SplitSizes(*sizes), self._mesh.device
        buffer = collectives.staging(sum(splits.leaving), self._dtype, device)
        for place, part in zip(buffer.split_with_sizes([part.numel() for part in sent]), sent, strict=True):
            place.copy_(part.reshape(-1))
        received = torch.empty(sum(splits.arriving), dtype=self._dtype, device=device)
        nbytes = (sum(splits.leaving) - splits.leaving[collectives.rank]) * self._dtype.itemsize
        bucket.owner.emit(EventKind.PIECES_SENT, nbytes, what=what, bucket=bucket.number)
        work = collectives.exchange(buffer, received, splits, tag=bucket.tag)
        return _Coming([piece for each in arriving for piece in each], work, buffer, bucket, what, width)

    def _sent(self, numbers: Sequence[int], row: int | None = None) -> list[list[MatrixPiece]]:
        """Return this rank's pieces of the matrices of the replica `row` (default: its own), grouped by owner."""
        row = self._mesh.replicate_rank if row is None else row
        return self._present([sent(self._dealing, number, row, self._mesh.shard_rank) for number in numbers])

    def _gathered(self, numbers: Sequence[int]) -> list[list[MatrixPiece]]:
        """Return the pieces of the matrices that this rank owns, grouped by source rank."""
        mesh = self._mesh
        return self._present([gathered(self._dealing, n, mesh.replicate_rank, mesh.shard_rank) for n in numbers])

    def _present(self, of_buckets: Sequence[Sequence[Sequence[MatrixPiece]]]) -> list[list[MatrixPiece]]:
        """Join the pieces of several buckets by rank, and skip pieces of parameters that this step does not update."""
        parameter_of = self._whole._parameter_of
        return [
            [piece for pieces in of_rank for piece in pieces if id(parameter_of[piece.matrix]) in self._given]
            for of_rank in zip(*of_buckets, strict=True)
        ]

    def _part_of(self, local: dict[int, torch.Tensor], piece: MatrixPiece) -> torch.Tensor:
        """Return the elements of a piece from the local values in `local`, which `give` has returned."""
        parameter = self._whole._parameter_of[piece.matrix]
        layout, index = parameter.bucket.layout, parameter._index
        first = layout.offsets[index] + layout.interval(index, self._mesh.shard_rank).start
        return local[id(parameter)][piece.interval.start - first : piece.interval.stop - first]

    def _part_of_matrix(self, results: dict[int, torch.Tensor], piece: MatrixPiece) -> torch.Tensor:
        """Return the elements of a piece from the results for complete matrices, which `compute` has returned."""
        first = self._dealing.matrices[piece.matrix].interval.start
        return results[piece.matrix][piece.interval.start - first : piece.interval.stop - first]
