"""Whole matrices for optimizers: pieces go to each matrix's owner, and pieces of what it makes of them come back.

    to the owners    one exchange per bucket: of what each rank has, what belongs to matrices of another
    at the owners    every rank computes with its own matrices, all ranks at once
    back             one exchange per bucket, and one along the replicate axis, where matrices are dealt, too

So a rank holds its own matrices and what one bucket sends, never more. Who owns what is `core.matrices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from fullshard.comm.base import Collectives, Parts, Work, cut
from fullshard.core.errors import OptimizerError
from fullshard.core.events import EventKind
from fullshard.core.matrices import Dealing, Matrix, MatrixPiece, deal, matrices_in
from fullshard.engine.agree import check_agreement
from fullshard.engine.bucket import Bucket, bucket_of
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.unit import owner_of


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of an element depends on the rest of its matrix, and that works on sharded parameters.

    It computes element by element with what each rank has; `WholeMatrices` has matrices computed as a whole.

    Attributes:
        whole_state: keys of state that every rank has whole, the same; all other tensors are laid out as the parameter.
    """

    whole_state: frozenset[str] = frozenset()


Give = Callable[[ShardedParameter], torch.Tensor]
"""What of a parameter its owner is to get whole: this rank's interval of it, shape (n,)."""
Compute = Callable[[ShardedParameter, torch.Tensor], torch.Tensor]
"""What the owner makes of one matrix, shape (rows, columns), of a parameter: another of that shape."""
Take = Callable[[ShardedParameter, torch.Tensor], None]
"""This rank's interval of what was made of a parameter's matrices, shape (n,)."""


