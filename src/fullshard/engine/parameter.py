"""Sharded parameters, of which each rank owns an interval. `module.parameters()` yields them at rest."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.engine.shard_spec import RowSpec
from fullshard.engine.sharded_tensor import RowTensor, ShardedTensor, shard_of

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket

_grad_descriptor: Any = torch.Tensor.grad
_grad_of_autograd, _set_grad_of_autograd = _grad_descriptor.__get__, _grad_descriptor.__set__
_plain_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_REFERENCE = "_fullshard_sharded_parameter"


class ShardedParameter(ShardedTensor):
    """A parameter that stores only this rank's interval, as a view of the bucket's main buffer.

    An optimizer that updates `local` in place therefore updates the bucket. The gradient is stored as the plain tensor
    that the engine publishes. Reading `.grad` returns it wrapped in a `ShardedTensor`.

    Attributes:
        bucket: the bucket that contains the parameter.
        gradient_hooks: hooks passed to `register_post_accumulate_grad_hook`, by number.
        local_grad: this rank's interval of the gradient, shape (n,); None if there is none.
        used_up_by: the name of an option that has used up the gradient within backward, until the script reaches
            `optimizer.step()`; empty otherwise.
    """

    used_up_by = ""
    _is_param = True  # makes it an instance of nn.Parameter
    local_grad: torch.Tensor | None
    gradient_hooks: OrderedDict[int, Callable[[Any], object]]
    bucket: Bucket
    _index: int
    _known_grad: ShardedTensor | None

    def __new__(cls, bucket: Bucket, index: int, *, requires_grad: bool) -> ShardedParameter:
        """Create the sharded parameter for parameter `index` of `bucket`. Its local tensor is a view of `main`."""
        local, spec = bucket.weights(index).detach(), bucket.shard_spec(index)
        cls = RowParameter if isinstance(spec, RowSpec) else cls
        self = super().__new__(cls, local, spec, requires_grad=requires_grad)
        assert isinstance(self, ShardedParameter)  # noqa: S101 -- for the type checker
        self.bucket, self._index = bucket, index
        self.gradient_hooks = OrderedDict()
        self.publish(None)
        if requires_grad:
            self._watch()
        return self

    def _watch(self) -> None:
        """Register a hook for gradients that autograd accumulates into the sharded parameter itself."""
        if not torch_private.accumulated_hooks(self):
            torch.Tensor.register_post_accumulate_grad_hook(self, _take_grad)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh over which the parameter is sharded."""
        return self.spec.mesh

    @property
    def grad(self) -> ShardedTensor | None:
        """Return the gradient, averaged over all ranks, or None if there is none."""
        if self.used_up_by:  # report this to code that clips, unscales or logs gradients
            raise LifecycleError(
                f"sharded parameter {self.name}: the backward has already consumed its gradient",
                hint=f"to clip, unscale or read gradients, do not use {self.used_up_by}; call zero_grad() after step()",
            )
        if self._known_grad is None and self.local_grad is not None:
            self._known_grad = self.wrap(self.local_grad)
        return self._known_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.publish(None if value is None else self.interval_of(value, "gradient"))
        if value is None and self.bucket.has_gradient:
            self.bucket.gradient.main.free_if_cleared()

    def publish(self, local_grad: torch.Tensor | None) -> None:
        """Set the gradient of the parameter to this rank's interval `local_grad`."""
        self.local_grad, self._known_grad = local_grad, None

    def interval_of(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """Return this rank's interval, shape (n,), of a DTensor that has the parameter's shape.

        Raises:
            LifecycleError: `value` has another shape or is a plain tensor.
        """
        if value.shape != self.shape or not isinstance(value, DTensor):
            raise LifecycleError(
                f"{what} of {self.name}: expected a DTensor of shape {tuple(self.shape)}, got a "
                f"{type(value).__name__} of shape {tuple(value.shape)}",
                hint="create one with torch.zeros_like(p), or from this rank's interval with p.wrap(local)",
            )
        own = shard_of(value, self.spec)
        return self.spec.cut(value.full_tensor()).clone() if own is None else own

    def wrap(self, local: torch.Tensor) -> ShardedTensor:
        """Return a tensor with the parameter's layout from this rank's interval `local`, shape (n,)."""
        return ShardedTensor(local, self.spec)

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter requires a gradient. As for any parameter, this may change at any time."""
        return _plain_requires_grad(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set `requires_grad`, and return the parameter."""
        super().requires_grad_(requires_grad)
        if requires_grad:
            self._watch()
        self.bucket.set_requires_grad(self._index, requires_grad)
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], object]) -> RemovableHandle:
        """Register `hook(parameter)`, to be called after each backward in which any rank used the parameter.

        `.grad` is set, all gradients have been reduced and nothing is in progress, so the hook may step an optimizer.
        The hook is not called if the gradient was used up during backward.
        """
        handle = RemovableHandle(self.gradient_hooks)
        self.gradient_hooks[handle.id] = hook
        self.bucket.has_gradient_hooks = True
        return handle

    def take_hooks(self, replaced: torch.Tensor) -> None:
        """Take over the hooks of a parameter that this one replaces. Their handles can still remove them."""
        hooks: Any = torch_private.accumulated_hooks(replaced)
        if isinstance(replaced, ShardedParameter):
            hooks = replaced.gradient_hooks
        if hooks:
            hooks.update(self.gradient_hooks)
            self.gradient_hooks = hooks
            self.bucket.has_gradient_hooks = True


class RowParameter(ShardedParameter, RowTensor):
    """A sharded parameter cut by rows, as in torch's `fully_shard` if `shard_placement_fn` returns `Shard(0)`.

    Its bucket contains only this parameter and is cut into W intervals of ceil(n / W) rows each; the last ones may be
    shorter or empty. It is therefore gathered and reduced separately. Inside the engine, the rows of a rank are flat
    like any interval.
    """


def sharded_parameters(optimizer: torch.optim.Optimizer) -> list[ShardedParameter]:
    """Return the sharded parameters in the optimizer's parameter groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Return whether two lists contain the same objects. With `==`, tensors would be compared by element."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def local_gradients(parameters: Iterable[ShardedParameter]) -> list[torch.Tensor | None]:
    """Return this rank's gradient intervals. An entry is None if there is none or the optimizer has used it up."""
    return [parameter.local_grad for parameter in parameters]


def sharded_parameter_of(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the sharded parameter for an original, or None if no unit owns it or its unit is on the meta device."""
    found = stands_for(parameter)
    return found if isinstance(found, ShardedParameter) else None


def stands_for(parameter: torch.Tensor) -> ShardedTensor | None:
    """Return the sharded tensor that replaces `parameter`. Return `parameter` itself if it is one, or None."""
    reference = getattr(parameter, _REFERENCE, None)
    if reference is not None:
        return reference()  # type: ignore[no-any-return]
    return parameter if isinstance(parameter, ShardedTensor) else None


def mark_original(parameter: torch.Tensor, sharded: ShardedTensor) -> None:
    """Store a weak reference to the sharded parameter on the original parameter that it replaces."""
    setattr(parameter, _REFERENCE, weakref.ref(sharded))


def _take_grad(parameter: torch.Tensor) -> None:
    """Store the gradient that autograd computed for a sharded parameter used directly, as in a penalty term."""
    assert isinstance(parameter, ShardedParameter)  # noqa: S101 -- it is registered on these
    made: torch.Tensor = _grad_of_autograd(parameter)
    _set_grad_of_autograd(parameter, None)
    own = parameter.interval_of(made.detach(), "gradient")
    before = parameter.local_grad
    parameter.publish(own if before is None else before + own.reshape(before.shape))
