"""Private names of torch that only this feature uses, beside those of `comm.torch_private`; see there."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file


def groups_of(placement: Placement) -> tuple[int, int] | None:
    """Return dim and number of groups if a placement cuts each of several groups along a dim; else None. Since 2.6."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rows_of_chunks(chunks: int) -> Placement:
    """Return the placement of rows that `Shard(0)` over another axis, of `chunks` ranks, has left here. Since 2.6."""
    return _StridedShard(0, split_factor=chunks)


def set_local(dtensor: DTensor, other: DTensor) -> None:
    """Make a DTensor what another is, in place: torch's `.data` leaves behind the part that is in Python. Since 2.0."""
    dtensor.data = other
    dtensor._local_tensor, dtensor._spec = other._local_tensor, other._spec
