"""The bucket of a composed parameter (`wrap.extended`): one that wraps several tensors, int8 weights and scales, say.

    rows              this rank's part, an instance of the parameter's class; optimizers update it by the class's own
                      operations, as under torch's `fully_shard`
    main              empty: each tensor that `rows` wraps has its own memory, as the class has made it
    sharded parameter a DTensor around `rows`; a gradient and optimizer state have the shape of rows, too

A whole parameter is put together from its tensors, each gathered in its own dtype and shape.
"""

from __future__ import annotations

import torch

from fullshard.core.errors import WrapError
from fullshard.engine.extended import ExtendedBucket, new_rows
from fullshard.engine.materialize import Values
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.span import Span
from fullshard.wrap.extended import inner_tensors
from fullshard.wrap.partition import Slot


class ComposedParameter(ShardedParameter):
    """A sharded parameter of which this rank has rows, an instance of the user's class. Its gradient is plain."""

    def wrap(self, local: torch.Tensor) -> ShardedTensor:
        """Return a tensor laid out as the parameter, around this rank's rows, which may be flat."""
        return ShardedTensor(local.view(self.span.local_shape) if local.dim() == 1 else local, self.span)

    def publish(self, local_grad: torch.Tensor | None) -> None:
        """Publish a gradient, which is flat within the engine."""
        super().publish(None if local_grad is None else local_grad.reshape(-1))


class ComposedBucket(ExtendedBucket):
    """See the module; arguments are those of `Bucket`, with one slot."""

    parameter_type = ComposedParameter
    _span: Span
    _own: torch.Tensor

    def span(self, index: int) -> Span:
        """Return the span that the whole parameter gave before it was let go."""
        return self._span

    def weights(self, index: int) -> torch.Tensor:
        """Return this rank's rows, without padding."""
        return self._own

    @property
    def main_version(self) -> int:
        """Return how often any of the tensors has been changed in place."""
        return sum(inner._version for inner in inner_tensors(self._own).values())

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors that the rows wrap, padding included."""
        return list(inner_tensors(self.buffer.rows).values())

    def _make_rows(self, slot: Slot, weights: Values | None) -> torch.Tensor:
        extended = slot.parameter
        self._span = span = super().span(0)
        count, (own, *_) = self.layout.shard_numel // span.placement.row_numel, span.local_shape
        rows = new_rows(extended, (count, *extended.shape[1:]), self.mesh.device)
        on_meta = [name for name, inner in inner_tensors(rows).items() if inner.is_meta]
        if on_meta:
            raise WrapError(
                f"a parameter of type {type(rows).__name__} on the meta device: its `{on_meta[0]}` cannot be made real",
                hint="make the model real before fully_shard",
            )
        self.main = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        self._own = rows if own == count else rows.narrow(0, 0, own)
        if extended.is_meta and weights is not None:
            values = torch.empty(span.interval.numel, dtype=self.dtype, device=self.mesh.device)
            weights.read(slot, span.interval, values)
            self._own.copy_(values.view(span.local_shape))
        elif own:
            self._own.copy_(span.cut(extended.detach()))
        return rows
