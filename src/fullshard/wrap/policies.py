"""Which modules of a model become units. A policy only selects; sharding them is the engine's business.

    unit_modules(model, Auto())                        Transformers' own list of layers, else the repeated block
    unit_modules(model, ByClass(("LlamaDecoderLayer",)))
    unit_modules(model, BySize(min_numel=10_000_000))  the smallest modules of at least that many parameters
    unit_modules(model, ByPredicate(lambda module: isinstance(module, Expert)))
    unit_modules(model, NoWrap())                      the root alone

The root is a unit in any case and is never listed. How large a unit should be: one transformer block is nearly always
right. Its all-gather hides behind the computation of its neighbour, and a rank holds two of them unsharded at a time.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from fullshard.core.errors import WrapError
from fullshard.core.sizes import format_count, format_nbytes
from fullshard.wrap.forwards import checkpoint_modules, compile_modules, is_unit

__all__ = [
    "Auto",
    "ByClass",
    "ByPredicate",
    "BySize",
    "NoWrap",
    "WrapPolicy",
    "checkpoint_modules",
    "compile_modules",
    "embedding_modules",
    "numel",
    "parse_policy",
    "unit_modules",
]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: no hook of theirs would ever run."""

_OPAQUE = (nn.MultiheadAttention,)
"""Modules that read the weights of their children without calling them, so the children's hooks would never run."""

_SHOWN_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class ByClass:
    """Modules of the given classes.

    Attributes:
        classes: class names (compared exactly, blanks around them do not count) or classes (subclasses included).
    """

    classes: tuple[str | type[nn.Module], ...]

    def __post_init__(self) -> None:
        stripped = (c.strip() if isinstance(c, str) else c for c in self.classes)
        object.__setattr__(self, "classes", tuple(dict.fromkeys(c for c in stripped if c != "")))
        if not self.classes:
            raise WrapError("no layer class is named", hint="name the class of the model's repeated block")

    def __repr__(self) -> str:
        names = (c if isinstance(c, str) else c.__name__ for c in self.classes)
        return f"ByClass({', '.join(names)})"


@dataclass(frozen=True, slots=True)
class BySize:
    """The smallest modules that have at least `min_numel` parameters outside the units within them.

    Attributes:
        min_numel: number of parameters a unit has at least.
    """

    min_numel: int

    def __post_init__(self) -> None:
        if self.min_numel < 1:
            raise WrapError(f"min_numel must be at least 1, got {self.min_numel}")

    def __repr__(self) -> str:
        return f"BySize(at least {format_count(self.min_numel)} parameters)"


@dataclass(frozen=True, slots=True)
class ByPredicate:
    """Modules for which a function of the module returns true.

    Attributes:
        predicate: asked once per module except the root.
    """

    predicate: Callable[[nn.Module], bool]

    def __repr__(self) -> str:
        return f"ByPredicate({getattr(self.predicate, '__qualname__', type(self.predicate).__name__)})"


@dataclass(frozen=True, slots=True)
class NoWrap:
    """The root alone: the whole model is one unit."""


@dataclass(frozen=True, slots=True)
class Auto:
    """What fits most models without a word from the user.

    The union of `_no_split_modules` over the model and its submodules (Transformers' list of layers that belong
    together), as far as the names occur; else the repeated block: of the classes that occur more than once as children
    of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`, the one that holds the most parameters; else the root.
    """


WrapPolicy = ByClass | BySize | ByPredicate | NoWrap | Auto


def parse_policy(value: object) -> WrapPolicy:
    """A policy from what people write.

    Args:
        value: a policy; None or `"auto"`; `"none"`; class names separated by commas; a class; an iterable of classes
            and names; or a function of a module.

    Raises:
        WrapError: anything else.
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
            return ByPredicate(value)
    raise WrapError(
        f"cannot make a wrap policy of {value!r}",
        hint="use 'auto', 'none', class names, a size (BySize) or a function of a module",
    )


def unit_modules(model: nn.Module, policy: object = None) -> list[nn.Module]:
    """The modules that `policy` makes units of, in definition order, each once, without the root.

    Modules that are units already are left out, as are modules without parameters. Nested units are allowed.

    Args:
        model: the model; on the meta device as well.
        policy: anything `parse_policy` takes.

    Raises:
        WrapError: the policy names a class the model does not have, or that cannot be a unit.

    Warns:
        UserWarning: the policy is not `NoWrap` and yet only the root is wrapped; the text has the bytes that costs.
    """
    policy = parse_policy(policy)
    match policy:
        case ByClass():
            selected = _by_class(model, policy.classes)
        case BySize():
            selected = _by_size(model, policy.min_numel)
        case ByPredicate():
            selected = [m for m in _candidates(model) if policy.predicate(m)]
        case NoWrap():
            return []
        case Auto():
            names = _no_split_names(model)
            selected = _by_class(model, tuple(names)) if names else _repeated_blocks(model)
    units = [m for m in selected if not is_unit(m)]
    if not selected and any(True for _ in _candidates(model)):
        _warn_root_only(model, policy)
    return units


def embedding_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The input embedding and the head, to be units of their own instead of the outermost unit's.

    The outermost unit stays unsharded through a whole step, and so does its gradient through the whole backward. With a
    large vocabulary these two are most of it.

    Raises:
        WrapError: the model does not say which they are, they share a weight (which the unit around both must own), or
            they are units already.
    """
    modules = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    name, hint = type(model).__name__, "leave wrap_embeddings out"
    embedding, head = modules
    if not isinstance(embedding, nn.Module) or not isinstance(head, nn.Module):
        raise WrapError(f"{name} does not say which modules are its input embedding and its head", hint=hint)
    if {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}:
        raise WrapError(f"the input embedding and the head of {name} share a weight, so neither can own it", hint=hint)
    if is_unit(embedding) or is_unit(head):
        raise WrapError(f"the input embedding or the head of {name} is a unit already", hint=hint)
    return embedding, head


