"""The members of torch's private `fully_shard` state that other code uses, implemented for a unit.

Pipeline stages use this state to reduce gradients. Scripts use it to read names, to check whether parameters are
unsharded, or to set whether a module is freed after forward. The tables in this module contain the members that public
code uses. Each of them has the same effect on the unit as with torch's engine. All other members raise an error.
"""

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
    """Base class of views of a unit. `READ` and `SET` contain the members that can be read and set."""

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
            f"{user_class(self._of[0].modules[0]).__name__} is sharded by fullshard, which does not have {what} of "
            "torch's own `fully_shard`",
            hint="import from fullshard what the script imports from torch.distributed.fsdp, including share_comm_ctx",
        )


class _Axis(_View):
    """A view of the mesh axis that a unit's parameters are sharded over."""

    READ: ClassVar = {
        "mesh": lambda unit: unit.mesh.device_mesh,  # with the replicate axis if there is one
        "shard_process_group": lambda unit: unit.mesh.device_mesh.get_group(unit.mesh.device_mesh.ndim - 1),
        "shard_mesh_size": lambda unit: unit.mesh.shard_size,
        "shard_mesh_rank": lambda unit: unit.mesh.shard_rank,
    }


class _Parameter(_View):
    """A view of one parameter of a unit."""

    READ: ClassVar = {
        "sharded_param": lambda unit, parameter: parameter,
        "_param_fqn": lambda unit, parameter: parameter.names[0],
        # before sharding, but after tensor parallelism
        "_orig_size": lambda unit, parameter: parameter.spec.sharded_shape,
    }


def _is_unsharded(unit: Unit) -> bool:
    """Return whether a unit is unsharded. Even then, its modules hold sharded parameters until they run."""
    return unit.state in (UnitState.GATHERED, UnitState.UNSHARDED)


def _reduce_kept(unit: Unit) -> Callable[..., None]:
    """Return a function that reduces all unreduced gradients of the model, in the same order on all ranks."""
    return lambda *_unused: unit.schedule.backward.reduce_if_kept()


class _ParameterGroup(_View):
    """A view of a unit's parameters, which are in all of its buckets."""

    READ: ClassVar = {
        "_module_fqn": lambda unit: unit.name,
        "modules": lambda unit: tuple(unit.modules),
        "fsdp_params": lambda unit: [_Parameter(unit, parameter) for _, parameter in unit.entries],
        "mesh_info": _Axis,
        # ranks that share parameters until backward; None if they stay unsharded
        "post_forward_mesh_info": lambda unit: _Axis(unit) if unit.reshards_after_forward else None,
        "is_sharded": lambda unit: not _is_unsharded(unit),
        "is_unsharded": _is_unsharded,
        "unshard": lambda unit: unit.modules[0].unshard,
        "wait_for_unshard": lambda unit: lambda: None if unit.state is UnitState.SHARDED else unit.unshard(),
        "reshard": lambda unit: unit.reshard,
        "post_backward": _reduce_kept,
    }
    SET: ClassVar = {
        "post_forward_mesh_info": lambda unit, value: setattr(unit, "reshards_after_forward", value is not None)
    }


class _Model(_View):
    """A view of the state that all units of a model share."""

    READ: ClassVar = {"all_states": lambda unit: [TorchState(each) for each in reversed(unit.schedule.units)]}


class TorchState(_View):
    """The state of a unit, which `fully_shard.state(module)` returns.

    `torch.distributed.fsdp.register_fsdp_forward_method` puts calls of `_pre_forward` and `_post_forward` around a
    method. Transformers does so for `generate`. Here these two do nothing, because the methods of a unit unshard its
    parameters themselves.
    """

    READ: ClassVar = {
        "_state_ctx": _Model,
        "_is_root": lambda unit: unit.schedule.units[-1] is unit,
        "_fsdp_param_group": lambda unit: _ParameterGroup(unit) if unit.slots else None,
        "_fsdp_param_groups": lambda unit: [_ParameterGroup(unit)] if unit.slots else [],
        "_mp_policy": lambda unit: unit.policy,
        "_auto_reshard_after_forward": lambda unit: unit.asked_to_reshard is None,
        "_lazy_init": lambda unit: lambda: None,  # a unit gets its schedule when the root is sharded
        "_root_post_backward_final_callback": _reduce_kept,
        "_pre_forward": lambda unit: lambda _module, args, kwargs: (args, kwargs),
        "_post_forward": lambda unit: lambda _module, _args, output: output,
    }
    SET: ClassVar = {
        "_auto_reshard_after_forward": lambda unit, value: setattr(
            unit, "asked_to_reshard", None if value else unit.reshards_after_forward
        )
    }


def state_of(module: nn.Module) -> TorchState | None:
    """Return the state object for torch's `fully_shard.state(module)`, or None if the module is not a unit."""
    unit = unit_of(module)
    return None if unit is None else TorchState(unit)
