"""Access to unsharded parameters for code outside of forward and backward."""

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.lookup import units_of
from fullshard.engine.parameter import sharded_parameter_of
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState


@contextlib.contextmanager
def unsharded(model: nn.Module, *, writeback: bool | None = None, recurse: bool = True) -> Iterator[None]:
    """Keep all parameters of `model` unsharded inside the block, for example for `generate()`.

    They also stay unsharded during and after forwards in the block. Entering the block is a collective. Inside it,
    ranks may run different numbers of forwards. Every rank needs memory for the complete unsharded model.

    Args:
        model: a sharded model or a part of one.
        writeback: keep in-place changes of the parameters, which must be the same on every rank. Otherwise, changes are
            discarded, with a warning if `writeback` is not given. Changes through `.data` are not noticed.
        recurse: if False, unshard only the units that hold the module's own parameters, for example if the code needs
            only the weight of a head. All other units are gathered as they are used.

    Raises:
        LifecycleError: Called inside a forward or backward. Also raised if parameters were changed without `writeback`
            where a rank owns them completely (one rank, or NO_SHARD), so that the change cannot be discarded.
    """
    units = units_of(model) if recurse else _owners(model)
    if torch_private.backward_under_way() != -1 or any(unit.schedule.forward.is_under_way for unit in units):
        raise LifecycleError("unsharded() was called inside a forward or backward", hint="call it between steps")
    for schedule in dict.fromkeys(unit.schedule for unit in units):
        schedule.reset_if_failed()
        schedule.begin_use()
    for unit in units:
        if any(bucket.gather_packing is not None for bucket in unit.buckets):
            unit.reshard()  # cached values are not exact
    before = {unit: (unit.is_pinned, unit.state) for unit in units}
    for unit in units:
        unit.unshard(exactly=True)
        unit.is_pinned = True
    buckets = [bucket for unit in units for bucket in unit.buckets]
    versions = [bucket.originals.versions() for bucket in buckets]
    try:
        yield
        for bucket, version in zip(buckets, versions, strict=True):
            if writeback:
                bucket.write_back()
            elif bucket.originals.versions() == version:
                continue
            elif not bucket.shares_main and writeback is None:
                text = f"{bucket.owner}: changes of parameters under unsharded() are discarded"
                warnings.warn(f"{text}; use unsharded(model, writeback=True) to keep them", stacklevel=3)
            elif bucket.shares_main:
                raise LifecycleError(
                    f"{bucket.owner}: parameters were changed under unsharded() without writeback on a "
                    "rank that owns them completely, so the change has taken effect",
                    hint="use unsharded(model, writeback=True)",
                )
    finally:
        for bucket in buckets:
            bucket.originals.take_changes()
        for unit, (was_pinned, state) in before.items():
            unit.take_requires_grad()
            unit.is_pinned = was_pinned
            if state is UnitState.GATHERED:
                unit.rest()
            elif state is not UnitState.UNSHARDED:
                unit.reshard()
        for schedule in dict.fromkeys(unit.schedule for unit in units):
            schedule.settle()


def _owners(module: nn.Module) -> list[Unit]:
    """Return the units to which the module's own parameters belong, without its children's parameters."""
    held = (sharded_parameter_of(parameter) for parameter in module.parameters(recurse=False))
    return list(dict.fromkeys(sharded.bucket.owner for sharded in held if sharded is not None))
