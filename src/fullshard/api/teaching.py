"""Replacements for functions of Accelerate and TRL that a script may call with sharded objects.

The original functions support only torch's FSDP: they would shard a reference model with it, or read a prepared
loader in the wrong order. After an Accelerator has been created, these functions call fullshard's versions for
fullshard's objects, in every module that has imported them. For other objects they work as before.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.api.data import ShardedDataLoader, skip_first_batches
from fullshard.api.processes import Processes


def _accelerators(given: list[Any]) -> list[Any]:
    return [value for value in given if isinstance(value, Processes) and hasattr(value, "prepare_model")]


def _prepare(*args: Any, **kwargs: Any) -> nn.Module:
    """Shard a model that is not trained, such as a reference, teacher or reward model."""
    given = [*args, *kwargs.values()]
    model = next(value for value in given if isinstance(value, nn.Module))
    prepared: nn.Module = _accelerators(given)[0].prepare_model(model, evaluation_mode=True)
    return prepared


_FUNCTIONS: tuple[tuple[str, str, Callable[[list[Any]], object], Callable[..., Any]], ...] = (
    ("accelerate.utils.fsdp_utils", "fsdp2_prepare_model", _accelerators, _prepare),
    (
        "accelerate.data_loader", "skip_first_batches",
        lambda given: any(isinstance(value, ShardedDataLoader) for value in given), skip_first_batches,
    ),
    ("trl.models.utils", "prepare_fsdp", _accelerators, lambda *args, **kwargs: _prepare(*args, **kwargs).eval()),
)  # fmt: skip
"""Functions of other libraries to replace: (module, name, test whether arguments are fullshard's, replacement)."""


def teach_libraries() -> None:
    """Replace the functions in `_FUNCTIONS` in every module that has imported them. This does not import TRL."""
    for home, name, is_ours, ours in _FUNCTIONS:
        theirs = getattr(sys.modules.get(home), name, None)  # None: not imported, or another version's is elsewhere
        if theirs is not None and not hasattr(theirs, "knows_fullshard"):
            chosen = _or_theirs(is_ours, ours, theirs)
            for holder in list(sys.modules.values()):
                for key in [key for key, value in list(getattr(holder, "__dict__", {}).items()) if value is theirs]:
                    setattr(holder, key, chosen)


def _or_theirs(
    is_ours: Callable[[list[Any]], object], ours: Callable[..., Any], theirs: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_ours([*args, *kwargs.values()]) else theirs)(*args, **kwargs)

    chosen.knows_fullshard = True  # type: ignore[attr-defined]
    return chosen
