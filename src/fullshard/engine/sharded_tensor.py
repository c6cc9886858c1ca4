"""The DTensors that leave the engine: whole tensors to other code, of which each rank has an interval.

p, p.grad, optimizer state, state dicts     `ShardedTensor`s, of global shape; `to_local()` is this rank's interval
results computed from them                  those of the whole tensor, as in one process (`features.dtensor_ops`)
pickle, safetensors, a raw address          an error that names the way out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.tensor import DTensor, Placement

from fullshard.comm import torch_private
from fullshard.core.boxes import IntervalBox
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.shard_spec import RowSpec, ShardSpec

WAY_OUT = (
    "call, on every rank, fullshard.checkpoint.save_checkpoint or torch.distributed.checkpoint.save; whole tensors are "
    "fullshard.checkpoint.full_state_dict(model) or Accelerator.get_state_dict(model), which PEFT's "
    "get_peft_model_state_dict takes as state_dict, export_hf, or .full_tensor() of each"
)


class SpreadTensor(DTensor):
    """A DTensor over a spec's ranks, each of which has a part of it or all.

    Attributes:
        spec: the spec of the parameter that it is, or was computed from.
    """

    spec: ShardSpec

    def __init__(self, *_args: object, **_options: object) -> None:
        """Do nothing: torch's own takes as long as making the tensor."""

    @property
    def name(self) -> str:
        """Return the name of the parameter these values belong to or come from; all names if it is tied."""
        return str(self.spec.name)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # With it, moving a module would swap its parameters for others, and a compiler would build torch's own class
        # from the parts.
        raise AttributeError("a compiler cannot take it apart")


class ShardedTensor(SpreadTensor):
    """A tensor of which each rank has an interval, shape (n,), of the flattened elements.

    Args:
        local: this rank's interval.
        spec: the place of that interval.
        requires_grad: whether autograd makes a gradient of it.

    Attributes:
        local: the same, without autograd.
    """

    _compute: ClassVar[Callable[[torch_private.Kernel, Sequence[Any], dict[str, Any]], Any]]
    """Runs a kernel on sharded tensors; set by `features.dtensor_ops`."""
    __hash__ = object.__hash__  # by identity like a tensor's, but in C: every look-up of optimizer state calls it

    def __new__(cls, local: torch.Tensor, spec: ShardSpec, *, requires_grad: bool = False) -> ShardedTensor:
        """Wrap `local`."""
        cls = RowTensor if cls is ShardedTensor and isinstance(spec, RowSpec) else cls
        self: ShardedTensor = torch_private.wrap(cls, local, spec.layout(local.dtype), requires_grad=requires_grad)
        self.spec = spec
        return self

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's interval, shape (n,); no part of autograd's graph."""
        return torch_private.local_of(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameter, those of a tied one separately."""
        return self.spec.name.names

    @property
    def interval(self) -> Interval:
        """Return the elements of the flattened whole, or of `ShardSpec.sharded_shape`, that this rank has."""
        return self.spec.interval

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's interval, shape (n,), or the whole's shape if it has everything. Differentiable.

        A gradient that comes back is averaged over the ranks that have the same elements, unless `grad_placements` says
        otherwise.
        """
        is_own = grad_placements is None and self._wants_gradient
        local: torch.Tensor = _ToLocal.apply(self) if is_own else super().to_local(grad_placements=grad_placements)
        is_whole = self.spec.mesh.shard_size == 1 and not self.spec.is_by_rows
        return local.view(self.spec.sharded_shape) if is_whole else local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole as a new tensor on this rank's device. A collective, in the same order on every rank.

        Differentiable: gradients that come back are reduced over all ranks as those of the parameter are, by their
        mean, unless `grad_placements` says otherwise. So backward is a collective, too.
        """
        whole: torch.Tensor = self._replicate(grad_placements is None).to_local(grad_placements=grad_placements)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Redistribute as torch does: to replicated, to shards along a dim, to another mesh. A collective."""
        own = self.placements
        mesh = device_mesh or self.device_mesh
        if mesh == self.device_mesh and placements is not None and tuple(placements) == own:
            return self.view(self.shape)  # type: ignore[return-value]
        redistributed: DTensor = self._replicate().redistribute(device_mesh, placements, **options)
        return redistributed

    @property
    def _wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.requires_grad

    def _replicate(self, reduces: bool = True) -> DTensor:
        if self._wants_gradient:
            replicated: DTensor = _Replicate.apply(self, reduces)
            return replicated
        return replicated_of(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.name}, shape={tuple(self.shape)}, "
            f"interval=[{self.interval.start}, {self.interval.stop}), dtype={self.dtype}, local={self.local})"
        )

    def __copy__(self) -> ShardedTensor:
        """Return the same memory in a tensor of its own that may be given other memory."""
        return self._like(self.local.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        memo[id(self)] = copied = self._like(self.local.detach().clone())
        return copied

    def _like(self, local: torch.Tensor) -> ShardedTensor:
        like = ShardedTensor(local, self.spec, requires_grad=self.requires_grad)
        like._is_param = isinstance(self, torch.nn.Parameter)
        return like

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LifecycleError(
            f"cannot pickle {self.name}: this rank has elements {self.interval.start} to {self.interval.stop} of "
            f"{self.spec.numel}",
            hint=WAY_OUT,
        )

    def data_ptr(self) -> int:
        """Return 0, as torch's DTensor does: there is no address of the whole."""
        return 0

    def untyped_storage(self) -> NoReturn:
        """Refuse: the tensor has no memory as a whole, and callers do not ask for this rank's interval."""
        raise LifecycleError(
            f"{self.name} has no memory of its own: this rank has elements {self.interval.start} to "
            f"{self.interval.stop} of {self.spec.numel}",
            hint=f"take .to_local() for this rank's elements; {WAY_OUT}",
        )

    def __dlpack__(self, *_args: object, **_options: object) -> NoReturn:
        """Refuse for the same reason; torch's own would end the process."""
        self.untyped_storage()

    def tolist(self) -> Any:
        """Return the elements of the whole. A collective."""
        return self.full_tensor().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a kernel of torch that is given a sharded tensor; every such kernel comes through here."""
        return cls._compute(func, args, kwargs or {})

    # -- what torch.distributed.checkpoint asks of a tensor ---------------------------------------------------------

    def boxes(self) -> list[IntervalBox]:
        """Return this rank's interval as boxes of the whole."""
        return list(self.spec.boxes())

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
            return self.local  # its one box
        for box in self.boxes():
            if torch.Size(box.offsets) == index.offset:
                start = int(self.local.storage_offset()) + box.start
                return self.local.as_strided(box.sizes, box.strides, start)
        raise LifecycleError(
            f"{self.name}: this rank has no elements from {tuple(index.offset)} on, but {self}", hint="see its boxes()"
        )


