"""Imports of optional libraries, and actions that run when another library is imported."""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from fullshard.core.errors import MissingExtraError

Action = Callable[[ModuleType], None]


def import_extra(name: str, *, extra: str, purpose: str) -> Any:
    """Import a module of an optional dependency. Raise `MissingExtraError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name.partition(".")[0], extra=extra, purpose=purpose) from error


def require_hub(say: Callable[[str], None], *names: str) -> None:
    """Use only downloaded files for names on the hub if it cannot be reached. Otherwise, each of them takes minutes."""
    hub = import_extra("huggingface_hub", extra="hf", purpose="models of the hub")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE or all(Path(name).exists() for name in names):
        return
    try:
        hub.get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # from the HTTP library, which depends on the version
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.config.HF_HUB_OFFLINE = True
        say(f"{constants.ENDPOINT} cannot be reached, so only local and downloaded files are used: {error}")


def on_demand(
    module: str, otherwise: Callable[[str], Any] | None = None, *, packages: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package that imports its public names on first use.

    The package's stub `__init__.pyi`, which type checkers read, imports each name from its home. `otherwise` returns
    the value of a name without a home in fullshard, and of its subpackages in `packages`, or raises an error.
    """
    stub = ast.parse(Path(str(sys.modules[module].__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module)
    found = ((alias.asname or alias.name, str(node.module)) for node in imports for alias in node.names)
    homes = {name: home for name, home in found if home.startswith("fullshard.") and name not in packages}

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        elif otherwise is not None and not name.startswith("_"):
            value = otherwise(name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, value)
        return value

    names = sorted([*homes, *packages])
    return names, get, lambda: sorted({*vars(sys.modules[module]), *names})


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` when the module is imported, or now if it already is. The module is not imported here."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.actions.setdefault(name, []).append(action)


class _Finder(MetaPathFinder):
    """An import finder that delegates to the other finders and runs actions after the code of a module has run."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = self._then_act(spec.loader)  # type: ignore[method-assign, assignment]
                return spec
        return None

    def _then_act(self, loader: Loader) -> Action:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.actions[module.__name__]:
                action(module)

        return exec_module


@dataclass(eq=False, slots=True)
class Replaced:
    """A function of another library that fullshard replaces. `torchs` is the original, called `name` in `owner`."""

    owner: Any
    name: str
    torchs: Callable[..., Any]

    @classmethod
    def of(cls, owner: Any, name: str) -> Self:
        """Return a record of the function that `owner` has under this name now."""
        return cls(owner, name, getattr(owner, name))


def replace(functions: Mapping[Replaced, Callable[..., Any]]) -> None:
    """Replace each function in its owner and in every module that has imported it by name."""
    for place, function in functions.items():
        setattr(place.owner, place.name, function)
    new = {id(place.torchs): function for place, function in functions.items()}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if id(value) in new:
                setattr(module, name, new[id(value)])
