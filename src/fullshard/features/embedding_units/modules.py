"""Find the modules that `wrap_embeddings` makes units."""

from __future__ import annotations

from torch import nn

from fullshard.core.errors import WrapError
from fullshard.core.user_class import is_unit
from fullshard.wrap.policies import named_embedding


def embedding_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the input embedding and the head, which are to be units of their own, outside the outermost unit.

    The outermost unit stays unsharded through a whole step, and so does its gradient through the whole backward. With a
    large vocabulary these two are most of it.

    Raises:
        WrapError: The model does not say which modules they are, they share a weight (which the unit around both must
            own), or they are units already.
    """
    embedding, head = named_embedding(model, "input"), named_embedding(model, "output")
    name, hint = type(model).__name__, "leave wrap_embeddings out"
    if embedding is None or head is None:
        raise WrapError(f"{name} does not say which modules are its input embedding and its head", hint=hint)
    if {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}:
        raise WrapError(f"the input embedding and the head of {name} share a weight, so neither can own it", hint=hint)
    if is_unit(embedding) or is_unit(head):
        raise WrapError(f"the input embedding or the head of {name} is a unit already", hint=hint)
    return embedding, head
