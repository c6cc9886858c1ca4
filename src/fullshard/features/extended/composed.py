"""Support for composed parameters (`features.extended.protocol`), which wrap several tensors, such as codes and scales.

    rows              this rank's part, an instance of the parameter's class; optimizers update it with the operations
                      that the class defines, as with torch's `fully_shard`
    main              empty: each tensor that `rows` wraps has its own memory, allocated by the class
    sharded parameter a DTensor around `rows`; gradients and optimizer state have the same shape as the rows

An unsharded parameter is assembled from its inner tensors. Each of them is gathered in its own dtype and shape.
"""

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
    """The spec of a composed parameter that is sharded by rows. `composition` describes how to unshard it."""

    def __init__(self, *args: Any, composition: Composition, **options: Any) -> None:
        super().__init__(*args, **options)
        self._composition = composition

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the parameter, or a tensor computed from it, from each rank's part. This is a collective."""
        if not isinstance(local, self._composition.kind):
            return super().gather(local)
        wholes = {
            name: inner if spec is None else spec.gather(inner.reshape(-1))
            for name, (inner, spec) in self.inner_specs(local).items()
        }
        return self._composition.make(wholes, self.shape)

    def inner_specs(self, local: torch.Tensor) -> dict[str, tuple[torch.Tensor, ShardSpec | None]]:
        """Return the inner tensors of this rank's rows by name, each with its spec, or None if it is replicated."""
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
            hint="quantize in blocks that do not cross the rows of different ranks",
        )


class ComposedParameter(ShardedParameter):
    """A sharded parameter whose rows are an instance of the user's class. Its gradient is a plain tensor."""

    def wrap(self, local: torch.Tensor) -> ShardedTensor:
        """Return a `ShardedTensor` with the parameter's layout around this rank's rows, which may be flattened."""
        return ShardedTensor(local.view(self.spec.local_shape) if local.dim() == 1 else local, self.spec)

    def publish(self, local_grad: torch.Tensor | None) -> None:
        """Set the parameter's gradient to `local_grad`, flattened as the engine expects."""
        super().publish(None if local_grad is None else local_grad.reshape(-1))


class ComposedBucket(ExtendedBucket):
    """The bucket of one composed parameter. It takes the same arguments as `Bucket`, but exactly one slot."""

    parameter_type = ComposedParameter
    _spec: ShardSpec
    _own: torch.Tensor

    def shard_spec(self, index: int) -> ShardSpec:
        """Return the spec, which was computed from the unsharded parameter before its memory was released."""
        return self._spec

    def weights(self, index: int) -> torch.Tensor:
        """Return this rank's rows without the padding."""
        return self._own

    @property
    def main_version(self) -> int:
        """Return how many times the inner tensors have been changed in place, in total."""
        return sum(inner._version for inner in inner_tensors(self._own).values())

    @property
    def stored(self) -> list[torch.Tensor]:
        """Return the inner tensors of this rank's rows, including the padding."""
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
                "materialized",
                hint="materialize the model before fully_shard",
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
