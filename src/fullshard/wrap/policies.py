"""Which modules of a model become units. A policy only selects; sharding them is the engine's business.

    unit_modules(model, Auto())                        Transformers' own list of layers, and all repeated blocks
    unit_modules(model, ByClass(("LlamaDecoderLayer",)))
    unit_modules(model, BySize(min_numel=10_000_000))  the smallest modules of at least that many parameters
    unit_modules(model, ByPredicate(lambda module: isinstance(module, Expert)))
    unit_modules(model, NoWrap())                      the root alone

The root is a unit in any case and is never listed. How large a unit should be: one transformer block is nearly always
right. Its all-gather hides behind the computation of its neighbour, and a rank holds two of them unsharded at a time.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fullshard.core.errors import WrapError, first_of
from fullshard.core.sizes import format_count, format_nbytes
from fullshard.wrap.forwards import is_unit

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers of blocks that repeat."""

_OPAQUE = (nn.MultiheadAttention,)
"""Modules that read the weights of their children without calling them, so the children's hooks would never run."""

_SHOWN_CANDIDATES = 12

_SHOWN_MODULES = 3

_FILLED = 0.5
"""A block of which named layers hold at least that share is a stage of layers; of less, a layer with named parts."""

_WORTH_A_UNIT = 0.01
"""A class of blocks that together hold less than this share of a model is not worth its gathers."""

_ROOT_SHARE = 0.25
"""More than this share of a model in the root, embeddings apart, is worth a warning."""


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
    """The default policy, which fits most models without settings.

    It selects the modules that Transformers names (`_no_split_modules` of the model and its submodules: layers that
    belong together), and all repeated blocks: modules whose class occurs more than once as a child of an
    `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`, the outermost of those inside each other. Many models name only
    a part of their layers. A block that mostly consists of named modules is left to those; named modules that are a
    smaller part of a block are in its unit. Torch layers such as `nn.Linear` are blocks only where there are no others.
    """


WrapPolicy = ByClass | BySize | ByPredicate | NoWrap | Auto


def parse_policy(value: object) -> WrapPolicy:
    """Return a policy from the forms in which users write it.

    Args:
        value: a policy; None or `"auto"`; `"none"`; class names separated by commas; a class; an iterable of classes
            and names; or a function of a module.

    Raises:
        WrapError: The value is anything else.
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
                    f"{value!r} is a policy of torch's FSDP, which asks for more than a module",
                    hint="name the classes, pass a function of a module, or give it to the plugin's auto_wrap_policy",
                )
            return ByPredicate(value)
    raise WrapError(
        f"cannot make a wrap policy of {value!r}",
        hint="use 'auto', 'none', class names, a size (BySize) or a function of a module",
    )


def unit_modules(model: nn.Module, policy: object = None) -> list[nn.Module]:
    """Return the modules that `policy` makes units of, in definition order, each once, without the root.

    Modules that are units already are left out, as are modules without parameters. Nested units are allowed.

    Args:
        model: the model; on the meta device as well.
        policy: anything `parse_policy` takes.

    Raises:
        WrapError: The policy names a class that the model does not have, or that cannot be a unit.

    Warns:
        UserWarning: The policy is not `NoWrap` and yet much of the model is left to the root, embeddings and head
            apart; the text has the share, the bytes and the largest modules of it.
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
            selected = _automatic(model)
    if any(True for _ in _candidates(model)):
        _check_root(model, selected, policy)
    return [m for m in selected if not is_unit(m)]


def embedding_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the input embedding and the head, which are to be units of their own, outside the outermost unit.

    The outermost unit stays unsharded through a whole step, and so does its gradient through the whole backward. With a
    large vocabulary these two are most of it.

    Raises:
        WrapError: The model does not say which modules they are, they share a weight (which the unit around both must
            own), or they are units already.
    """
    embedding, head = _named_by(model, "input"), _named_by(model, "output")
    name, hint = type(model).__name__, "leave wrap_embeddings out"
    if embedding is None or head is None:
        raise WrapError(f"{name} does not say which modules are its input embedding and its head", hint=hint)
    if {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}:
        raise WrapError(f"the input embedding and the head of {name} share a weight, so neither can own it", hint=hint)
    if is_unit(embedding) or is_unit(head):
        raise WrapError(f"the input embedding or the head of {name} is a unit already", hint=hint)
    return embedding, head


def _asks_as_torch_does(function: Callable[..., object]) -> bool:
    """Return whether a function is called as `policy(module, recurse, nonwrapped_numel)`."""
    try:
        return "recurse" in inspect.signature(function).parameters
    except ValueError:  # of a built-in, which does not say
        return False


def _names_a_class(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that can be units: called, with parameters, not the root. One that occurs twice comes once."""
    hidden: set[int] = set()
    for module in model.modules():
        if isinstance(module, _OPAQUE):
            hidden.update(id(inner) for inner in module.modules() if inner is not module)
        if module is model or id(module) in hidden or not _has_forward(module):
            continue
        if next(module.parameters(), None) is not None:
            yield module


