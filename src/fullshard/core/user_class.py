"""The original class and the original forward of a module that has become a unit and thus has a new class."""

from collections.abc import Callable
from types import MethodType
from typing import Any

USER_CLASS = "_fullshard_user_class"


def user_class(module: object) -> type:
    """Return the class that the user wrote. The current class of a unit is a subclass of it."""
    cls = type(module)
    written: type = cls.__dict__.get(USER_CLASS, cls)
    return written


def inner_forward(module: Any, key: str) -> Callable[..., Any]:
    """Return the forward in `module.__dict__[key]`, where None, also in a copy, means the forward of the class."""
    replaced: Callable[..., Any] | None = module.__dict__[key]
    return replaced if replaced is not None else MethodType(type(module).forward, module)


def is_unit(module: object) -> bool:
    """Return whether `fully_shard` (this library's or torch's) has made `module` a unit."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
