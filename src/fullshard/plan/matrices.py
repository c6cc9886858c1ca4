"""Count the work and the sent bytes of an optimizer that updates complete matrices (Muon). See also `plan.dealing`."""

from dataclasses import dataclass

from fullshard.core.dtypes import Dtypes
from fullshard.plan.dealing import Dealing, Matrix, deal, matrices_in, matrix_shape
from fullshard.plan.layout import ModelLayout, grouped
from fullshard.plan.shapes import ModelShape, ParameterShape
from fullshard.plan.traffic import exchanged

SENT_AS = "bfloat16"
"""The dtype in which matrices are sent and processed."""
_ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """A model's matrices, and their assignment to the ranks that update them."""

    dealing: Dealing

    @property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.dealing.matrices)

    @property
    def numel(self) -> int:
        """Total number of elements in all matrices."""
        return sum(matrix.numel for matrix in self.dealing.matrices)

    @property
    def ranks(self) -> int:
        """Number of ranks among which the matrices are divided."""
        return self.dealing.replicate_size * self.dealing.shard_size

    @property
    def over_mean(self) -> float:
        """The ratio of the busiest rank's computation to the average over all ranks."""
        work = self.dealing.work()
        return max(work) * len(work) / max(1, sum(work))

    @property
    def owned_nbytes(self) -> int:
        """The most bytes of matrices on any rank: one exchange arrives while another is updated and a third leaves."""
        matrices, exchanges = self.dealing.matrices, self.dealing.exchanges
        numel = [self.dealing.of_ranks(lambda number: matrices[number].numel, exchange) for exchange in exchanges]
        windows = [numel[max(0, n - 1) : n + 2] for n in range(len(numel))]
        most: int = max(sum(held) for window in windows for held in zip(*window, strict=True))
        return most * _ITEMSIZE

    @property
    def working_nbytes(self) -> int:
        """Additional bytes for the iteration on one matrix: two copies of the matrix, and two of its square."""
        each = ((m.numel, min(m.rows, m.columns)) for m in self.dealing.matrices)
        return _ITEMSIZE * max(2 * (numel + side * side) for numel, side in each)

    @property
    def sent_nbytes(self) -> float:
        """The bytes that an average rank sends in a step, to the owners of matrices and back to the shards."""
        return 2 * sum(map(self.dealing.arriving, range(self.count))) * _ITEMSIZE / self.ranks

    @property
    def replicated_nbytes(self) -> float:
        """The bytes of updates that an average rank sends along the replicate axis in a step."""
        return (self.dealing.replicate_size - 1) * self.numel * _ITEMSIZE / self.ranks

    def links(self, ranks_per_host: int) -> list[tuple[float, float]]:
        """Return the bytes on the busiest device's links within a host and between hosts, for each exchange."""
        dealing = self.dealing
        busiest = [max(dealing.of_ranks(dealing.arriving, exchange)) * _ITEMSIZE for exchange in dealing.exchanges]
        return [exchanged(n, dealing.shard_size, stride=1, ranks_per_host=ranks_per_host) for n in busiest]

    def replica_links(self, ranks_per_host: int) -> tuple[float, float]:
        """Return the bytes between replicas on the busiest device's links, within a host and between hosts."""
        shard, replicas = self.dealing.shard_size, self.dealing.replicate_size
        return exchanged(self.replicated_nbytes, replicas, stride=shard, ranks_per_host=ranks_per_host)


def matrix_work(model: ModelShape, layout: ModelLayout, dtypes: Dtypes) -> MatrixWork | None:
    """Assign a model's matrices to the ranks that update them. Return None if no matrix is trained."""
    layouts, matrices = [bucket.layout for bucket in layout.buckets], list[Matrix]()
    groups = [group for unit in model.units for group in grouped(unit.parameters, dtypes)]
    for number, (parameters, bucket) in enumerate(zip(groups, layouts, strict=True)):
        for index, parameter in enumerate(parameters):
            if is_matrix(parameter):
                matrices += matrices_in(number, bucket, index, flatten=False)
    if not matrices:
        return None
    return MatrixWork(deal(layouts, matrices, replicate_size=layout.replicate_size, shard_size=layout.shard_size))


def is_matrix(parameter: ParameterShape) -> bool:
    """Return whether the optimizer updates a parameter as a whole matrix. Embeddings and heads are not matrices."""
    if not parameter.trainable or parameter.role in ("embedding", "head") or len(parameter.shape) < 2:
        return False
    return "embed" not in parameter.name and 1 not in matrix_shape(parameter.shape, flatten=False)[1:]
