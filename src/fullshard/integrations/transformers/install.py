"""Gives scripts that import from `transformers` and `trl` the sharded classes, without a change to them.

Nothing is imported here: when a script imports one of the two modules below, by whatever way, its class is replaced by
a subclass as soon as the module is there. Everything that derives from it, TRL's trainers and the script's own
included, derives from the subclass.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from fullshard.core.errors import LifecycleError
from fullshard.core.imports import after_import

_CLASSES = {"transformers.trainer": "Trainer", "transformers.training_args": "TrainingArguments"}
_ADAPTER = "fullshard.integrations.transformers.classes"
_INSTALLED: set[str] = set()


def install() -> None:
    """Shard every `Trainer` of this process. Costs nothing until `transformers.trainer` is imported.

    Raises:
        LifecycleError: a script has imported it already, so that classes derived from it would be left out.
    """
    if _INSTALLED:
        return
    early = sorted(_CLASSES.keys() & sys.modules.keys())
    if early:
        raise LifecycleError(
            f"{early[0]} is imported already, and classes derived from its own would stay unsharded",
            hint="call install() first, or import Trainer from fullshard.integrations.transformers",
        )
    for name in _CLASSES:
        after_import(name, _replace_class)
        _INSTALLED.add(name)
    after_import("transformers.modeling_utils", _replace_from_pretrained)


def _replace_from_pretrained(module: ModuleType) -> None:
    importlib.import_module("fullshard.integrations.transformers.at_load").replace_from_pretrained(module)


def _replace_class(module: ModuleType) -> None:
    name = _CLASSES[module.__name__]
    adapter = importlib.import_module(_ADAPTER)
    setattr(module, name, adapter.sharded(getattr(module, name)))
