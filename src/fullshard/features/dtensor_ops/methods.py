"""`ShardedTensor` methods that DTensor also has or that torch.distributed.checkpoint calls.

Operations that would expose one rank's elements as if they were the complete tensor (pickle, safetensors, a raw
address) raise an error that suggests an alternative.
"""

import functools
import weakref
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Placement

from fullshard.comm import torch_private
from fullshard.comm.torch_dist import all_reduce
from fullshard.core.errors import LifecycleError
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.shard_spec import CodedShard, ShardSpec
from fullshard.engine.sharded_tensor import RowTensor, ShardedTensor, dtensor_of
from fullshard.wrap.partition import other_gradient_dtype

WAY_OUT = (
    "call, on every rank, fullshard.checkpoint.save_checkpoint or torch.distributed.checkpoint.save; whole tensors are "
    "fullshard.checkpoint.full_state_dict(model) or Accelerator.get_state_dict(model), which PEFT's "
    "get_peft_model_state_dict takes as state_dict, export_hf, or .full_tensor() of each"
)


class _Methods(ShardedTensor):
    """A container for methods that `add_methods` copies to `ShardedTensor`. It is never instantiated."""

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's interval with shape (n,), or with the global shape if this rank holds all elements.

        The result is differentiable. Its gradient is averaged over the ranks that hold the same elements, unless
        `grad_placements` is given.
        """
        is_own = grad_placements is None and _wants_gradient(self)
        take: Any = _ToLocal.apply if is_own else functools.partial(DTensor.to_local, grad_placements=grad_placements)
        local: torch.Tensor = self.local.decoded() if isinstance(self.local, CodedShard) else take(self)
        is_whole = self.spec.mesh.shard_size == 1 and not self.spec.is_by_rows
        return local.view(self.spec.sharded_shape) if is_whole else local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the unsharded tensor as a new tensor on this rank's device.

        This is a collective, so all ranks must call it in the same order. The result is differentiable. Its gradients
        are reduced over all ranks in the same way as those of the parameter (by default to the mean), unless
        `grad_placements` is given. Backward is therefore a collective, too.
        """
        whole: torch.Tensor = _replicate(self, grad_placements is None).to_local(grad_placements=grad_placements)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Change the placements or the mesh, as DTensor's `redistribute` does. This is a collective.

        The result can be replicated, sharded along a dim, or placed on another mesh.
        """
        own = self.placements
        mesh = device_mesh or self.device_mesh
        if mesh == self.device_mesh and placements is not None and tuple(placements) == own:
            return self.view(self.shape)  # type: ignore[return-value]
        redistributed: DTensor = _replicate(self).redistribute(device_mesh, placements, **options)
        return redistributed

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.name}, shape={tuple(self.shape)}, "
            f"interval=[{self.interval.start}, {self.interval.stop}), dtype={self.dtype}, local={self.local})"
        )

    def __copy__(self) -> ShardedTensor:
        """Return a shallow copy for `copy.copy`, which shares memory until either tensor is given other memory."""
        return _like(self, self.local.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        memo[id(self)] = copied = _like(self, self.local.detach().clone())
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LifecycleError(
            f"cannot pickle {self.name}, because this rank holds only elements {self.interval.start} to "
            f"{self.interval.stop} of {self.spec.numel}",
            hint=WAY_OUT,
        )

    def data_ptr(self) -> int:
        """Return 0, as torch's DTensor does, because the unsharded tensor has no address."""
        return 0

    def untyped_storage(self) -> NoReturn:
        """Raise an error: callers would take the storage of this rank's interval for the complete tensor."""
        raise LifecycleError(
            f"{self.name} has no storage, because this rank holds only elements {self.interval.start} to "
            f"{self.interval.stop} of {self.spec.numel}",
            hint=f"use .to_local() for this rank's elements; {WAY_OUT}",
        )

    def __dlpack__(self, *_args: object, **_options: object) -> NoReturn:
        """Raise the same error as `untyped_storage`, because torch's own implementation would crash the process."""
        self.untyped_storage()

    def tolist(self) -> Any:
        """Return all elements of the unsharded tensor as nested lists. This is a collective."""
        return self.full_tensor().tolist()

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # only when a checkpoint is saved

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if self.spec.is_by_rows:
            return self.local  # its only box
        for box in self.boxes():
            if torch.Size(box.offsets) == index.offset:
                start = int(self.local.storage_offset()) + box.start
                return self.local.as_strided(box.sizes, box.strides, start)
        raise LifecycleError(
            f"{self.name}: this rank has no block of elements that starts at {tuple(index.offset)}; its part is {self}",
            hint="use an offset from its boxes()",
        )


