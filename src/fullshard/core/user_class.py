"""The class that a module had before it became a unit, whose own is a subclass of it."""

from __future__ import annotations

USER_CLASS = "_fullshard_user_class"


def user_class(module: object) -> type:
    """The class that the user wrote: what architectures of models and classes of layers are named after."""
    cls = type(module)
    written: type = cls.__dict__.get(USER_CLASS, cls)
    return written
