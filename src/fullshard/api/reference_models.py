"""Functions of other libraries that shard a model for an Accelerator: reference models, teachers, reward models.

They would use torch's engine, on a model whose policy is sharded by this one. Both functions are given the Accelerator,
so they are replaced once there is one of fullshard's: where they are defined, now or as soon as that is imported, and
in every module that holds one already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from fullshard.core.imports import after_import

_FUNCTIONS = {"accelerate.utils.fsdp_utils": "fsdp2_prepare_model", "trl.models.utils": "prepare_fsdp"}
_FOR_INFERENCE = ("prepare_fsdp",)
"""The functions that put the model into evaluation mode."""
_awaited: set[str] = set()


def shard_reference_models(ours: type) -> None:
    """Make these functions shard with the Accelerator that they are given, if it is of the class `ours`."""
    for home in _FUNCTIONS.keys() - _awaited:
        _awaited.add(home)
        after_import(home, functools.partial(_replace, ours=ours))


def _replace(module: ModuleType, ours: type) -> None:
    theirs = getattr(module, _FUNCTIONS[module.__name__], None)
    if theirs is None:  # another version, whose function is elsewhere
        return
    function = _preparing(theirs, ours)
    for holder in list(sys.modules.values()):
        names = [name for name, value in list(getattr(holder, "__dict__", {}).items()) if value is theirs]
        for name in names:
            setattr(holder, name, function)


def _preparing(theirs: Callable[..., Any], ours: type) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        accelerator = next((value for value in given if isinstance(value, ours)), None)
        if accelerator is None:
            return theirs(*args, **kwargs)
        model = next(value for value in given if isinstance(value, nn.Module))
        prepared = accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[attr-defined]
        return prepared.eval() if theirs.__name__ in _FOR_INFERENCE else prepared

    return prepare