class _ParameterMethods(ShardedParameter):
    """A container for methods that `add_methods` copies to `ShardedParameter`. It is never instantiated."""

    @property
    def grad_dtype(self) -> torch.dtype:
        """Return the parameter's dtype. It can only be set to this dtype or to None, which allows any dtype."""
        return self.dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        if value not in (None, self.dtype):
            raise other_gradient_dtype(self.name, self.dtype, value)

    @property
    def data(self) -> torch.Tensor:
        """Return a view that autograd does not track. A tensor assigned to `data` is copied into the parameter."""
        taken = vars(self).get("_data")
        if taken is None:
            taken = vars(self)["_data"] = self.wrap(self.local)
        return taken

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to(), half() and friends come through here; `local` must stay a view of the bucket.
        is_like = value.dtype == self.dtype and value.device == self.device and value.shape == self.shape
        if not is_like or not isinstance(value, DTensor):
            raise LifecycleError(
                f"cannot assign data to sharded parameter {self.name} ({self.dtype} on {self.device} -> {value.dtype} "
                f"on {value.device}, {type(value).__name__}), because it is a view of its bucket",
                hint="move or cast the model before sharding it; change values in place",
            )
        local = self.interval_of(value, "data")
        if local is not self.local and local.data_ptr() != self.local.data_ptr():
            # A `.data` or state dict taken earlier keeps its values, as with any parameter.
            before = self.local.detach().clone()
            earlier: list[Any] = [self.data, *_detached_of(self).values()]
            for taken in earlier:
                torch_private.put_local(taken, before)
            self.local.copy_(local)
            vars(self)["_data"] = None
            _detached_of(self).clear()

    def detach(self) -> ShardedTensor:
        """Return a tensor that shares the parameter's memory but is not tracked by autograd."""
        detached: Any = torch.Tensor.detach(self)
        _detached_of(self)[id(detached)] = detached
        return detached  # type: ignore[no-any-return]

    def register_hook(self, hook: object) -> NoReturn:
        """Raise an error, because the hook would never run: autograd uses the unsharded parameter."""
        raise LifecycleError(
            f"register_hook on sharded parameter {self.name} would never run, because autograd uses the unsharded "
            "parameter",
            hint="use register_post_accumulate_grad_hook, or register the hook before fully_shard",
        )

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view with the shape of `other`, which must not be the parameter itself.

        Libraries do that to find the gradient accumulation node, which a sharded parameter does not have.
        """
        _check_is_other(self, other)
        return torch.Tensor.view_as(self, other)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view expanded to the shape of `other`, with the same check as in `view_as`."""
        _check_is_other(self, other)
        return torch.Tensor.expand_as(self, other)


def add_methods() -> None:
    """Add the methods that this module defines to `ShardedTensor` and `ShardedParameter`."""
    for kind, holder in ((ShardedTensor, _Methods), (ShardedParameter, _ParameterMethods)):
        for name, member in vars(holder).items():
            if isinstance(member, FunctionType | property):
                setattr(kind, name, member)


def _detached_of(parameter: ShardedParameter) -> weakref.WeakValueDictionary[int, ShardedTensor]:
    """Return the live results of `detach`, which must keep the old values when a tensor is assigned to `data`."""
    held: weakref.WeakValueDictionary[int, ShardedTensor] = vars(parameter).setdefault(
        "_detached", weakref.WeakValueDictionary()
    )
    return held


def _like(tensor: ShardedTensor, local: torch.Tensor) -> ShardedTensor:
    like = ShardedTensor(local, tensor.spec, requires_grad=tensor.requires_grad)
    like._is_param = isinstance(tensor, torch.nn.Parameter)
    return like


def _check_is_other(parameter: ShardedParameter, other: torch.Tensor) -> None:
    if other is parameter and parameter.requires_grad and torch.is_grad_enabled():
        raise LifecycleError(
            f"rank {parameter.mesh.rank}: some code requested the autograd node that accumulates the gradient of "
            f"sharded parameter {parameter.name}, but forward uses the unsharded parameter, which has another node",
            hint=(
                "use a pipeline schedule that computes all gradients in one backward (Schedule1F1B, "
                "ScheduleInterleaved1F1B); instead of a hook use p.register_post_accumulate_grad_hook"
            ),
        )


def _wants_gradient(tensor: ShardedTensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _replicate(tensor: ShardedTensor, reduces: bool = True) -> DTensor:
    replicated: DTensor = _Replicate.apply(tensor, reduces) if _wants_gradient(tensor) else replicated_of(tensor)
    return replicated


class _Replicate(torch.autograd.Function):
    """Gathers the tensor as a replicated DTensor, and reduces its gradient, which may differ between the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, reduces: bool) -> DTensor:
        ctx.spec, ctx.reduces = tensor.spec, reduces
        return replicated_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[ShardedTensor, None]:
        whole = reduced(grad, ctx.spec) if ctx.reduces else grad.full_tensor()
        return ShardedTensor(ctx.spec.cut(whole).clone(), ctx.spec), None


class _ToLocal(torch.autograd.Function):
    """Implements `to_local`. Torch's own function would derive wrong strides from the strides of the interval."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.shape = tensor.spec, tensor.local.shape
        own = tensor.local.view(tensor.spec.row_shape) if isinstance(tensor, RowTensor) else tensor.local
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        own = grad.reshape(ctx.shape)
        shares = ctx.spec.mesh.replicate_size > 1
        return ShardedTensor(_reduce(own, ctx.spec, of_interval=True) if shares else own, ctx.spec)


def reduced(gradient: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Reduce the gradient of a replicated tensor. If it has partial placements, add them up. This is a collective."""
    if not isinstance(gradient, DTensor):
        return _reduce(gradient, spec)
    is_own = all(placement.is_replicate() for placement in gradient.placements)
    detached: Any = gradient.detach()
    whole: torch.Tensor = detached.full_tensor()
    return _reduce(whole, spec) if is_own else whole


def _reduce(gradient: torch.Tensor, spec: ShardSpec, *, of_interval: bool = False) -> torch.Tensor:
    """Average a gradient over the ranks (if `of_interval`, over the replicas), or divide the sum. A collective."""
    mesh, group = spec.mesh, spec.mesh.world_group
    divisor = float(mesh.world_size) if spec.reduction is None else spec.reduction.divisor
    if of_interval and mesh.shard_size > 1:
        group, divisor = mesh.replicate_group, float(mesh.replicate_size)
    total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
    if group is not None:
        all_reduce(total, f"the gradient of {spec.name}", [group])
    return total.div_(divisor).to(gradient.dtype)


def replicated_of(tensor: ShardedTensor) -> DTensor:
    """Return the unsharded tensor as a replicated DTensor that autograd does not track."""
    return dtensor_of(tensor.spec.gather(tensor.local), tensor.spec)
