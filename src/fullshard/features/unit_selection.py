"""Selection of the modules that become units, with a warning if too many parameters stay in the root."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from fullshard.core.errors import WrapError
from fullshard.core.sizes import format_count, format_nbytes
from fullshard.core.user_class import is_unit
from fullshard.wrap.policies import NoWrap, WrapPolicy, can_be_units, has_forward, numel, parse_policy, selected_modules


def embedding_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the input embedding and the output head, so that each of them can become a unit.

    Otherwise, they belong to the outermost unit. That unit stays unsharded during a complete step, and its gradient
    stays in memory during the complete backward. With a large vocabulary, they make up most of that unit.

    Raises:
        WrapError: The model does not identify them, they share a weight, or one of them is already a unit.
    """
    embedding, head = _named_by(model, "input"), _named_by(model, "output")
    name, hint = type(model).__name__, "remove wrap_embeddings"
    if embedding is None or head is None:
        raise WrapError(f"{name} does not identify its input embedding and its head", hint=hint)
    if {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}:
        raise WrapError(f"the input embedding and the head of {name} share a weight, so neither can own it", hint=hint)
    if is_unit(embedding) or is_unit(head):
        raise WrapError(f"the input embedding or the head of {name} is already a unit", hint=hint)
    return embedding, head


def embeddings_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all embeddings of a model, and its output head if the model identifies it."""
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding))
    if (head := _named_by(model, "output")) is not None:
        yield head


def _named_by(model: Any, which: Literal["input", "output"]) -> nn.Module | None:
    """Return the input embedding or the output head of a model, or None if the model does not identify it."""
    with contextlib.suppress(AttributeError, NotImplementedError):  # models without one raise either error
        found = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
        return found if isinstance(found, nn.Module) else None
    return None


_ROOT_SHARE = 0.25
"""Warn if more than this fraction of a model, excluding embeddings, is in the root."""

_SHOWN_MODULES = 3


def unit_modules(model: nn.Module, policy: object = None) -> list[nn.Module]:
    """Return the modules that `policy` selects as units, in definition order and without duplicates. Omit the root.

    Modules that are already units and modules without parameters are skipped. Nested units are allowed.

    Args:
        model: the model, which may be on the meta device.
        policy: any value that `parse_policy` accepts.

    Warns:
        UserWarning: The policy is not `NoWrap`, but a large part of the model stays in the root, not counting
            embeddings and the head. The text gives the size of this part and its largest modules.
    """
    parsed = parse_policy(policy)
    selected = selected_modules(model, parsed)
    if not isinstance(parsed, NoWrap) and can_be_units(model):
        _check_root(model, selected, parsed)
    return [module for module in selected if not is_unit(module)]


def _check_root(model: nn.Module, units: list[nn.Module], policy: WrapPolicy) -> None:
    """Warn if a large part of `model`, apart from embeddings and the head, stays in the root and thus unsharded."""
    inside = {id(p) for unit in units for p in unit.parameters()}
    usual = {id(p) for module in embeddings_of(model) for p in module.parameters()}
    root = {id(p): p for p in model.parameters() if id(p) not in inside}
    rest = {key: p for key, p in root.items() if key not in usual}
    share = sum(p.numel() for p in rest.values()) / max(numel(model), 1)
    if units and share <= _ROOT_SHARE:
        return
    name, held = type(model).__name__, format_nbytes(sum(p.numel() * p.element_size() for p in root.values()))
    problem = (
        f"{share:.0%} of the parameters of {name} (not counting embeddings and head) are only in the root unit (policy "
        f"{policy!r}), so every rank holds the root's {held} unsharded through the whole step. Its largest modules are "
        f"{', '.join(_largest(model, rest, inside))}"
    )
    if not units:
        problem = (
            f"only the root of {name} is wrapped (policy {policy!r} matches nothing inside it), so every rank holds "
            f"all {held} of its parameters unsharded at the same time, and no communication is overlapped"
        )
    warnings.warn(
        f"{problem}. Use a policy with the class of the repeated block, or the policy 'none' to accept this.",
        stacklevel=3,
    )


def _largest(model: nn.Module, rest: dict[int, nn.Parameter], inside: set[int]) -> list[str]:
    """Describe the largest modules that have parameters in `rest` and none in a unit: name, class and size of each."""
    found: list[tuple[int, str]] = []

    def visit(module: nn.Module, path: str) -> None:
        parameters = {id(p): p for p in module.parameters()}
        held = sum(p.numel() for key, p in parameters.items() if key in rest)
        if not held:
            return
        if path and has_forward(module) and inside.isdisjoint(parameters):
            found.append((held, f"{path} ({type(module).__name__}, {format_count(held)})"))
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return [text for _, text in sorted(found, reverse=True)[:_SHOWN_MODULES]] or [f"{type(model).__name__} itself"]
