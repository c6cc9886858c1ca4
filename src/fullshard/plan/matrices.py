"""Work of an optimizer that needs whole matrices: which matrices, which ranks, and what travels for it in a step.

The dealing is that of `core.matrices`, which the engine uses, too; parameters' roles decide which ones are matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.core.dtypes import Dtypes, itemsize
from fullshard.core.matrices import Dealing, Matrix, MatrixCost, deal, matrices_in, matrix_shape
from fullshard.plan.layout import ModelLayout, grouped
from fullshard.plan.shapes import ModelShape, ParameterShape
from fullshard.plan.traffic import exchanged


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """A model's matrices, dealt to ranks.

    Attributes:
        dealing: to whom.
    """

    dealing: Dealing

    @property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.dealing.matrices)

    @property
    def numel(self) -> int:
        """Elements of all matrices."""
        return sum(matrix.numel for matrix in self.dealing.matrices)

    @property
    def ranks(self) -> int:
        """Number of ranks that the matrices are dealt to."""
        return self.dealing.replicate_size * self.dealing.shard_size

    @property
    def idle(self) -> int:
        """Number of ranks that own none."""
        return sum(not work for work in self.dealing.work)

    @property
    def over_mean(self) -> float:
        """The busiest rank's computation, over the mean."""
        work = self.dealing.work
        return max(work) * len(work) / max(1, sum(work))

    @property
    def sent_as(self) -> str:
        """Dtype in which matrices are sent and computed."""
        return self.dealing.cost.sent_as

    @property
    def kept_nbytes(self) -> int:
        """Bytes of state of the rank that keeps most for its matrices."""
        return max(self.dealing.kept_numel) * itemsize(self.sent_as)

    @property
    def owned_nbytes(self) -> int:
        """Bytes of the matrices of the rank that has most of them, while it computes."""
        return self.dealing.owned_numel * itemsize(self.sent_as)

    @property
    def working_nbytes(self) -> int:
        """Bytes that computing with one matrix needs in addition."""
        cost = self.dealing.cost
        return max(cost.working(m.rows, m.columns) for m in self.dealing.matrices) * itemsize(self.sent_as)

    @property
    def sent_nbytes(self) -> float:
        """Bytes that a rank sends to owners and back in a step, on average."""
        return 2 * self.dealing.moved_numel * itemsize(self.sent_as) / self.ranks

    @property
    def replicated_nbytes(self) -> float:
        """Bytes of updates that a rank sends along the replicate axis, on average."""
        return (self.dealing.replicate_size - 1) * self.numel * itemsize(self.sent_as) / self.ranks

    def links(self, ranks_per_host: int) -> list[tuple[float, float]]:
        """Return the busiest device's bytes inside its host and between hosts: one pair per exchange to owners."""
        busiest = [self.dealing.busiest_in(exchange) * itemsize(self.sent_as) for exchange in self.dealing.exchanges]
        return [exchanged(n, self.dealing.shard_size, stride=1, ranks_per_host=ranks_per_host) for n in busiest]

    def replica_links(self, ranks_per_host: int) -> tuple[float, float]:
        """Return the same for all exchanges along the replicate axis."""
        shard, replicas = self.dealing.shard_size, self.dealing.replicate_size
        return exchanged(self.replicated_nbytes, replicas, stride=shard, ranks_per_host=ranks_per_host)


def pieces_nbytes(dealing: Dealing, row: int, rank: int) -> int:
    """Return the bytes of matrix pieces that one rank sends in a step: to owners, back, and to the other rows."""
    return sum(dealing.sent_numel(row, rank)) * itemsize(dealing.cost.sent_as)


def matrix_work(model: ModelShape, layout: ModelLayout, dtypes: Dtypes, cost: MatrixCost) -> MatrixWork | None:
    """Deal a model's matrices, each at its owner's cost; None if no matrix is trained."""
    matrices: list[Matrix] = []
    number = 0
    for shapes, unit in zip(model.units, layout.units, strict=True):
        buckets = grouped(shapes.parameters, dtypes)
        for parameters, bucket in zip(buckets, unit.buckets, strict=True):
            for index, parameter in enumerate(parameters):
                if is_matrix(parameter):
                    matrices += matrices_in(number, bucket.layout, index, flatten=False)
            number += 1
    if not matrices:
        return None
    layouts = [bucket.layout for bucket in layout.buckets]
    sizes = {"replicate_size": layout.replicate_size, "shard_size": layout.shard_size}
    return MatrixWork(deal(layouts, matrices, **sizes, cost=cost))


def is_matrix(parameter: ParameterShape) -> bool:
    """Return whether it is updated as a matrix: hidden, adapter and expert weights are; embedding and head are not."""
    if not parameter.trainable or parameter.role in ("embedding", "head") or len(parameter.shape) < 2:
        return False
    return "embed" not in parameter.name and 1 not in matrix_shape(parameter.shape, flatten=False)[1:]
