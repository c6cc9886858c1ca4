"""Properties that read an attribute of an object that the instance holds."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any


def forwarded(path: str, kind: Callable[[Any], Any] | None = None, *, may_set: bool = False) -> Any:
    """Return a property that reads the value at a dotted path. `kind` converts the value. `may_set` adds a setter."""
    found = attrgetter(path)
    holder, _, name = path.rpartition(".")

    def put(self: Any, value: Any) -> None:
        setattr(attrgetter(holder)(self), name, value)

    return property(found if kind is None else lambda self: kind(found(self)), put if may_set else None)