class WholeMatrices:
    """The matrices of an optimizer's parameters, dealt to the ranks of their mesh. A collective to make.

    Args:
        parameters: of two dims or more, all on one mesh; the same on every rank.
        flattened: those of three dims that are one matrix each and no batch.

    Raises:
        OptimizerError: tensor parallelism has split one of them, so that no rank of the mesh has all its pieces.
        CommunicationError: the ranks' parameters differ.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], flattened: set[int]) -> None:
        split = next((p for p in parameters if p.span.is_tiled), None)
        if split is not None:
            raise OptimizerError(
                f"{split.name} {tuple(split.shape)} is split by tensor parallelism, and the ranks that shard it have "
                f"{tuple(split.span.tile_shape)} of it: no whole matrix to compute with",
                hint="use AdamW with tensor parallelism, or more ranks to shard over in its place",
            )
        self.mesh = mesh = parameters[0].mesh
        lines = [f"{p.name} {tuple(p.shape)}{' flattened' * (id(p) in flattened)}" for p in parameters]
        check_agreement(mesh, lines, what="the parameters of an optimizer that needs whole matrices")
        self._buckets = list(dict.fromkeys(map(bucket_of, parameters)))
        numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        matrices: list[Matrix] = []
        self._owners_of: list[ShardedParameter] = []
        for parameter in parameters:
            bucket = bucket_of(parameter)
            flatten = id(parameter) in flattened
            found = matrices_in(numbers[bucket], bucket.layout, parameter._index, flatten=flatten)
            matrices += found
            self._owners_of += [parameter] * len(found)
        layouts = [bucket.layout for bucket in self._buckets]
        self.dealing: Dealing = deal(layouts, matrices, replicate_size=mesh.replicate_size, shard_size=mesh.shard_size)

    def update(
        self, given: Sequence[ShardedParameter], dtype: torch.dtype, *, give: Give, compute: Compute, take: Take
    ) -> None:
        """Have every matrix computed by its owner. A collective.

        Args:
            given: the parameters to update, the same on every rank: those that have gradients.
            dtype: what matrices are sent and computed in.
            give: called on every rank for each of `given`.
            compute: called for each matrix that this rank owns.
            take: called on every rank for each of `given` of which it has elements.
        """
        travel = _Travel(self, {id(parameter) for parameter in given}, dtype)
        by_bucket: list[list[ShardedParameter]] = [[] for _ in self._buckets]
        for parameter in given:
            by_bucket[self._buckets.index(bucket_of(parameter))].append(parameter)
        matrices = travel.to_owners(by_bucket, give)
        for number in list(matrices):
            matrices[number] = compute(self._owners_of[number], matrices[number]).reshape(-1)
        for parameter, update in travel.back(by_bucket, matrices):
            take(parameter, update)


class _Travel:
    """The exchanges of one step."""

    def __init__(self, whole: WholeMatrices, given: set[int], dtype: torch.dtype) -> None:
        self._whole, self._given, self._dtype = whole, given, dtype
        self._mesh, self._dealing = whole.mesh, whole.dealing

    def to_owners(self, by_bucket: Sequence[Sequence[ShardedParameter]], give: Give) -> dict[int, torch.Tensor]:
        """This rank's matrices, each whole, by number."""
        mesh, matrices = self._mesh, dict[int, torch.Tensor]()
        for number, parameters in enumerate(by_bucket):
            if not parameters:
                continue
            bucket, local = self._whole._buckets[number], {p._index: give(p) for p in parameters}
            leaving = self._present(self._dealing.sent(number, mesh.replicate_rank, mesh.shard_rank))
            arriving = self._present(self._dealing.gathered(number, mesh.replicate_rank, mesh.shard_rank))
            sent = [self._part_of(bucket, local, piece) for pieces in leaving for piece in pieces]
            received = self._exchange(mesh.reduce, bucket, sent, leaving, arriving, "to owners")
            pieces_of: dict[int, list[torch.Tensor]] = {}
            for piece, part in received:
                pieces_of.setdefault(piece.matrix, []).append(part)
            for matrix, parts in pieces_of.items():
                shape = self._dealing.matrices[matrix].rows, self._dealing.matrices[matrix].columns
                matrices[matrix] = torch.cat(parts).view(shape)
        return matrices

    def back(
        self, by_bucket: Sequence[Sequence[ShardedParameter]], results: dict[int, torch.Tensor]
    ) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
        """This rank's intervals of the parameters' updates."""
        mesh = self._mesh
        for number, parameters in enumerate(by_bucket):
            if not parameters:
                continue
            bucket = self._whole._buckets[number]
            leaving = self._present(self._dealing.gathered(number, mesh.replicate_rank, mesh.shard_rank))
            arriving = self._present(self._dealing.sent(number, mesh.replicate_rank, mesh.shard_rank))
            made = [self._part_of_matrix(results, piece) for pieces in leaving for piece in pieces]
            for piece in (piece for pieces in leaving for piece in pieces):
                results.pop(piece.matrix, None)
            received = self._exchange(mesh.reduce, bucket, made, leaving, arriving, "from owners")
            received += self._across(number, bucket, received)
            pieces_of: dict[int, list[tuple[MatrixPiece, torch.Tensor]]] = {}
            for piece, part in received:
                pieces_of.setdefault(id(self._whole._owners_of[piece.matrix]), []).append((piece, part))
            for parameter in parameters:
                own = sorted(pieces_of.get(id(parameter), ()), key=lambda found: found[0].interval.start)
                if own:
                    yield parameter, own[0][1] if len(own) == 1 else torch.cat([part for _, part in own])

    def _across(
        self, number: int, bucket: Bucket, own: Sequence[tuple[MatrixPiece, torch.Tensor]]
    ) -> list[tuple[MatrixPiece, torch.Tensor]]:
        """What the other rows, which have the same interval, got from their owners; they get what this one has."""
        mesh = self._mesh
        if mesh.replicate_size == 1:
            return []
        rows = range(mesh.replicate_size)
        pieces = [piece for piece, _ in own]
        leaving = [[] if row == mesh.replicate_rank else pieces for row in rows]
        arriving = [
            [p for ps in self._present(self._dealing.sent(number, row, mesh.shard_rank)) for p in ps]
            if row != mesh.replicate_rank
            else []
            for row in rows
        ]
        sent = [part for pieces in leaving if pieces for _, part in own]
        return self._exchange(mesh.replicate, bucket, sent, leaving, arriving, "to replicas")

    def _exchange(
        self,
        collectives: Collectives,
        bucket: Bucket,
        sent: Sequence[torch.Tensor],
        leaving: Sequence[Sequence[MatrixPiece]],
        arriving: Sequence[Sequence[MatrixPiece]],
        what: str,
    ) -> list[tuple[MatrixPiece, torch.Tensor]]:
        """Send pieces to ranks, and have those that come."""
        sizes = [[sum(piece.interval.numel for piece in pieces) for pieces in each] for each in (leaving, arriving)]
        parts, device = Parts(*sizes), self._mesh.device
        buffer = collectives.pages.staging(sum(parts.leaving), self._dtype, device)
        for place, part in zip(cut(buffer, [part.numel() for part in sent]), sent, strict=True):
            place.copy_(part)
        received = torch.empty(sum(parts.arriving), dtype=self._dtype, device=device)
        nbytes = (sum(parts.leaving) - parts.leaving[collectives.rank]) * self._dtype.itemsize
        bucket.emit(EventKind.PIECES_SENT, nbytes, what)
        work: Work = collectives.exchange(buffer, received, parts, tag=bucket.tag)
        with owner_of(bucket).waiting(f"pieces of matrices {what}"):
            work.wait()
        pieces = [piece for each in arriving for piece in each]
        return list(zip(pieces, cut(received, [piece.interval.numel for piece in pieces]), strict=True))

    def _present(self, by_rank: Sequence[Sequence[MatrixPiece]]) -> list[list[MatrixPiece]]:
        """Those of parameters that are updated in this step."""
        owners_of = self._whole._owners_of
        return [[p for p in pieces if id(owners_of[p.matrix]) in self._given] for pieces in by_rank]

    def _part_of(self, bucket: Bucket, local: dict[int, torch.Tensor], piece: MatrixPiece) -> torch.Tensor:
        """A piece out of what `give` has given."""
        index = self._whole._owners_of[piece.matrix]._index
        first = bucket.layout.offsets[index] + bucket.layout.interval(index, self._mesh.shard_rank).start
        return local[index][piece.interval.start - first : piece.interval.stop - first]

    def _part_of_matrix(self, results: dict[int, torch.Tensor], piece: MatrixPiece) -> torch.Tensor:
        """A piece of what `compute` has made."""
        first = self._dealing.matrices[piece.matrix].interval.start
        return results[piece.matrix][piece.interval.start - first : piece.interval.stop - first]
