"""The parts of torch's private `fully_shard` state that other code reads, provided for a unit.

Pipeline stages have gradients reduced through it; scripts read names and whether parameters are unsharded, or have a
module freed after forward. The members that public code uses are here, and each reports or does for the unit what it
does with torch's engine. All others raise an error.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.errors import LifecycleError
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import unit_of
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState


class _OfUnit:
    """A view of a unit; views of one unit are equal. Members that it does not have can be neither read nor set."""

    _unit: Unit

    def __init__(self, unit: Unit) -> None:
        self.__dict__["_unit"] = unit

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(map(operator.is_, vars(self).values(), vars(other).values()))

    def __hash__(self) -> int:
        return hash((type(self), id(self._unit)))

    def __getattr__(self, what: str) -> NoReturn:
        raise LifecycleError(
            f"{user_class(self._unit.modules[0]).__name__} is sharded by fullshard: {what} of torch's own "
            "`fully_shard`, which something asks for, is not there",
            hint="import from fullshard what you import from torch.distributed.fsdp, share_comm_ctx included",
        )

    def __setattr__(self, what: str, value: object) -> None:
        if getattr(getattr(type(self), what, None), "fset", None) is None:
            self.__getattr__(what)
        super().__setattr__(what, value)


class TorchState(_OfUnit):
    """The state of a unit: `fully_shard.state(module)`."""

    @property
    def _state_ctx(self) -> _OfModel:
        return _OfModel(self._unit)

    @property
    def _is_root(self) -> bool:
        return self._unit.schedule.units[-1] is self._unit

    @property
    def _fsdp_param_group(self) -> TorchParameterGroup | None:
        """Return the parameter group; None for a unit without parameters."""
        return TorchParameterGroup(self._unit) if self._unit.slots else None

    @property
    def _fsdp_param_groups(self) -> list[TorchParameterGroup]:
        group = self._fsdp_param_group
        return [] if group is None else [group]

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

    @property
    def _auto_reshard_after_forward(self) -> bool:
        """Return whether resharding follows from being outermost or not. It may be set."""
        return self._unit.asked_to_free is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self._unit.asked_to_free = None if value else self._unit.frees_after_forward

    def _lazy_init(self) -> None:
        """Do nothing: a unit learns its model when that is made one."""

    def _root_post_backward_final_callback(self) -> None:
        self._unit.schedule.reduce_if_kept()

    # `torch.distributed.fsdp.register_fsdp_forward_method` wraps a method with these, as Transformers does with
    # `generate`; here methods of units unshard their parameters themselves.

    def _pre_forward(self, _module: object, args: object, kwargs: object) -> tuple[object, object]:
        return args, kwargs

    def _post_forward(self, _module: object, _args: object, output: object) -> object:
        return output


class _OfModel(_OfUnit):
    """The state that all units of a model share."""

    @property
    def all_states(self) -> list[TorchState]:
        """Return the states of all units, the outermost first, as they come in the model."""
        return [TorchState(unit) for unit in reversed(self._unit.schedule.units)]


class TorchParameterGroup(_OfUnit):
    """The parameters of a unit, those of all its buckets."""

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that are unsharded together."""
        return tuple(self._unit.modules)

    @property
    def fsdp_params(self) -> list[TorchParameter]:
        """Return one entry for each parameter, tied ones once."""
        return [TorchParameter(self._unit, parameter) for _, parameter in self._unit.entries]

    @property
    def mesh_info(self) -> _Axis:
        """Return the axis that the parameters are sharded over."""
        return _Axis(self._unit)

    @property
    def post_forward_mesh_info(self) -> _Axis | None:
        """Return the ranks that share parameters until backward; None: every rank keeps them whole.

        It may be set.
        """
        return self.mesh_info if self._unit.frees_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: object) -> None:
        self._unit.frees_after_forward = value is not None

    @property
    def is_sharded(self) -> bool:
        """Return whether the parameters are not whole, or not yet."""
        return not self.is_unsharded

    @property
    def is_unsharded(self) -> bool:
        """Return whether parameters are whole, even if modules hold sharded ones until they run again."""
        return self._unit.state in (UnitState.GATHERED, UnitState.UNSHARDED)

    def unshard(self, async_op: bool = False) -> None:
        """Unshard as the module's method does; `wait_for_unshard` waits."""
        self.modules[0].unshard(async_op)  # type: ignore[operator]

    def wait_for_unshard(self) -> None:
        """Return when the parameters are whole."""
        if not self._unit.is_sharded:
            self._unit.unshard()

    def reshard(self) -> None:
        """Reshard as the module's method does."""
        self._unit.reshard()

    def post_backward(self, *_unused: Any) -> None:
        """Reduce gradients that backwards have kept, those of the whole model.

        Units are reduced in one order on all ranks. Gradients that were reduced already, through another group or at
        the end of a backward, are not reduced again.
        """
        self._unit.schedule.reduce_if_kept()


class TorchParameter(_OfUnit):
    """One parameter of a unit."""

    _parameter: ShardedTensor

    def __init__(self, unit: Unit, parameter: ShardedTensor) -> None:
        super().__init__(unit)
        self.__dict__["_parameter"] = parameter

    @property
    def sharded_param(self) -> ShardedTensor:
        """Return the tensor that the module holds at rest."""
        return self._parameter

    @property
    def _param_fqn(self) -> str:
        return self.sharded_param.names[0]

    @property
    def _orig_size(self) -> torch.Size:
        """Return the shape of what this rank's shard group shares."""
        return self.sharded_param.spec.sharded_shape


class _Axis(_OfUnit):
    """The shard axis."""

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh, with the replicate axis if there is one."""
        return self._unit.mesh.device_mesh

    @property
    def shard_process_group(self) -> Any:
        """Return the ranks of the axis as a group of torch's."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_mesh_size(self) -> int:
        """Return the number of ranks along the axis."""
        return self._unit.mesh.shard_size

    @property
    def shard_mesh_rank(self) -> int:
        """Return this rank's place along the axis."""
        return self._unit.mesh.shard_rank


def state_of(module: nn.Module) -> TorchState | None:
    """Return the object for torch's `fully_shard.state(module)`; None if the module is no unit."""
    unit = unit_of(module)
    return None if unit is None else TorchState(unit)
