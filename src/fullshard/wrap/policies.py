"""Policies that select which modules of a model become units.

    Auto()                        Transformers' own list of layers, and all repeated blocks
    ByClass(("LlamaDecoderLayer",))
    BySize(min_numel=10_000_000)  the smallest modules with at least this many parameters
    ByPredicate(lambda module: isinstance(module, Expert))
    NoWrap()                      only the root

The root is always a unit, so policies do not select it. One transformer block is nearly always the right size for a
unit: its all-gather overlaps with the computation of the previous block, and a rank holds two of them unsharded.
"""

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.core.errors import WrapError, first_of
from fullshard.core.sizes import format_count

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers of repeated blocks."""

_OPAQUE = (nn.MultiheadAttention,)
"""Modules that read the weights of their children without calling them, so the children's hooks would never run."""

_SHOWN_CANDIDATES = 12

_FILLED = 0.5
"""If named layers hold at least this share of a block, the block is a stage of layers. Otherwise, it is one layer."""

_WORTH_A_UNIT = 0.01
"""If the blocks of a class hold less than this share of a model, gathering them as units is not worth it."""


@dataclass(frozen=True, slots=True)
class ByClass:
    """Select all modules of the given classes.

    A string must be the exact name of a class, except for spaces around it. A class object also selects subclasses.
    """

    classes: tuple[str | type[nn.Module], ...]

    def __post_init__(self) -> None:
        stripped = (c.strip() if isinstance(c, str) else c for c in self.classes)
        object.__setattr__(self, "classes", tuple(dict.fromkeys(c for c in stripped if c != "")))
        if not self.classes:
            raise WrapError("no layer class was given", hint="name the class of the model's repeated block")

    def __repr__(self) -> str:
        names = (c if isinstance(c, str) else c.__name__ for c in self.classes)
        return f"ByClass({', '.join(names)})"


@dataclass(frozen=True, slots=True)
class BySize:
    """Select the smallest modules with at least `min_numel` parameters. Smaller units inside do not count."""

    min_numel: int

    def __post_init__(self) -> None:
        if self.min_numel < 1:
            raise WrapError(f"min_numel must be at least 1, got {self.min_numel}")

    def __repr__(self) -> str:
        return f"BySize(at least {format_count(self.min_numel)} parameters)"


@dataclass(frozen=True, slots=True)
class ByPredicate:
    """Select the modules for which a function returns true. The function is called once per module except the root."""

    predicate: Callable[[nn.Module], bool]

    def __repr__(self) -> str:
        return f"ByPredicate({getattr(self.predicate, '__qualname__', type(self.predicate).__name__)})"


@dataclass(frozen=True, slots=True)
class NoWrap:
    """Select only the root, so that the complete model is one unit."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Select units with the default policy, which suits most models without settings.

    The policy selects the modules whose classes Transformers lists in `_no_split_modules` of the model or its
    submodules, because they must not be split. It also selects all repeated blocks: modules of a class that occurs more
    than once among the children of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. If blocks are nested, only
    the outermost ones are selected.

    Many models name only some of their layers. If named modules make up most of a block, they become units instead of
    the block; otherwise they are part of the block's unit. torch layers such as `nn.Linear` count as blocks only if
    there are no other blocks.
    """


WrapPolicy = ByClass | BySize | ByPredicate | NoWrap | Auto


def parse_policy(value: object) -> WrapPolicy:
    """Convert a value that specifies a policy in any supported form to a policy object.

    Supported forms are a policy, None or `"auto"`, `"none"`, class names separated by commas, a class, an iterable of
    classes and names, or a function of a module.
    """
    match value:
        case ByClass() | BySize() | ByPredicate() | NoWrap() | Auto():
            return value
        case None:
            return Auto()
        case str() if value.strip().lower() in ("auto", "none"):
            return Auto() if value.strip().lower() == "auto" else NoWrap()
        case str():
            return ByClass(tuple(value.split(",")))
        case type() if issubclass(value, nn.Module):
            return ByClass((value,))
        case list() | tuple() | set() | frozenset() if all(_names_a_class(item) for item in value):
            # A set of names has a different order in every process; ranks must agree on it.
            return ByClass(tuple(sorted(value, key=str) if isinstance(value, set | frozenset) else value))
        case _ if callable(value) and not isinstance(value, type | nn.Module):
            if _asks_as_torch_does(value):
                raise WrapError(
                    f"{value!r} is a policy for torch's FSDP, which takes more arguments than a module",
                    hint="name the classes, pass a function of a module, or set it as the plugin's auto_wrap_policy",
                )
            return ByPredicate(value)
    raise WrapError(
        f"cannot convert {value!r} to a wrap policy",
        hint="use 'auto', 'none', class names, a size (BySize) or a function of a module",
    )


_Modules = Mapping[int, nn.Module]
"""Modules by identity, in definition order."""


def selected_modules(model: nn.Module, policy: WrapPolicy) -> list[nn.Module]:
    """Return the modules that a policy selects, each once and in definition order. The root is not included.

    All of them have parameters. Some may contain others, and some may already be units.
    """
    candidates = can_be_units(model)
    chosen = _SELECTED_BY[type(policy)](policy, model, candidates)
    return [module for key, module in candidates.items() if key in chosen]


