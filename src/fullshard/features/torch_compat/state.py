"""The parts of torch's private `fully_shard` state that other code reads, provided for a unit.

Pipeline stages have gradients reduced through it; scripts read names and whether parameters are unsharded, or have a
module freed after forward. The members that public code uses are in the tables, and each reports or does for the unit
what it does with torch's engine. All others raise an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from fullshard.core.errors import LifecycleError
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import unit_of
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState


class _View:
    """A view of a unit; views of one unit are equal. Members that are in no table can be neither read nor set."""

    READ: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    SET: ClassVar[Mapping[str, Callable[[Unit, Any], None]]] = {}
    _of: tuple[Any, ...]

    def __init__(self, unit: Unit, *others: object) -> None:
        self.__dict__["_of"] = (unit, *others)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(map(operator.is_, self._of, other._of))

    def __hash__(self) -> int:
        return hash((type(self), id(self._of[0])))

    def __getattr__(self, what: str) -> Any:
        if what not in self.READ:
            raise self._missing(what)
        return self.READ[what](*self._of)

    def __setattr__(self, what: str, value: object) -> None:
        if what not in self.SET:
            raise self._missing(what)
        self.SET[what](self._of[0], value)

    def _missing(self, what: str) -> LifecycleError:
        return LifecycleError(
            f"{user_class(self._of[0].modules[0]).__name__} is sharded by fullshard: {what} of torch's own "
            "`fully_shard`, which something asks for, is not there",
            hint="import from fullshard what you import from torch.distributed.fsdp, share_comm_ctx included",
        )


class _Axis(_View):
    """The axis that parameters are sharded over."""

    READ: ClassVar = {
        "mesh": lambda unit: unit.mesh.device_mesh,  # with the replicate axis if there is one
        "shard_process_group": lambda unit: unit.mesh.device_mesh.get_group(unit.mesh.device_mesh.ndim - 1),
        "shard_mesh_size": lambda unit: unit.mesh.shard_size,
        "shard_mesh_rank": lambda unit: unit.mesh.shard_rank,
    }


class _Parameter(_View):
    """One parameter of a unit."""

    READ: ClassVar = {
        "sharded_param": lambda unit, parameter: parameter,
        "_param_fqn": lambda unit, parameter: parameter.names[0],
        # before sharding; tensor parallelism had cut it already
        "_orig_size": lambda unit, parameter: parameter.spec.sharded_shape,
    }


def _is_unsharded(unit: Unit) -> bool:
    """Return whether parameters are whole, even if modules hold sharded ones until they run again."""
    return unit.state in (UnitState.GATHERED, UnitState.UNSHARDED)


def _reduce_kept(unit: Unit) -> Callable[..., None]:
    """Return a function that reduces gradients that backwards have kept, those of the whole model.

    Units are reduced in one order on all ranks. Gradients that were reduced already, through another group or at the
    end of a backward, are not reduced again.
    """
    return lambda *_unused: unit.schedule.backward.reduce_if_kept()


class _ParameterGroup(_View):
    """The parameters of a unit, those of all its buckets."""

    READ: ClassVar = {
        "_module_fqn": lambda unit: unit.name,
        "modules": lambda unit: tuple(unit.modules),
        "fsdp_params": lambda unit: [_Parameter(unit, parameter) for _, parameter in unit.entries],
        "mesh_info": _Axis,
        # the ranks that share parameters until backward; None: every rank keeps them whole
        "post_forward_mesh_info": lambda unit: _Axis(unit) if unit.frees_after_forward else None,
        "is_sharded": lambda unit: not _is_unsharded(unit),
        "is_unsharded": _is_unsharded,
        "unshard": lambda unit: unit.modules[0].unshard,
        "wait_for_unshard": lambda unit: lambda: None if unit.state is UnitState.SHARDED else unit.unshard(),
        "reshard": lambda unit: unit.reshard,
        "post_backward": _reduce_kept,
    }
    SET: ClassVar = {
        "post_forward_mesh_info": lambda unit, value: setattr(unit, "frees_after_forward", value is not None),
    }


def _set_auto_reshard(unit: Unit, value: bool) -> None:
    unit.asked_to_free = None if value else unit.frees_after_forward


class _Model(_View):
    """The state that all units of a model share."""

    READ: ClassVar = {"all_states": lambda unit: [TorchState(each) for each in reversed(unit.schedule.units)]}


class TorchState(_View):
    """The state of a unit: `fully_shard.state(module)`.

    `torch.distributed.fsdp.register_fsdp_forward_method` wraps a method with `_pre_forward` and `_post_forward`, as
    Transformers does with `generate`; here methods of units unshard their parameters themselves.
    """

    READ: ClassVar = {
        "_state_ctx": _Model,
        "_is_root": lambda unit: unit.schedule.units[-1] is unit,
        "_fsdp_param_group": lambda unit: _ParameterGroup(unit) if unit.slots else None,
        "_fsdp_param_groups": lambda unit: [_ParameterGroup(unit)] if unit.slots else [],
        "_mp_policy": lambda unit: unit.policy,
        "_auto_reshard_after_forward": lambda unit: unit.asked_to_free is None,
        "_lazy_init": lambda unit: lambda: None,  # a unit learns its model when that is made one
        "_root_post_backward_final_callback": _reduce_kept,
        "_pre_forward": lambda unit: lambda _module, args, kwargs: (args, kwargs),
        "_post_forward": lambda unit: lambda _module, _args, output: output,
    }
    SET: ClassVar = {"_auto_reshard_after_forward": _set_auto_reshard}


def state_of(module: nn.Module) -> TorchState | None:
    """Return the object for torch's `fully_shard.state(module)`; None if the module is no unit."""
    unit = unit_of(module)
    return None if unit is None else TorchState(unit)
