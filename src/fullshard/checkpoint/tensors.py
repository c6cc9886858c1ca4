"""Find the tensors of a model that a checkpoint stores, and this rank's parts of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import torch_private
from fullshard.checkpoint.elements import wraps_others
from fullshard.checkpoint.format import FormRecord
from fullshard.core.boxes import UNCUT, Chunking
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.engine.lookup import clean_name, units_of
from fullshard.engine.shard_spec import CodedShard, ShardSpec
from fullshard.features import ShardedParameter, ShardedTensor


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A rank's part of a parameter or buffer.

    The part consists of the elements in `interval` of the flattened full tensor, counted in the order of `chunking`.
    The names do not include the parts that wrappers add; a tied tensor has several names. `shape` is the global shape.
    If several ranks hold the same elements, exactly one of them is the writer.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    interval: Interval
    is_writer: bool
    chunking: Chunking = UNCUT

    @property
    def name(self) -> str:
        """Return the first name of the tensor, which identifies it."""
        return self.names[0]

    @property
    def is_sharded(self) -> bool:
        """Return whether the tensor is sharded, so that ranks hold different elements of it."""
        return isinstance(self.tensor, ShardedTensor)

    @property
    def form(self) -> FormRecord | None:
        """Return the form in which the tensor is stored as codes, or None if it is stored as ordinary values."""
        tensor = self.tensor
        if not isinstance(tensor, ShardedTensor) or not isinstance(tensor.local, CodedShard):
            return None
        return FormRecord(form=tensor.local.form.name, is_transposed=not tensor.spec.is_row_by_row)

    @property
    def held(self) -> torch.Tensor:
        """Return this rank's elements as a plain tensor, which has shape (n,) if the tensor is sharded."""
        return self.tensor.local if isinstance(self.tensor, ShardedTensor) else self.tensor.detach()


def stand_in(local: LocalTensor) -> torch.Tensor:
    """Return a tensor on the meta device with the shape and dtype of the full tensor."""
    return torch.empty(local.shape, dtype=local.tensor.dtype, device="meta")


def check_is_plain(parameters: Iterable[LocalTensor]) -> None:
    """Raise `CheckpointError` for a parameter that wraps several tensors, because a checkpoint cannot store it."""
    for local in parameters:
        if wraps_others(local.held) and local.form is None:
            raise CheckpointError(
                f"parameter {local.name!r} is a {type(local.held).__name__}, which wraps several tensors",
                hint="save model.state_dict() and optimizer.state_dict() with torch.distributed.checkpoint",
            )


def rest(model: nn.Module) -> None:
    """Reshard every unit of `model`, so that its parameters are the intervals that optimizers update."""
    for unit in units_of(model):
        if unit.is_pinned:
            what = f"{unit} is kept unsharded"
            raise CheckpointError(what, hint="exit the `with unsharded(model)` block first")
        unit.reshard()
    for schedule in dict.fromkeys(unit.schedule for unit in units_of(model)):
        schedule.settle()


def local_parameters(model: nn.Module, *, rank: int = 0, on_meta: bool = False) -> list[LocalTensor]:
    """Return all parameters of a model at rest in definition order. `rank` is only used to set `is_writer`."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(clean_name(path))
    result = []
    specs = [parameter.spec for parameter, _ in found.values() if isinstance(parameter, ShardedParameter)]
    beneath = next((spec.outer_group for spec in specs if spec.outer_group is not None), None)
    for parameter, names in found.values():
        if parameter.is_meta and not on_meta:
            raise CheckpointError(f"parameter {names[0]!r} is on the meta device", hint="initialize it first")
        interval, is_writer, chunking = Interval(0, parameter.numel()), rank == 0, UNCUT
        if isinstance(parameter, ShardedParameter):
            spec = parameter.spec
            interval, chunking = spec.interval.shift(spec.start), spec.chunking
            is_writer = parameter.mesh.replicate_rank == 0 and _is_first_of_copies(spec, beneath)
        unique, shape = tuple(dict.fromkeys(names)), tuple(parameter.shape)
        result.append(LocalTensor(unique, parameter, shape, interval, is_writer, chunking))
    return result


def _is_first_of_copies(spec: ShardSpec, beneath: dist.ProcessGroup | None) -> bool:
    """Return whether this rank is the first of those ranks outside its mesh that hold the same tensor."""
    # A parameter sharded over a part of all ranks is replicated along `beneath`, the outer group of other parameters.
    if spec.is_chunked:
        return True
    group = spec.outer_group
    if group is None and beneath is not None and spec.mesh.world_size < dist.get_world_size():
        group = beneath
    return group is None or group.rank() == 0


def local_buffers(model: nn.Module, *, rank: int = 0) -> list[LocalTensor]:
    """Return all persistent buffers of a model, each once. Every rank has all of them, and rank 0 saves them."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in torch_private.non_persistent_buffers(module):
                name = clean_name(f"{path}.{attribute}" if path else attribute)
                found.setdefault(id(buffer), (buffer, []))[1].append(name)
    return [
        LocalTensor(tuple(dict.fromkeys(names)), buffer, tuple(buffer.shape), Interval(0, buffer.numel()), rank == 0)
        for buffer, names in found.values()
    ]


def local_tensors(model: nn.Module, *, on_meta: bool = False) -> list[LocalTensor]:
    """Return all parameters and persistent buffers of a model; see `local_parameters`."""
    return [*local_parameters(model, on_meta=on_meta), *local_buffers(model)]


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that define `get_extra_state`, keyed by path."""
    return {
        clean_name(path): module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which the model computes."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.mesh.device if isinstance(parameter, ShardedParameter) else parameter.device
