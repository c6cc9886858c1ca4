"""`FSDPModule`, whose methods the user's module gets when it becomes a unit."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from fullshard.comm import torch_private
from fullshard.core.errors import CopyError
from fullshard.core.user_class import USER_CLASS, user_class
from fullshard.engine.lookup import UNIT, clean_name, qualified, require_unit, unit_of, units_of
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState

_MADE_FROM = "_fullshard_forward"


class UnshardHandle(TorchUnshardHandle):
    """A handle that `unshard(async_op=True)` returns, with which to wait for the parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded. The forward of the unit waits automatically."""
        if self._unit.state is not UnitState.SHARDED:  # they were not freed in between
            self._unit.unshard()


class FSDPModule(TorchFSDPModule):
    """A mixin for modules that are units. It has the methods of torch's `FSDPModule`.

    Every instance is also an instance of torch's class, because scripts, trainers and pipeline schedules check for
    that. None of the code in torch's class runs: this class or a subclass defines each of its methods, and any method
    that a later version of torch adds raises an error.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a module of the user's class, because a slice of a sharded `nn.Sequential` is not a unit."""
        return getattr(cls, USER_CLASS)(*args, **kwargs)  # also for subclasses, which parametrizations create

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard the parameters of this unit until `reshard()` or until the unit has run. All ranks must call this.

        Args:
            async_op: return immediately, with a handle that waits for the parameters.
        """
        unit = require_unit(self)
        schedule = unit.schedule
        schedule.begin_use()
        if not async_op:
            unit.unshard()
            return None
        unit.issue_unshard()
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Free the unsharded parameters of this unit."""
        require_unit(self).reshard()

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters as any module does. They are always sharded, even after a failed backward."""
        require_unit(self).schedule.reset_if_failed()
        return super().named_parameters(*args, **options)  # type: ignore[misc, no-any-return]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If it does not, a later backward will reduce them."""
        for unit in self._units(recurse):
            unit.reduce_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces along the replicate axis. If it does not, a later backward will."""
        for unit in self._units(recurse):
            unit.reduction.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the unsharded parameters are freed between forward and backward."""
        for unit in self._units(recurse):
            unit.reshards_after_forward, unit.neighbors = reshard_after_forward, None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward. Keeping them saves gathers between micro-batches."""
        for unit in self._units(recurse):
            unit.reshards_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one of a gradient accumulation.

        This applies to the complete model. With SHARD_OPTIMIZER, some gradients are reduced only in the last backward.
        Optimizers that step in backward also do so only then. Otherwise, this has no effect.
        """
        require_unit(self).schedule.is_last_backward = is_last_backward

    def _units(self, recurse: bool) -> list[Unit]:
        return units_of(self) if recurse else [require_unit(self)]  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"FSDP does not support deepcopy, copy or pickling of {user_class(self).__name__}, which is sharded: its "
            "parameters are only this rank's intervals",
            hint=(
                "deepcopy before sharding; save with fullshard.checkpoint; or build a second model and load the "
                "state; use fullshard.EMA(model, decay=...) for an average of the weights (AveragedModel, ModelEma)"
            ),
        )


_module_class: list[type[TorchFSDPModule]] = [FSDPModule]


def use_module_class(kind: type[FSDPModule]) -> None:
    """Set the subclass of `FSDPModule` whose methods will be given to units created from now on."""
    _module_class[0] = kind


def make_fsdp_module(module: nn.Module, unit: Unit, *, prefix: str) -> None:
    """Attach the unit to its module, and change the module's class to one that has `FSDPModule`'s methods."""
    cls = type(module)
    module.__class__ = _unit_class(cls, prefix + cls.__name__)
    module.__dict__[UNIT] = unit
    module.register_load_state_dict_pre_hook(_tell_load)
    # Tell dynamo that parameters are swapped outside its control. torch's own FSDP sets the same flag.
    for inner in module.modules():
        inner.__dict__[torch_private.MANAGED] = True
        inner._fsdp_use_orig_params = True  # type: ignore[assignment]


def _tell_load(module: nn.Module, *_arguments: object) -> None:
    unit = require_unit(module)
    for tell in unit.schedule.extensions.loaded:
        tell(unit)


def _unit_class(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """Return the class of a unit: one per name and forward, because a compiler creates one graph per class."""
    for made in cls.__subclasses__():
        if made.__name__ == name and made.__dict__.get(_MADE_FROM) == cls.forward:
            return made
    members: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    members |= {USER_CLASS: cls, _MADE_FROM: cls.forward, "forward": _entered_directly(cls.forward)}
    return type(name, (_module_class[0], cls), members)


def _entered_directly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a user's class so that it unshards even if it is called without the module's hooks."""

    @functools.wraps(forward)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (unit := unit_of(self)) is None or not unit.is_at_rest:
            return forward(self, *args, **kwargs)
        return unit.run_method(self, functools.partial(forward, self), *args, **kwargs)

    return entered


def assemble(modules: list[nn.Module], schedule: Schedule) -> None:
    """Assign names and the schedule to all units in `modules`, which together form the outermost unit."""
    units = list(dict.fromkeys(unit for module in modules for unit in units_of(module)))
    schedule.assemble(units)
    paths: dict[int, list[str]] = {}
    for module in modules:
        for path, inner in module.named_modules(remove_duplicate=False):
            paths.setdefault(id(inner), []).append(clean_name(path))
    for unit in units:
        unit.name = ", ".join(paths[id(module)][0] for module in unit.modules)
        unit.reshards_after_forward = (
            unit.modules[0] is not modules[0] if unit.asked_to_reshard is None else unit.asked_to_reshard
        )
        for slot, parameter in unit.entries:
            names = [qualified(path, attribute) for m, attribute in slot.owners for path in paths[id(m)]]
            parameter.spec.name.names = tuple(dict.fromkeys(names))
