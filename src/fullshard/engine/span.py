"""The distribution of a tensor's elements over ranks, as torch and the engine see it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import STALLS, all_reduce
from fullshard.comm.torch_dist import as_sent
from fullshard.core.boxes import IntervalBox, boxes
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.core.tiling import in_whole
from fullshard.engine.reduction_settings import ReductionSettings
from fullshard.engine.tile import Tile
from fullshard.wrap.extended import Composition, inner_tensors


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


class Name:
    """The name, in messages, of all tensors laid out as one parameter: its qualified names."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "=".join(self.names) or "a tensor"


class Span:
    """The part of a bucket that a tensor takes up, and so which of its elements each rank has.

    A parameter's gradient and optimizer state have the parameter's own span; rows of it have a part of that span.

    Args:
        mesh: the ranks.
        shape: shape of the whole tensor.
        placement: the bucket, and the tensor's place in it.
        name: the parameter's name.
        tile: the part that this rank has to shard, if tensor parallelism has split the tensor.
        composition: that of a composed parameter (`wrap.extended`), of which each rank has rows.
        as_rows: its intervals are whole rows, and torch sees them as such; within the engine they are flat.
        reduction: settings for reducing the parameter's gradients; None: take their mean.

    Attributes:
        device_mesh: the ranks that the tensor is spread over, under torch's name.
        numel: elements of the tile, or of the whole tensor if there is none.
        interval: elements of that, flattened, that this rank has.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        placement: RaggedShard,
        name: Name,
        tile: Tile | None = None,
        *,
        composition: Composition | None = None,
        as_rows: bool = False,
        reduction: ReductionSettings | None = None,
    ) -> None:
        self.composition, self.as_rows, self.reduction = composition, as_rows, reduction
        self.mesh, self.shape, self.placement, self.name, self.tile = mesh, torch.Size(shape), placement, name, tile
        self.device_mesh = mesh.device_mesh if tile is None else mesh.joined(tile.mesh)
        self.numel = math.prod(self.tile_shape)
        self.interval = placement.interval(mesh.shard_rank, self.numel)
        self._layouts: dict[torch.dtype, torch_private.Layout] = {}

    def __deepcopy__(self, _memo: object) -> Span:
        return self  # it never changes, and a copy of a tensor is laid out as the tensor

    def __repr__(self) -> str:
        return f"Span({self.name}, {tuple(self.shape)}, [{self.interval.start}, {self.interval.stop}))"

    def layout(self, dtype: torch.dtype) -> torch_private.Layout:
        """Return the layout with which torch makes a DTensor of this dtype."""
        layout = self._layouts.get(dtype)
        if layout is None:
            along_tile = None if self.tile is None else self.tile.placement
            placements = self.placements(self._along_shard, along_tile)
            layout = self._layouts[dtype] = torch_private.layout_of(self.device_mesh, placements, self.shape, dtype)
        return layout

    @property
    def _along_shard(self) -> Placement:
        """Return the placement that torch is told for the shard axis."""
        if not self.as_rows:
            return self.placement
        is_of_rows = self.tile is not None and self.tile.placement.is_shard(0)
        return torch_private.rows_of_tiles(self.tile.mesh.size()) if self.tile is not None and is_of_rows else Shard(0)

    def placements(self, along_shard: Placement | None, along_tile: Placement | None) -> list[Placement]:
        """Return placements for `device_mesh`: these along the axes of the cut, replicated along all others."""
        ndim = self.mesh.device_mesh.ndim
        placements: list[Placement] = [Replicate()] * self.device_mesh.ndim
        if along_shard is not None and (ndim == 2 or self.mesh.replicate_size == 1):
            placements[ndim - 1] = along_shard
        if along_tile is not None and self.tile is not None:
            placements[ndim] = along_tile
        return placements

    @property
    def tile_shape(self) -> torch.Size:
        """Return the shape of the tensor that the interval belongs to."""
        return self.shape if self.tile is None else self.tile.shape

    @property
    def is_by_rows(self) -> bool:
        """Return whether this rank's part is shaped as rows of the whole, and not flat."""
        return self.placement.row_numel > 0

    @property
    def local_shape(self) -> torch.Size:
        """Return the shape of this rank's part."""
        if not self.is_by_rows:
            return torch.Size((self.interval.numel,))
        return self.row_shape

    @property
    def row_shape(self) -> torch.Size:
        """Return the shape of this rank's part, if that is whole rows."""
        rows, *others = self.tile_shape
        return torch.Size((self.interval.numel * rows // max(1, self.numel), *others))

    @property
    def is_tiled(self) -> bool:
        """Return whether tensor parallelism, too, gives ranks other elements."""
        return self.tile is not None and self.tile.tiling is not None

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has every element: it is alone, or they are replicated."""
        return self.mesh.shard_size == 1 and not self.is_tiled

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups within which each rank has other elements; a sum over all elements is reduced over each."""
        groups = () if self.mesh.shard_group is None else (self.mesh.shard_group,)
        return (*groups, self.tile.mesh.get_group()) if self.tile is not None and self.is_tiled else groups

    def is_like(self, other: Span) -> bool:
        """Return whether each rank has the same elements of both."""
        return (
            self.placement == other.placement
            and self.shape == other.shape
            and self.tile == other.tile
            and self.mesh.shard_group is other.mesh.shard_group
            and self.mesh.shard_rank == other.mesh.shard_rank
        )

    def part(self, shape: Sequence[int], start: int) -> Span:
        """Return the span of a tensor of `shape` whose elements are this one's from `start` on."""
        if self.as_rows and self.shape == torch.Size(shape):
            return self
        placement = RaggedShard(self.placement.shard_numel, self.placement.offset + start)
        tile = None if self.tile is None else Tile(self.tile.mesh, self.tile.placement, shape)
        return Span(self.mesh, shape, placement, self.name, tile, reduction=self.reduction)

    def boxes(self) -> Iterator[IntervalBox]:
        """Yield this rank's elements as boxes of the whole."""
        tile = self.tile
        for box in boxes(tuple(self.tile_shape), self.interval):
            if tile is None or tile.tiling is None:
                yield box
                continue
            yield from in_whole(box, tile.tiling, tuple(self.shape), tile.rank)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, of `local_shape`, of a whole tensor or one that broadcasts to it."""
        spread = whole if whole.shape == self.shape else whole.expand(self.shape)
        if self.is_by_rows:  # by the operations that torch's `fully_shard` requires of a wrapper class
            rows = spread.split(self.placement.shard_numel // self.placement.row_numel)
            return rows[self.mesh.shard_rank] if self.mesh.shard_rank < len(rows) else spread[:0]
        flat = (spread if self.tile is None else self.tile.cut(spread)).reshape(-1)
        return flat[self.interval.start : self.interval.stop]

    def reduce(self, gradient: torch.Tensor, *, of_interval: bool = False) -> torch.Tensor:
        """Return the gradient over all ranks; each rank gives the gradient of its own loss. A collective.

        The result is that of the unit's reduction: the mean, unless the script has set another divisor.

        Args:
            gradient: the gradient of the whole.
            of_interval: whether it is of this rank's elements alone; then take the mean over the replicas.
        """
        mesh, group = self.mesh, self.mesh.world_group
        divisor = float(mesh.world_size) if self.reduction is None else self.reduction.divisor
        if of_interval and mesh.shard_size > 1:
            group, divisor = mesh.replicate_group, float(mesh.replicate_size)
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        if group is not None:
            all_reduce(total, f"the gradient of {self.name}", [group])
        return total.div_(divisor).to(gradient.dtype)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole, of shape `shape`, a new tensor on the device, from each rank's elements. A collective.

        Every owner broadcasts its interval straight into place. At large world sizes few ranks own any of it.

        Raises:
            CommunicationError: another rank has failed in it, or to shard the model, or has ended.
        """
        if torch_private.has_own_dispatch(type(local)):
            return self._compose(local)
        self.mesh.compare_shardings()
        with self.mesh.doing_alike(f"gathering {self.name}"):
            full = torch.empty(self.numel, dtype=local.dtype, device=self.mesh.device)
            full[self.interval.start : self.interval.stop] = local.reshape(-1)
            with STALLS.explaining(f"gathering {self.name}"):
                for owner in range(self.mesh.shard_size if self.mesh.shard_group is not None else 0):
                    interval = self.placement.interval(owner, self.numel)
                    if interval.numel:
                        part = as_sent(full[interval.start : interval.stop])
                        dist.broadcast(part, group=self.mesh.shard_group, group_src=owner)
            tile = full.view(self.tile_shape)
            return tile if self.tile is None else self.tile.gather(tile)

    def _compose(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole of a composed parameter, or of a tensor of its class computed from one."""
        wholes = {
            name: inner if span is None else span.gather(inner.reshape(-1))
            for name, (inner, span) in self.inner_spans(local).items()
        }
        assert self.composition is not None  # noqa: S101 -- `inner_spans` has seen to it
        return self.composition.make(wholes, self.shape)

    def inner_spans(self, local: torch.Tensor) -> dict[str, tuple[torch.Tensor, Span | None]]:
        """Return the tensors in this rank's rows of a composed parameter, by name, each with its span.

        The span is None for a tensor that every rank has whole.

        Raises:
            LifecycleError: a tensor is neither cut as rows are, nor whole; or `local` is of no composed parameter.
        """
        composition = self.composition
        if composition is None or not isinstance(local, composition.kind):
            raise LifecycleError(
                f"{self.name}: a {type(local).__name__} was computed of it, whose tensors nobody knows how to gather",
                hint="compute in forward, or inside `with fullshard.unsharded(model)`",
            )
        return {
            name: (inner, self._span_of_inner(f"{self.name}.{name}", inner, composition.shapes[name]))
            for name, inner in inner_tensors(local).items()
        }

    def _span_of_inner(self, name: str, inner: torch.Tensor, shape: torch.Size) -> Span | None:
        rows, numel = self.shape[0], math.prod(shape)
        count = self.placement.shard_numel // self.placement.row_numel
        if rows and (numel * count) % rows == 0:
            span = Span(self.mesh, shape, RaggedShard(numel * count // rows, 0), Name())
            if span.interval.numel == inner.numel():
                span.name.names = (name,)
                return span
        if inner.shape == shape:
            return None
        raise LifecycleError(
            f"{name} has the shape {tuple(inner.shape)} on rank {self.mesh.rank}, {tuple(shape)} in the whole: neither "
            f"cut as its parameter's {rows} rows are, nor the same on every rank",
            hint="quantise in blocks that do not go across rows of different ranks",
        )
