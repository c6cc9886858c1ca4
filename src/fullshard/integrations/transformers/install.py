"""Gives scripts that import from `transformers` and `trl` the sharded classes, without a change to them.

Nothing is imported here: when a script imports one of the two modules below, by whatever way, its class is replaced by
a subclass as soon as the module is there. Everything that derives from it, TRL's trainers and the script's own
included, derives from the subclass.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from fullshard.core.errors import LifecycleError

_CLASSES = {"transformers.trainer": "Trainer", "transformers.training_args": "TrainingArguments"}
_ADAPTER = "fullshard.integrations.transformers.classes"


def install() -> None:
    """Shard every `Trainer` of this process. Costs nothing until `transformers.trainer` is imported.

    Raises:
        LifecycleError: a script has imported it already, so that classes derived from it would be left out.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(_CLASSES.keys() & sys.modules.keys())
    if early:
        raise LifecycleError(
            f"{early[0]} is imported already, and classes derived from its own would stay unsharded",
            hint="call install() first, or import Trainer from fullshard.integrations.transformers",
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the two modules as all other finders do, and adds to what happens after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CLASSES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _then_replace(spec.loader)  # type: ignore[method-assign, assignment]
                return spec
        return None


def _then_replace(loader: Loader) -> Callable[[ModuleType], None]:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        name = _CLASSES[module.__name__]
        adapter = importlib.import_module(_ADAPTER)
        setattr(module, name, adapter.sharded(getattr(module, name)))

    return exec_module