def _asks_as_torch_does(function: Callable[..., object]) -> bool:
    """Return whether a function has torch's signature, `policy(module, recurse, nonwrapped_numel)`."""
    try:
        return "recurse" in inspect.signature(function).parameters
    except ValueError:  # a built-in without a signature
        return False


def _names_a_class(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))


def can_be_units(model: nn.Module) -> _Modules:
    """Return the modules other than the root that can be units: those that have parameters and a forward."""
    opaque = [module for module in model.modules() if isinstance(module, _OPAQUE)]
    hidden = {id(inner) for module in opaque for inner in module.modules()} - {id(module) for module in opaque}
    return {
        id(module): module
        for module in model.modules()
        if module is not model
        and id(module) not in hidden
        and has_forward(module)
        and next(module.parameters(), None) is not None
    }


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` has a forward. Hooks of modules without one (`nn.ModuleList`) would never run."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _matches(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    return type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted)


def _by_class(policy: ByClass, model: nn.Module, candidates: _Modules) -> set[int]:
    chosen: set[int] = set()
    for wanted in policy.classes:
        matching = {key for key, module in candidates.items() if _matches(module, wanted)}
        if not matching and not _matches(model, wanted):  # the root is always a unit
            raise _unmatched(model, wanted, candidates)
        chosen |= matching
    return chosen


def _unmatched(model: nn.Module, wanted: str | type[nn.Module], candidates: _Modules) -> WrapError:
    """Return the error to raise if no module of the class `wanted` can be a unit."""
    name = wanted if isinstance(wanted, str) else wanted.__name__
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for module in candidates.values():
        sizes[type(module).__name__].append(numel(module))
    largest = sorted(sizes, key=lambda cls: (-max(sizes[cls]) * len(sizes[cls]), cls))
    listed = [f"{cls} ({len(sizes[cls])} x {format_count(max(sizes[cls]))})" for cls in largest]
    found = sum(_matches(module, wanted) for module in model.modules())
    problem = f"has no module of class {name!r}"
    if found:
        problem = f"has {found} modules of class {name!r}, but none of them has a forward and parameters to shard"
    lower = {cls.lower(): cls for cls in sizes}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    shown = first_of(listed, _SHOWN_CANDIDATES) or "no module with parameters"
    return WrapError(
        f"{type(model).__name__} {problem}; it has {shown}",
        hint=f"did you mean {lower[close[0]]!r}?" if close else "name one of these classes, or use 'auto'",
    )


def _by_size(policy: BySize, model: nn.Module, candidates: _Modules) -> set[int]:
    chosen: set[int] = set()
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children() if not isinstance(module, _OPAQUE) else ():
            visit(child)
        own = [p for p in module.parameters() if id(p) not in taken]
        if id(module) in candidates and sum(p.numel() for p in own) >= policy.min_numel:
            chosen.add(id(module))
            taken.update(id(p) for p in own)

    visit(model)
    return chosen


def _automatic(_policy: Auto, model: nn.Module, candidates: _Modules) -> set[int]:
    names: set[str] = set()
    for module in model.modules():
        # `nn.Module.__getattr__` raises for a missing name; some models set the attribute to None.
        declared = getattr(module, "_no_split_modules", None) or ()
        names.update((declared,) if isinstance(declared, str) else declared)
    named = {key for key, module in candidates.items() if type(module).__name__ in names}
    blocks = _repeated_blocks(model, candidates)
    chosen: set[int] = set()
    visited: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        inside = [inner for inner in module.modules() if id(inner) in named]
        if id(module) in named:
            chosen.update(map(id, inside))
        elif id(module) in blocks and numel(*inside) < _FILLED * numel(module):
            chosen.add(id(module))
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return chosen


def _repeated_blocks(model: nn.Module, candidates: _Modules) -> set[int]:
    """Return the ids of the modules that `Auto` regards as repeated blocks, including nested ones."""
    groups: defaultdict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        for child in container.children() if isinstance(container, _LISTS) else ():
            # Sequential is a container that happens to have a forward; the blocks are inside it.
            if id(child) in candidates and not isinstance(child, nn.Sequential):
                groups[type(child)][id(child)] = child
    least = _WORTH_A_UNIT * numel(model)
    repeated = {cls: group for cls, group in groups.items() if len(group) > 1 and numel(*group.values()) >= least}
    blocks = [group for cls, group in repeated.items() if not _is_single_layer(cls)]
    return {key for group in blocks or repeated.values() for key in group}


def _is_single_layer(cls: type[nn.Module]) -> bool:
    """Return whether a class is a single torch layer, such as `nn.Linear`, rather than a block of torch layers."""
    return cls.__module__.startswith("torch.nn.") and not cls.__module__.endswith((".transformer", ".activation"))


_SELECTED_BY: Mapping[type[Any], Callable[[Any, nn.Module, _Modules], set[int]]] = {
    ByClass: _by_class,
    BySize: _by_size,
    ByPredicate: lambda policy, _, candidates: {k for k, module in candidates.items() if policy.predicate(module)},
    NoWrap: lambda *_: set(),
    Auto: _automatic,
}
"""How each policy selects among the modules that can be units."""


def numel(*modules: nn.Module) -> int:
    """Return the number of elements in all parameters of the modules, counting shared parameters once."""
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())
