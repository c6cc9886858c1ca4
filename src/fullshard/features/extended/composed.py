"""Composed parameters (`features.extended.protocol`) wrap several tensors, such as int8 weights and scales.

    rows              this rank's part, an instance of the parameter's class; optimizers update it with the operations
                      of the class, as under torch's `fully_shard`
    main              empty: each tensor that `rows` wraps has its own memory, allocated by the class
    sharded parameter a DTensor around `rows`; gradients and optimizer state have the shape of rows, too

An unsharded parameter is assembled from its inner tensors, each gathered in its own dtype and shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fullshard.core.errors import LifecycleError, WrapError
from fullshard.engine.kinds import inner_tensors
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.shard_spec import Name, RaggedShard, ShardSpec
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features.extended.bucket import ExtendedBucket, new_rows
from fullshard.features.extended.protocol import Composition
from fullshard.wrap.partition import Slot, Values


class ComposedSpec(ShardSpec):
    """The spec of a composed parameter sharded by rows; `composition` assembles the unsharded parameter."""

    def __init__(self, *args: Any, composition: Composition, **options: Any) -> None:
        super().__init__(*args, **options)
        self._composition = composition

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the unsharded parameter, or a tensor of its class computed from one. This is a collective."""
        if not isinstance(local, self._composition.kind):
            return super().gather(local)
        wholes = {
            name: inner if spec is None else spec.gather(inner.reshape(-1))
            for name, (inner, spec) in self.inner_specs(local).items()
        }
        return self._composition.make(wholes, self.shape)

    def inner_specs(self, local: torch.Tensor) -> dict[str, tuple[torch.Tensor, ShardSpec | None]]:
        """Return the inner tensors of this rank's rows by name, each with its spec, or None if replicated."""
        return {
            name: (inner, self._inner_spec(f"{self.name}.{name}", inner, self._composition.shapes[name]))
            for name, inner in inner_tensors(local).items()
        }

    def _inner_spec(self, name: str, inner: torch.Tensor, shape: torch.Size) -> ShardSpec | None:
        rows, numel = self.shape[0], math.prod(shape)
        count = self.placement.shard_numel // self.placement.row_numel
        if rows and (numel * count) % rows == 0:
            spec = ShardSpec(self.mesh, shape, RaggedShard(numel * count // rows, 0), Name())
            if spec.interval.numel == inner.numel():
                spec.name.names = (name,)
                return spec
        if inner.shape == shape:
            return None
        raise LifecycleError(
            f"{name} has the shape {tuple(inner.shape)} on rank {self.mesh.rank} and {tuple(shape)} unsharded: it is "
            f"neither sharded like the {rows} rows of its parameter nor equal on every rank",
            hint="quantise in blocks that do not cross the rows of different ranks",
        )


class ComposedParameter(ShardedParameter):
    """A sharded parameter with rows on each rank, as an instance of the user's class. Its gradient is plain."""

    def wrap(self, local: torch.Tensor) -> ShardedTensor:
        """Return a tensor with the parameter's layout around this rank's rows, which may be flat."""
        return ShardedTensor(local.view(self.spec.local_shape) if local.dim() == 1 else local, self.spec)

    def publish(self, local_grad: torch.Tensor | None) -> None:
        """Publish a gradient in flat form, as the engine keeps it."""
        super().publish(None if local_grad is None else local_grad.reshape(-1))


class ComposedBucket(ExtendedBucket):
    """The bucket of one composed parameter. It takes the same arguments as `Bucket`, with one slot."""

    parameter_type = ComposedParameter
    _spec: ShardSpec
    _own: torch.Tensor

    def shard_spec(self, index: int) -> ShardSpec:
        """Return the spec that was computed from the unsharded parameter before it was released."""
        return self._spec

    def weights(self, index: int) -> torch.Tensor:
        """Return this rank's rows, without padding."""
        return self._own

    @property
    def main_version(self) -> int:
        """Return the total number of in-place changes of the inner tensors."""
        return sum(inner._version for inner in inner_tensors(self._own).values())

    @property
    def stored(self) -> list[torch.Tensor]:
        """Return the tensors that the rows wrap, including padding."""
        return list(inner_tensors(self.buffer.rows).values())

    def _make_rows(self, slot: Slot, weights: Values | None) -> torch.Tensor:
        extended = slot.parameter
        spec = self._spec = super().shard_spec(0)
        count, (own, *_) = self.layout.shard_numel // spec.placement.row_numel, spec.local_shape
        rows = new_rows(extended, (count, *extended.shape[1:]), self.mesh.device)
        on_meta = [name for name, inner in inner_tensors(rows).items() if inner.is_meta]
        if on_meta:
            raise WrapError(
                f"a parameter of type {type(rows).__name__} is on the meta device, and its `{on_meta[0]}` cannot be "
                "made real",
                hint="make the model real before fully_shard",
            )
        self.main = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        self._own = rows if own == count else rows.narrow(0, 0, own)
        if extended.is_meta and weights is not None:
            values = torch.empty(spec.interval.numel, dtype=self.dtype, device=self.mesh.device)
            weights.read(slot, spec.interval, values)
            self._own.copy_(values.view(spec.local_shape))
        elif own:
            self._own.copy_(spec.cut(extended.detach()))
        return rows
