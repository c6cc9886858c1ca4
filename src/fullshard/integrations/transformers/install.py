"""Replaces the classes of `transformers` and `trl` by sharded ones, so that scripts need no changes.

This module does not import these libraries. When a script imports one of the two modules in `_CLASSES`, in any way, its
class is immediately replaced by a subclass. All classes that derive from it, including TRL's trainers and the script's
own classes, then derive from the subclass.
"""

import importlib
import sys
from types import ModuleType

from fullshard.core.errors import LifecycleError
from fullshard.core.imports import after_import

_CLASSES = {"transformers.trainer": "Trainer", "transformers.training_args": "TrainingArguments"}
_ADAPTER = "fullshard.integrations.transformers.classes"
_INSTALLED: set[str] = set()


def install() -> None:
    """Make every `Trainer` that this process imports from now on a sharded one.

    The call costs almost nothing until `transformers.trainer` is imported.

    Raises:
        LifecycleError: If `transformers.trainer` or the module of its arguments was imported before. Classes that were
            derived from the originals would not be sharded.
    """
    if _INSTALLED:
        return
    early = sorted(_CLASSES.keys() & sys.modules.keys())
    if early:
        raise LifecycleError(
            f"{early[0]} was imported before install(), so classes derived from it would stay unsharded",
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
