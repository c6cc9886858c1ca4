"""The placement that torch is told for a tensor of which each rank has an interval."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.tensor import Placement

from fullshard.core.layout import Interval


@dataclass(frozen=True)
class RaggedShard(Placement):
    """A placement along the shard axis: the flattened elements lie in a bucket that is cut into equal shares.

    Rank r has those of elements [r * shard_numel - offset, (r + 1) * shard_numel - offset) that exist.

    `is_shard()` is False, as for torch's own `_StridedShard`: callers that get True cut along `.dim` (torch's
    redistribution and `parallel.fsdp`, Transformers' reading of files), and an interval has no such dim. No other
    code calls it: not DCP, clipping, optimizers, PEFT, nor Accelerate.

    Attributes:
        shard_numel: elements of the bucket that each rank owns.
        offset: the tensor's start in the bucket.
        row_numel: elements of a row, if a rank's part is shaped as rows; 0: the part is flat.
    """

    shard_numel: int
    offset: int
    row_numel: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        """Make the C++ half of the placement; without it, `is_shard()` and the like would end the process."""
        super().__init__()

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[int, int, int]]:
        return RaggedShard, (self.shard_numel, self.offset, self.row_numel)

    def interval(self, rank: int, numel: int) -> Interval:
        """Return the elements of a flattened tensor of `numel` elements that `rank` has; empty if none."""
        own = Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel).shift(-self.offset)
        return Interval(0, numel).intersect(own)