class RowTensor(ShardedTensor):
    """A tensor of which this rank has whole rows (`RowSpec`): torch sees their shape, and `Shard(0)`."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.local.view(self.spec.row_shape)

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        torch_private.put_local(self, value if value.dim() == 1 else value.view(-1))


def part_of(tensor: DTensor, spec: ShardSpec) -> torch.Tensor | None:
    """Return this rank's part, shape (n,), of any DTensor that is laid out as `spec`; None if it is not."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local if spec.is_like(tensor.spec) else None
    layout, expected = torch_private.layout_from(tensor), spec.layout(tensor.dtype)
    is_alike = (layout.mesh, layout.placements, layout.shape) == (expected.mesh, expected.placements, expected.shape)
    local = torch_private.local_of(tensor)
    return local.view(-1) if isinstance(spec, RowSpec) and is_alike and local.is_contiguous() else None


class _Replicate(torch.autograd.Function):
    """Make a tensor that every rank has whole; its gradient comes back as this rank's interval.

    Each rank may compute with it as it likes, but torch takes all gradients to be the same. So this class reduces them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, reduces: bool) -> DTensor:
        ctx.spec, ctx.reduces = tensor.spec, reduces
        return replicated_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[ShardedTensor, None]:
        whole = reduced(grad, ctx.spec) if ctx.reduces else grad.full_tensor()
        return ShardedTensor(ctx.spec.cut(whole).clone(), ctx.spec), None


class _ToLocal(torch.autograd.Function):
    """Take this rank's interval. Torch's own would compute the whole's strides from it; replicas have one gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.shape = tensor.spec, tensor.local.shape
        own = tensor.local.view(tensor.spec.row_shape) if isinstance(tensor, RowTensor) else tensor.local
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        own = grad.reshape(ctx.shape)
        shares = ctx.spec.mesh.replicate_size > 1
        return ShardedTensor(ctx.spec.reduce(own, of_interval=True) if shares else own, ctx.spec)


def reduced(gradient: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the gradient of a tensor that every rank has whole; each rank gives its own gradient. A collective.

    A partial gradient says that each rank has a part of the sum, so that sum is the result.
    """
    if not isinstance(gradient, DTensor):
        return spec.reduce(gradient)
    is_own = all(placement.is_replicate() for placement in gradient.placements)
    detached: Any = gradient.detach()
    whole: torch.Tensor = detached.full_tensor()
    return spec.reduce(whole) if is_own else whole


def replicated_of(tensor: ShardedTensor) -> DTensor:
    """Return the whole as a DTensor that every rank has; no part of autograd's graph."""
    return dtensor_of(tensor.spec.gather(tensor.local), tensor.spec)


def dtensor_of(local: torch.Tensor, spec: ShardSpec, placement: Placement | None = None) -> DTensor:
    """Return torch's own DTensor over a spec's ranks.

    It is replicated along all axes, or along those that it is not cut along.
    """
    placements = spec.placements(
        placement if spec.mesh.shard_size > 1 else None, placement if spec.is_chunked else None
    )
    layout = torch_private.layout_of(spec.device_mesh, placements, local.shape, local.dtype)
    dtensor: DTensor = torch_private.wrap(DTensor, local, layout)
    return dtensor
