"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file


def groups_of(placement: Placement) -> tuple[int, int] | None:
    """Return (dim, number of groups) if a placement splits several groups along a dim, or None. Since torch 2.6."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rows_of_chunks(chunks: int) -> Placement:
    """Return the placement for rows of a tensor that `Shard(0)` splits into `chunks` chunks. Since torch 2.6."""
    return _StridedShard(0, split_factor=chunks)


def set_local(dtensor: DTensor, other: DTensor) -> None:
    """Replace the contents of a DTensor in place with those of another DTensor. Since torch 2.0.

    Assigning to `.data` alone does not change the attributes that torch stores in Python.
    """
    dtensor.data = other
    dtensor._local_tensor, dtensor._spec = other._local_tensor, other._spec
