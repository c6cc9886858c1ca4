"""Find embeddings, and make them units of their own if asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from fullshard.core.errors import WrapError
from fullshard.core.user_class import is_unit


def embedding_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the input embedding and the head, which are to be units of their own, outside the outermost unit.

    The outermost unit stays unsharded through a whole step, and so does its gradient through the whole backward. With a
    large vocabulary these two are most of it.
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


def embeddings_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings, and the head if the model names it."""
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding))
    if (head := _named_by(model, "output")) is not None:
        yield head


def _named_by(model: Any, which: Literal["input", "output"]) -> nn.Module | None:
    """Return the embedding of the input tokens, or the head, if the model names it."""
    with contextlib.suppress(AttributeError, NotImplementedError):  # models without one raise either
        found = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
        return found if isinstance(found, nn.Module) else None
    return None
