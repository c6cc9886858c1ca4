"""Layouts that define which elements of a tensor each rank owns. Both torch and the engine use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard.comm import torch_private
from fullshard.comm.base import Inspector
from fullshard.comm.mesh import Mesh
from fullshard.comm.torch_dist import as_sent
from fullshard.comm.waiting import PROGRESS, Waiting
from fullshard.core.boxes import UNCUT, Chunking, IntervalBox, boxes
from fullshard.core.errors import LifecycleError
from fullshard.core.forms import StoredForm
from fullshard.core.layout import Interval


@dataclass(frozen=True)
class RaggedShard(Placement):
    """A placement along the shard axis: the flattened elements are part of a bucket that is cut into equal shares.

    Rank r owns the elements of the tensor in [r * shard_numel - offset, (r + 1) * shard_numel - offset).

    `is_shard()` returns False, as for torch's own `_StridedShard`. Callers that get True (torch's redistribution and
    `parallel.fsdp`, and Transformers when it reads files) cut a tensor along `.dim`, but an interval has no such dim.
    DCP, clipping, optimizers, PEFT and Accelerate do not call it.
    """

    shard_numel: int  # number of elements of the bucket that each rank owns
    offset: int  # start of the tensor in the bucket
    row_numel: int = field(default=0, repr=False)  # elements in a row; 0 if the local part is flat

    def __post_init__(self) -> None:
        """Create the C++ half of the placement. Without it, methods such as `is_shard()` would crash the process."""
        super().__init__()

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[int, int, int]]:
        return RaggedShard, (self.shard_numel, self.offset, self.row_numel)

    def interval(self, rank: int, numel: int) -> Interval:
        """Return the elements that `rank` owns of a flattened tensor of `numel` elements. The interval may be empty."""
        own = Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel).shift(-self.offset)
        return Interval(0, numel).intersect(own)


@dataclass(slots=True)
class ReductionSettings:
    """The settings for reducing the gradients of one unit."""

    divisor: float  # the number by which the sum of gradients over all ranks is divided
    requires_all_reduce: bool = True  # whether to reduce along the replicate axis; if not, results are accumulated
    # Called with this rank's interval of each reduced gradient before it is published.
    hook: Callable[[torch.Tensor], object] | None = None
    inspector: Inspector | None = None  # inspects parts of reduced gradients; see `comm.base.Reduction`

    @classmethod
    def of(cls, mesh: Mesh) -> ReductionSettings:
        """Return settings that average gradients over all ranks of the mesh."""
        return cls(float(mesh.world_size))

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Call the hook, if there is one, with a reduced gradient."""
        if self.hook is not None:
            self.hook(reduced)
            if self.inspector is not None:
                self.inspector(reduced, {})  # the hook may have changed it


class CodedShard(torch.Tensor):
    """A rank's shard of a tensor in a stored form. `parts` has the 1-D tensors by their names in the form."""

    form: StoredForm
    parts: Mapping[str, torch.Tensor]

    def decoded(self) -> torch.Tensor:
        """Decode the values and return them as a new plain tensor."""
        raise NotImplementedError


