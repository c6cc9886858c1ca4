"""PEFT's adapters out of a sharded model: as plain tensors, where one process has all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fullshard.core.imports import Replaced, replace
from fullshard.engine.sharded_tensor import ShardedTensor

MODULE = "peft.utils.save_and_load"


def give_wholes(module: ModuleType) -> None:
    """Put ours around `get_peft_model_state_dict`, wherever a module has imported it by name."""
    place = Replaced.of(module, "get_peft_model_state_dict")
    replace({place: _with_wholes(place.torchs)})


def _with_wholes(get: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(get)
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: _plain(value) for name, value in get(*args, **kwargs).items()}

    return get_peft_model_state_dict


def _plain(value: Any) -> Any:
    """Return a whole tensor if this rank has every element, so that nothing is gathered; else the value as it is."""
    is_whole = isinstance(value, ShardedTensor) and value.spec.is_whole
    return value.detach().full_tensor() if is_whole else value