def _has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called; else none of its hooks would ever run (`nn.ModuleList` and the like)."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


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
    listed = first_of([f"{cls} ({counts[cls]} x {format_count(sizes[cls])})" for cls in largest], _SHOWN_CANDIDATES)
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


def _automatic(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `Auto` selects."""
    candidates = {id(module): module for module in _candidates(model)}
    names = _no_split_names(model)
    named = {key for key, module in candidates.items() if type(module).__name__ in names}
    blocks = _repeated_blocks(model, candidates)
    chosen: set[int] = set()
    visited: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        if id(module) in named:
            chosen.update(id(inner) for inner in module.modules() if id(inner) in named)
        elif id(module) in blocks and _share(module, named) < _FILLED:
            chosen.add(id(module))
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return [module for key, module in candidates.items() if key in chosen]


def _repeated_blocks(model: nn.Module, candidates: dict[int, nn.Module]) -> set[int]:
    """Return the modules that are blocks by `Auto`'s rule, those inside others included, by identity."""
    groups: defaultdict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        if isinstance(container, _LISTS):
            for child in container.children():
                # Sequential is a container that happens to have a forward; the blocks are inside it.
                if id(child) in candidates and not isinstance(child, nn.Sequential):
                    groups[type(child)][id(child)] = child
    least = _WORTH_A_UNIT * numel(model)
    repeated = {cls: group for cls, group in groups.items() if len(group) > 1 and numel(*group.values()) >= least}
    blocks = [group for cls, group in repeated.items() if not _is_single_layer(cls)]
    return {key for group in blocks or repeated.values() for key in group}


def _is_single_layer(cls: type[nn.Module]) -> bool:
    """Return whether a class is one of torch's layers, like `nn.Linear`, and not one of its blocks."""
    return cls.__module__.startswith("torch.nn.") and not cls.__module__.endswith((".transformer", ".activation"))


def _share(module: nn.Module, parts: set[int]) -> float:
    """Return the share of the parameters of `module` that the modules in `parts` hold."""
    return numel(*(inner for inner in module.modules() if id(inner) in parts)) / numel(module)


def numel(*modules: nn.Module) -> int:
    """Return the number of distinct parameter elements in the modules."""
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def _check_root(model: nn.Module, units: list[nn.Module], policy: WrapPolicy) -> None:
    """Warn if much of `model` is in no unit: every rank holds that unsharded through a whole step.

    Embeddings and the head do not count: they are large in small models, and the root is where they usually are.
    """
    inside = {id(p) for unit in units for p in unit.parameters()}
    usual = {id(p) for module in embeddings_of(model) for p in module.parameters()}
    root = {id(p): p for p in model.parameters() if id(p) not in inside}
    rest = {key: p for key, p in root.items() if key not in usual}
    share = sum(p.numel() for p in rest.values()) / max(numel(model), 1)
    if units and share <= _ROOT_SHARE:
        return
    name, held = type(model).__name__, format_nbytes(sum(p.numel() * p.element_size() for p in root.values()))
    if not units:
        problem = (
            f"only the root of {name} is wrapped (policy {policy!r} matches nothing inside it): every rank holds all "
            f"{held} of its parameters unsharded at once, and no communication is overlapped"
        )
    else:
        problem = (
            f"{share:.0%} of the parameters of {name} are in no unit but the root, beside embeddings and head (policy "
            f"{policy!r}): every rank holds its {held} unsharded at once, through the whole step. The largest modules "
            f"of it: {', '.join(_largest(model, rest, inside))}"
        )
    warnings.warn(
        f"{problem}. Name the class of the repeated block to avoid it, or ask for 'none' to accept it.", stacklevel=3
    )


def embeddings_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings, and the head if the model names it."""
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding))
    if (head := _named_by(model, "output")) is not None:
        yield head


def _named_by(model: Any, which: Literal["input", "output"]) -> nn.Module | None:
    """Return the embedding of the input tokens, or that of the output (the head), if the model names it."""
    with contextlib.suppress(AttributeError, NotImplementedError):  # models without one raise either
        found = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
        return found if isinstance(found, nn.Module) else None
    return None


def _largest(model: nn.Module, rest: dict[int, nn.Parameter], inside: set[int]) -> list[str]:
    """Return the largest modules that hold parameters of `rest` and none of any unit, each with its class and size."""
    found: list[tuple[int, str]] = []

    def visit(module: nn.Module, path: str) -> None:
        parameters = {id(p): p for p in module.parameters()}
        held = sum(p.numel() for key, p in parameters.items() if key in rest)
        if not held:
            return
        if path and _has_forward(module) and inside.isdisjoint(parameters):
            found.append((held, f"{path} ({type(module).__name__}, {format_count(held)})"))
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return [text for _, text in sorted(found, reverse=True)[:_SHOWN_MODULES]] or [f"{type(model).__name__} itself"]
