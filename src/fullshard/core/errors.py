"""Every error that fullshard raises on purpose: a `FullshardError` that is also one of Python's own kinds.

The message says what is wrong, where, and got / expected; `hint` adds one action on a line of its own. Quoted text may
be anything: long text is cut, and terminal control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

MAX_LINE, MAX_MESSAGE = 4_000, 60_000
"""Most characters of a line, and of a whole message."""


_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, or that no output accepts: controls, changes of direction, halves of pairs."""


def printable(text: str, limit: int = MAX_LINE) -> str:
    """Return text of unknown origin as printable text: terminal control characters are escaped, and it is cut."""
    return cut(_OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), cut(text, limit)), limit)


def cut(text: str, limit: int) -> str:
    """Return `text`, without its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 8
    return f"{text[:head]} [... {len(text) - head - tail} more characters ...] {text[-tail:]}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class FullshardError(Exception):
    """Base of all errors raised by fullshard.

    Args:
        message: what is wrong, where, and got / expected, in one sentence.
        hint: one action that fixes it, printed on its own line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = cut("\n".join(map(printable, message.split("\n"))), MAX_MESSAGE)
        super().__init__(message if hint is None else f"{message}\nhint: {printable(hint)}")
        self.hint = hint


class ConfigError(FullshardError, ValueError):
    """A setting, a flag or an argument is wrong."""


class PlacementError(ConfigError, AssertionError):
    """`shard_placement_fn` returns no dim of a parameter. torch's `fully_shard` raises an AssertionError."""


class WrapError(FullshardError, ValueError):
    """A wrap policy cannot be applied to this model."""


class RepeatedError(WrapError, AssertionError):
    """A module is to become a unit twice. torch's `fully_shard` raises an AssertionError."""


class LayoutError(FullshardError, ValueError):
    """Shapes or dtypes that cannot be laid out over the ranks."""


class LifecycleError(FullshardError, RuntimeError):
    """A call at the wrong moment, or one that a unit cannot follow."""


class CopyError(LifecycleError, AssertionError):
    """A sharded module cannot be copied or pickled. torch's `fully_shard` raises an AssertionError."""


class OptimizerError(FullshardError, ValueError):
    """An optimizer that cannot work on sharded parameters, or does not hold them."""


class CommunicationError(FullshardError, RuntimeError):
    """Ranks disagree about what to do, or a collective failed."""


class NonFiniteError(FullshardError, FloatingPointError):
    """Gradients hold NaN or infinity. No parameter has been changed by them."""


class ReplicaError(FullshardError, RuntimeError):
    """Replicas of a model hold different weights: a bit has flipped, or a rank has changed its own alone."""


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint is incomplete, damaged, or does not match what it is loaded into."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was saved: bytes or files are missing or changed. Nothing was changed by it."""


class StoreError(FullshardError, RuntimeError):
    """An object store did not answer, or refused the request. The store's contents are unknown."""


class DataError(FullshardError, ValueError):
    """Training data cannot be read or used."""


class HubError(FullshardError, OSError):
    """A saved model could not be pushed to the hub."""


class VersionError(FullshardError, ImportError):
    """An installed package is too old."""


class MissingExtraError(FullshardError, ImportError):
    """An optional dependency is not installed; an extra of fullshard installs it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed",
            hint=f"pip install 'fullshard[{extra}]'",
        )
        self._arguments = {"package": package, "extra": extra, "purpose": purpose}

    def __reduce__(self) -> tuple[Callable[..., MissingExtraError], tuple[()]]:
        return partial(MissingExtraError, **self._arguments), ()
