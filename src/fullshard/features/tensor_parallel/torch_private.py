"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file


def groups_of(placement: Placement) -> tuple[int, int] | None:
    """Return the dim and number of groups if a placement splits several groups along a dim, or None.

    Since 2.6.
    """
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rows_of_chunks(chunks: int) -> Placement:
    """Return the placement of the rows left here by `Shard(0)` over another axis of `chunks` ranks. Since 2.6."""
    return _StridedShard(0, split_factor=chunks)


def set_local(dtensor: DTensor, other: DTensor) -> None:
    """Replace the contents of a DTensor with those of another, in place. Since 2.0.

    torch's `.data` does not change the part that is stored in Python.
    """
    dtensor.data = other
    dtensor._local_tensor, dtensor._spec = other._local_tensor, other._spec
