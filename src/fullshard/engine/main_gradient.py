"""The main gradient of a bucket: this rank's interval of the sum over micro-batches, published as `.grad`.

The `.grad` of each sharded parameter is a view of the main gradient, so one addition adds a micro-batch to all of them.
As with any parameter, a script may clear, scale or replace a `.grad`. The next micro-batch is added to the result.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch

from fullshard.core.errors import LifecycleError
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.parameter import ShardedParameter, are_same, local_gradients
from fullshard.engine.precision import torch_dtype
from fullshard.engine.unsharded_gradient import Split


def _are_there(grads: Iterable[torch.Tensor | None]) -> Iterator[bool]:
    """Yield True for each gradient that is not None, otherwise False, without running bytecode for each one."""
    return map(operator.is_not, grads, itertools.repeat(None))


def _versions(grads: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the version counter of each gradient, or 0 where there is no gradient."""
    return [0 if grad is None else grad._version for grad in grads]


class MainGradient:
    """The main gradient of one bucket.

    Attributes:
        tensor: shape (S,), in the wider of the sum's dtype and the stored dtype; None if there is no gradient.
        is_ahead: whether the tensor includes gradients of a backward that has not ended yet.
    """

    def __init__(self, spec: BucketSpec, parameters: Sequence[ShardedParameter]) -> None:
        self._spec, self._parameters = spec, parameters
        self._publish_each = [parameter.publish for parameter in parameters]
        self._dtype = torch_dtype(spec.plan.main_gradient_dtype)
        self.tensor: torch.Tensor | None = None
        self.is_ahead = False
        self._rounded: torch.Tensor | None = None
        self._torn: list[int] = []
        self._found = len(parameters) - 1  # the parameter that had a gradient at the last check
        self._published: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._split = Split(spec.layout, own=spec.layout.rank_interval(spec.mesh.shard_rank))

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes, or 0 if there is none."""
        return 0 if self.tensor is None else self.tensor.nbytes

    @property
    def is_untouched(self) -> bool:
        """Return whether the script has left every `.grad` as it was published."""
        return self._are_untouched(local_gradients(self._parameters))

    def add_early(self, shard: torch.Tensor) -> None:
        """Add a sum of gradients before backward has ended. `publish_early` must be called at the end of backward."""
        assert self.tensor is not None  # noqa: S101 -- it is untouched
        self.tensor.add_(shard)
        self.is_ahead = True

    def publish_early(self, used: bytearray) -> None:
        """Publish the result of `add_early` at the end of backward. Raise an error if the script changed a `.grad`."""
        self.is_ahead = False
        grads = local_gradients(self._parameters)
        if not self._are_untouched(grads):
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[0].name}: the script changed a `.grad` of "
                "its unit during backward, after this micro-batch's gradients had been added to it",
                hint="change gradients between backward and optimizer.step()",
            )
        self._publish(grads, used)

    def add(self, shard: torch.Tensor, used: bytearray) -> None:
        """Add `shard` to the main gradient and publish the result.

        If the script has changed or replaced a `.grad`, start a new main gradient from the current values. `shard`,
        shape (S,), may become the main gradient itself. `used` has a flag for each parameter, set if it got a gradient
        on any rank. The `.grad` of other parameters does not change.
        """
        shard = shard.to(self._dtype)
        grads = local_gradients(self._parameters)
        if self.tensor is not None and self._are_untouched(grads):
            self.tensor.add_(shard)
        else:
            if any(_are_there(grads)):  # the script has replaced or changed them: add its values
                for part, grad in zip(self._spec.slices, grads, strict=True):
                    if grad is not None:
                        shard[part].add_(grad)
            self.tensor = shard
            self._published = [None] * len(grads)
        self._publish(grads, used)

    def _publish(self, grads: list[torch.Tensor | None], used: bytearray) -> None:
        """Publish the main gradient as the `.grad` of each sharded parameter. `grads` are the `.grad`s until now."""
        assert self.tensor is not None  # noqa: S101 -- something was added to it, or became it
        self._rounded = self.tensor.to(self._spec.dtype)  # itself, unless the dtypes differ
        inspector = self._spec.reduction.inspector
        if inspector is not None and self._rounded.dtype is torch.float16 and self._rounded is not self.tensor:
            inspector(self._rounded, {})  # the narrower dtype may overflow where float32 does not
        pieces, _ = self._split.apply(self._rounded)
        is_copy, published = self._rounded is not self.tensor, self._published
        if all(used) and not any(_are_there(grads)):
            published[:] = pieces
            list(map(operator.call, self._publish_each, pieces))  # without a loop
        else:
            for index, (parameter, grad, piece) in enumerate(zip(self._parameters, grads, pieces, strict=True)):
                is_new = used[index] if grad is None else is_copy or published[index] is None
                if is_new:
                    published[index] = piece
                    parameter.publish(piece)
        if is_copy:
            self._versions = _versions(published)

    def published(self, first: int, last: int) -> torch.Tensor | None:
        """Return the tensor, shape (S,), of which `.grad`s `first` to `last` are all views, or None if they are not."""
        published = self._published[first : last + 1]
        grads = local_gradients(self._parameters[first : last + 1])
        return self._rounded if all(_are_there(published)) and are_same(grads, published) else None

    def _are_untouched(self, grads: list[torch.Tensor | None]) -> bool:
        """Return whether the `.grad` tensors are those published last and, if they are rounded copies, unchanged."""
        if not are_same(grads, self._published) or not any(_are_there(grads)):
            return False
        return self._dtype == self._spec.dtype or _versions(grads) == self._versions

    def free_if_cleared(self) -> None:
        """Free the memory once the script has set every `.grad` to None and no backward adds to it."""
        if self.tensor is not None and not self.is_ahead and not self._has_any():
            self.tensor = self._rounded = None
            self._published, self._versions = [], []

    def _has_any(self) -> bool:
        """Return whether any parameter has a gradient. Check first the parameter that had one last time."""
        number = len(self._parameters)
        for index in range(self._found, self._found - number, -1):  # once around
            if self._parameters[index].local_grad is not None:
                self._found = index % number
                return True
        return False

    def mark_torn(self) -> None:
        """Record that a backward failed. If part of its gradients was added, `check_not_torn` will raise an error."""
        if self.is_ahead:
            self._torn, self.is_ahead = _versions(self._published), False

    def check_not_torn(self) -> None:
        """Raise an error if a published gradient still contains part of a failed backward."""
        if not self._torn:
            return
        versions, self._torn = self._torn, []
        grads = local_gradients(self._parameters)
        if are_same(grads, self._published) and versions == _versions(grads):
            self._torn = versions
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[0].name}: its `.grad` contains part of a "
                "failed backward in addition to earlier micro-batches",
                hint="call optimizer.zero_grad() and start the step again",
            )