def _names_a_class(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that can be units: called, with parameters, not the root. A module that occurs twice comes once."""
    hidden: set[int] = set()
    for module in model.modules():
        if isinstance(module, _OPAQUE):
            hidden.update(id(inner) for inner in module.modules() if inner is not module)
        if module is model or id(module) in hidden or isinstance(module, _CONTAINERS):
            continue
        if next(module.parameters(), None) is not None:
            yield module


def _matches(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    return type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted)


def _by_class(model: nn.Module, classes: tuple[str | type[nn.Module], ...]) -> list[nn.Module]:
    candidates = list(_candidates(model))
    for wanted in classes:
        if not any(_matches(module, wanted) for module in candidates):
            _check_unmatched(model, wanted, candidates)
    return [module for module in candidates if any(_matches(module, wanted) for wanted in classes)]


def _check_unmatched(model: nn.Module, wanted: str | type[nn.Module], candidates: list[nn.Module]) -> None:
    """Say why no module can be a unit for `wanted`. Only the root matching is no error: it is a unit anyway."""
    if _matches(model, wanted):
        return
    name = wanted if isinstance(wanted, str) else wanted.__name__
    counts = Counter(type(module).__name__ for module in candidates)
    sizes: defaultdict[str, int] = defaultdict(int)
    for module in candidates:
        sizes[type(module).__name__] = max(sizes[type(module).__name__], numel(module))
    largest = sorted(counts, key=lambda cls: (-sizes[cls] * counts[cls], cls))
    listed = ", ".join(f"{cls} ({counts[cls]} x {format_count(sizes[cls])})" for cls in largest[:_SHOWN_CANDIDATES])
    if len(largest) > _SHOWN_CANDIDATES:
        listed += f" and {len(largest) - _SHOWN_CANDIDATES} more"
    found = sum(_matches(module, wanted) for module in model.modules())
    problem = (
        f"has {found} modules of class {name!r}, but none that is called and has parameters of its own to shard"
        if found
        else f"has no module of class {name!r}"
    )
    lower = {cls.lower(): cls for cls in counts}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[close[0]]!r}?" if close else "name one of these classes, or use 'auto'"
    raise WrapError(f"{type(model).__name__} {problem}; it has {listed or 'no module with parameters'}", hint=hint)


def _by_size(model: nn.Module, min_numel: int) -> list[nn.Module]:
    candidates = list(_candidates(model))
    allowed = {id(module) for module in candidates}
    chosen: set[int] = set()
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        if not isinstance(module, _OPAQUE):
            for child in module.children():
                visit(child)
        own = [p for p in module.parameters() if id(p) not in taken]
        if id(module) in allowed and sum(p.numel() for p in own) >= min_numel:
            chosen.add(id(module))
            taken.update(id(p) for p in own)

    visit(model)
    return [module for module in candidates if id(module) in chosen]


def _no_split_names(model: nn.Module) -> list[str]:
    present = {type(module).__name__ for module in _candidates(model)}
    names: set[str] = set()
    for module in model.modules():
        # `nn.Module.__getattr__` raises for a missing name; some models set the attribute to None.
        declared = getattr(module, "_no_split_modules", None) or ()
        names.update((declared,) if isinstance(declared, str) else declared)
    return sorted(names & present)


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    candidates = list(_candidates(model))
    allowed = {id(module) for module in candidates}
    groups: defaultdict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        if isinstance(container, (*_CONTAINERS, nn.Sequential)):
            for child in container.children():
                # Sequential is a container that happens to have a forward; the blocks are what is inside.
                if id(child) in allowed and not isinstance(child, nn.Sequential):
                    groups[type(child)][id(child)] = child
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return []
    block = max(repeated, key=lambda group: numel(*group.values()))
    return [module for module in candidates if id(module) in block]


def numel(*modules: nn.Module) -> int:
    """Number of distinct parameter elements in the modules."""
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def _warn_root_only(model: nn.Module, policy: WrapPolicy) -> None:
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    warnings.warn(
        f"only the root of {type(model).__name__} is wrapped (policy {policy!r} matches nothing inside it): every rank "
        f"holds all {format_nbytes(nbytes)} of its parameters unsharded at once, and no communication is overlapped. "
        "Name the class of the repeated block to avoid it, or ask for 'none' to accept it.",
        stacklevel=3,
    )
