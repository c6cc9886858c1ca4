"""A module's class before it became a unit, whose class is a subclass of it."""

from __future__ import annotations

USER_CLASS = "_fullshard_user_class"


def user_class(module: object) -> type:
    """Return the class that the user wrote, which names model architectures and layer classes."""
    cls = type(module)
    written: type = cls.__dict__.get(USER_CLASS, cls)
    return written