class Name:
    """Holds the qualified names of a parameter, for messages. All tensors with the parameter's layout share it."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "=".join(self.names) or "a tensor"


class ShardSpec:
    """The place of a tensor in a bucket, which determines the elements that each rank owns.

    A parameter, its gradient and its optimizer state share one spec. `narrow` returns a spec for some of the rows. This
    class describes tensors that are sharded flat and as one piece. `engine.kinds` documents the other kinds.

    Attributes:
        reduction: settings for reducing the gradients of the parameter; None means to average them.
        device_mesh: the torch mesh of the ranks that share the tensor.
        numel: number of elements in `sharded_shape`.
        interval: the elements that this rank owns of the flattened tensor of `sharded_shape`.
        along_shard: the placement that torch is given for the shard axis, if it differs from `placement`.
        beside: the placement along an axis of `device_mesh` that `mesh` does not have, if there is one.
        outer_group: the ranks along that axis.
        chunking: how the tensor is cut along that axis.
        is_row_by_row: whether elements are counted row by row in `sharded_shape`, if that is the full shape.
        start: where this rank's chunk begins in the full tensor, flattened as `chunking` defines.
        note: a description of the chunking, for the start-up message.
    """

    along_shard: Placement | None = None
    beside: Placement | None = None
    outer_group: dist.ProcessGroup | None = None
    chunking: Chunking = UNCUT
    is_row_by_row = True
    start = 0
    note = ""

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        placement: RaggedShard,
        name: Name,
        *,
        reduction: ReductionSettings | None = None,
    ) -> None:
        self.mesh, self.shape, self.placement, self.name = mesh, torch.Size(shape), placement, name
        self.reduction, self.device_mesh = reduction, mesh.device_mesh
        self.numel = math.prod(self.sharded_shape)
        self.interval = placement.interval(mesh.shard_rank, self.numel)
        self._layouts: dict[torch.dtype, torch_private.Layout] = {}

    def __deepcopy__(self, _memo: object) -> ShardSpec:
        return self  # it never changes, and a copy of a tensor has the same layout

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {tuple(self.shape)}, [{self.interval.start}, {self.interval.stop}))"

    def layout(self, dtype: torch.dtype) -> torch_private.Layout:
        """Return the layout that torch needs to create a DTensor of this dtype."""
        layout = self._layouts.get(dtype)
        if layout is None:
            placements = self.placements(self.along_shard or self.placement, self.beside)
            layout = self._layouts[dtype] = torch_private.layout_of(self.device_mesh, placements, self.shape, dtype)
        return layout

    def placements(self, along_shard: Placement | None, beside: Placement | None) -> list[Placement]:
        """Return placements for `device_mesh`: the two given ones on their axes, and `Replicate()` on all others."""
        ndim = self.mesh.device_mesh.ndim
        placements: list[Placement] = [Replicate()] * self.device_mesh.ndim
        if along_shard is not None and (ndim == 2 or self.mesh.replicate_size == 1):
            placements[ndim - 1] = along_shard
        if beside is not None:
            placements[ndim] = beside
        return placements

    @property
    def sharded_shape(self) -> torch.Size:
        """Return the shape of the tensor whose flattened elements are distributed over the ranks of the mesh."""
        return self.shape

    @property
    def is_by_rows(self) -> bool:
        """Return whether this rank's part is stored as a tensor of rows instead of a flat tensor."""
        return self.placement.row_numel > 0

    @property
    def local_shape(self) -> torch.Size:
        """Return the shape in which this rank stores its part."""
        return self.row_shape if self.is_by_rows else torch.Size((self.interval.numel,))

    @property
    def row_shape(self) -> torch.Size:
        """Return the shape of this rank's part as rows. This requires that the part consists of complete rows."""
        rows, *others = self.sharded_shape
        return torch.Size((self.interval.numel * rows // max(1, self.numel), *others))

    @property
    def is_chunked(self) -> bool:
        """Return whether the tensor is also cut along an axis outside the mesh."""
        return self.chunking is not UNCUT

    @property
    def owns_all(self) -> bool:
        """Return whether this rank owns every element of the tensor."""
        return self.mesh.shard_size == 1 and not self.is_chunked

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups of ranks that own different elements. A sum of all elements spans all groups."""
        found = (self.mesh.shard_group, self.outer_group if self.is_chunked else None)
        return tuple(group for group in found if group is not None)

    def is_like(self, other: ShardSpec) -> bool:
        """Return whether each rank owns the same elements in both specs."""
        return (
            self.placement == other.placement
            and self.shape == other.shape
            and self.mesh.shard_group is other.mesh.shard_group
            and self.mesh.shard_rank == other.mesh.shard_rank
            and (self.beside, self.outer_group) == (other.beside, other.outer_group)
        )

    def narrow(self, shape: Sequence[int], start: int) -> ShardSpec:
        """Return the spec of a tensor of `shape` that consists of this tensor's elements from index `start` on."""
        return self.moved(shape, RaggedShard(self.placement.shard_numel, self.placement.offset + start))

    def moved(self, shape: Sequence[int], placement: RaggedShard) -> ShardSpec:
        """Return the spec of a flat tensor of shape `shape` that is sharded over the same ranks."""
        return ShardSpec(self.mesh, shape, placement, self.name, reduction=self.reduction)

    def boxes(self) -> Iterator[IntervalBox]:
        """Yield this rank's elements as boxes in the full tensor."""
        return boxes(tuple(self.sharded_shape), self.interval)

    def to_sharded(self, full: torch.Tensor) -> torch.Tensor:
        """Convert a full tensor to one of shape `sharded_shape`, which is a view if possible."""
        return full

    def to_full(self, sharded: torch.Tensor) -> torch.Tensor:
        """Undo `to_sharded`. If the tensor is also cut outside the mesh, all ranks of that axis must call this."""
        return sharded

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, with shape `local_shape`, of a full tensor or of one that broadcasts to it."""
        spread = full if full.shape == self.shape else full.expand(self.shape)
        if self.is_by_rows:  # only with operations that torch's `fully_shard` requires of a wrapper class
            rows = spread.split(self.placement.shard_numel // self.placement.row_numel)
            return rows[self.mesh.shard_rank] if self.mesh.shard_rank < len(rows) else spread[:0]
        return self.to_sharded(spread).reshape(-1)[self.interval.start : self.interval.stop]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the elements of all ranks into a new tensor of shape `shape` on the device. All ranks must call this.

        Each owner broadcasts its interval, which other ranks receive in place. In large jobs, few ranks own elements.
        """
        if isinstance(local, CodedShard):
            local = local.decoded()
        if torch_private.has_own_dispatch(type(local)):
            raise LifecycleError(
                f"{self.name}: a {type(local).__name__} computed from it cannot be gathered, because it wraps tensors "
                "of an unknown layout",
                hint="compute in forward, or inside `with fullshard.unsharded(model)`",
            )
        PROGRESS.watcher.before_full_tensor(self.mesh.shard_group, self.mesh.device)
        with Waiting(f"gathering {self.name}", [self.mesh.control_group, self.mesh.shard_group]):
            full = torch.empty(self.numel, dtype=local.dtype, device=self.mesh.device)
            full[self.interval.start : self.interval.stop] = local.reshape(-1)
            for owner in range(self.mesh.shard_size if self.mesh.shard_group is not None else 0):
                interval = self.placement.interval(owner, self.numel)
                if interval.numel:
                    part = as_sent(full[interval.start : interval.stop])
                    dist.broadcast(part, group=self.mesh.shard_group, group_src=owner)
            return self.to_full(full.view(self.sharded_shape))


class RowSpec(ShardSpec):
    """The spec of a tensor of which each rank owns complete rows. The engine stores these rows as flat elements."""

    along_shard: Placement | None = Shard(0)

    def narrow(self, shape: Sequence[int], start: int) -> ShardSpec:
        """Return the spec of a tensor of `shape` that consists of this tensor's elements from index `start` on."""
        return self if self.shape == torch.Size(shape) else super().narrow(shape, start)
