"""The class of a module before it became a unit (the base class of its current class) and its original forward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

USER_CLASS = "_fullshard_user_class"


def user_class(module: object) -> type:
    """Return the class that the user wrote, which model architectures and layer classes refer to by name."""
    cls = type(module)
    written: type = cls.__dict__.get(USER_CLASS, cls)
    return written


def inner_forward(module: Any, key: str) -> Callable[..., Any]:
    """Return the original forward, which is in the module's `__dict__` under `key`, or None for the class's forward.

    A deep copy, whose `__dict__` also contains None, therefore runs the class's forward on itself.
    """
    replaced: Callable[..., Any] | None = module.__dict__[key]
    return replaced if replaced is not None else MethodType(type(module).forward, module)


def is_unit(module: object) -> bool:
    """Return whether `fully_shard` (this library's or torch's) has made `module` a unit."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
