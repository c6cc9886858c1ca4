"""The errors that fullshard raises. Each is a `FullshardError` and also one of Python's built-in exceptions.

The message states the problem, its place, and the actual and expected values. `hint` adds one action on a separate
line. Quoted text may come from untrusted sources, so long text is truncated and control characters are escaped.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

MAX_LINE, MAX_MESSAGE = 4_000, 60_000
"""The maximum number of characters in a line and in a message."""


_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Terminal control characters, changes of text direction, and surrogates, which cannot be encoded."""


def printable(text: str, limit: int = MAX_LINE) -> str:
    """Return text from an untrusted source with terminal control characters escaped, cut to `limit` characters."""
    escaped = _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), shortened(text, limit))
    return shortened(escaped, limit)


def plural(count: int, noun: str) -> str:
    """Return a count and its noun, as in `1 rank`, `2 ranks` or `2 processes`."""
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}" if count != 1 else f"1 {noun}"


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write lines to standard error, or another stream, wrapped at the width of the terminal if it is one."""
    stream = stream or sys.stderr
    is_terminal = getattr(stream, "isatty", bool)()  # a script may have put its own object in its place
    shown = filled(text, shutil.get_terminal_size().columns) if is_terminal else text
    print(shown, file=stream, flush=True)


def filled(text: str, width: int = 80) -> str:
    """Wrap the lines of a text at `width` columns between words, and indent what follows the first part of a line."""
    words: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    indented = [(line, " " * (len(line) - len(line.lstrip()) + 2)) for line in text.splitlines()]
    return "\n".join(textwrap.fill(line, width, subsequent_indent=indent, **words) for line, indent in indented)


def shortened(text: str, limit: int) -> str:
    """Return `text`, with its middle removed if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 8
    return f"{text[:head]} [... {len(text) - head - tail} more characters ...] {text[-tail:]}"


_CAUSES = re.compile(
    r"they came from rank (\d+)|no answer from another rank for \S+ s: rank (\d+)(?! (?:\([^)]*\) )?waits in)|"
    r"but rank (\d+) has \[.*\] \(1 of (?!2 )|: rank (\d+) had an error in|: rank (\d+) \(process[^)]*\) has ended|"
    r"rank (\d+) is alone|\nrank (\d+): |different weights: .* of rank (\d+) \([^)]*\), unlike",
    re.DOTALL,
)


def cause_of(message: str, rank: int | None) -> int | None:
    """Return the rank that an error of `rank` names as its cause: another one, `rank`, or None if it is unknown."""
    if found := _CAUSES.search(message):
        return int(next(filter(None, found.groups())))
    return (
        None if message.partition(":")[0].endswith(("CommunicationError", "ReplicaError", "NonFiniteError")) else rank
    )


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, followed by the number of names that were omitted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class FullshardError(Exception):
    """The base class of all errors that fullshard raises.

    Args:
        message: The problem, its place, and the actual and expected values, in one sentence.
        hint: One action that fixes the problem, printed on a separate line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = shortened("\n".join(map(printable, message.split("\n"))), MAX_MESSAGE)
        super().__init__(message if hint is None else f"{message}\nhint: {printable(hint)}")
        self.hint = hint


class ConfigError(FullshardError, ValueError):
    """A setting, flag, or argument is invalid."""


class PlacementError(ConfigError, AssertionError):
    """`shard_placement_fn` returned an invalid dim. It is also an AssertionError, as in torch's `fully_shard`."""


class WrapError(FullshardError, ValueError):
    """A wrap policy cannot be applied to this model."""


class RepeatedError(WrapError, AssertionError):
    """A module was made a unit twice. It is also an AssertionError, as in torch's `fully_shard`."""


class LayoutError(FullshardError, ValueError):
    """Shapes or dtypes cannot be laid out over the ranks."""


class LifecycleError(FullshardError, RuntimeError):
    """A method was called at the wrong time, or in an order that a unit does not support."""


class CopyError(LifecycleError, AssertionError):
    """A sharded module cannot be copied or pickled. It is also an AssertionError, as in torch's `fully_shard`."""


class OptimizerError(FullshardError, ValueError):
    """An optimizer cannot work with sharded parameters, or does not contain them."""


class CommunicationError(FullshardError, RuntimeError):
    """Ranks disagree about what to do, or a collective failed."""


class NonFiniteError(FullshardError, FloatingPointError):
    """Gradients contain NaN or infinity. The parameters have not been changed."""


class ReplicaError(FullshardError, RuntimeError):
    """Replicas of a model hold different weights, because a bit flipped or one rank alone changed its weights."""


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint is incomplete, damaged, or does not match what it is loaded into."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was saved: bytes or files are missing or changed. Nothing was loaded."""


class StoreError(FullshardError, RuntimeError):
    """An object store did not respond or refused the request, so its contents are unknown."""


class DataError(FullshardError, ValueError):
    """Training data cannot be read or used."""


class HubError(FullshardError, OSError):
    """A saved model could not be pushed to the hub."""


class VersionError(FullshardError, ImportError):
    """An installed package is too old."""


class MissingExtraError(FullshardError, ImportError):
    """An optional dependency is missing. An extra of fullshard installs it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed", hint=f"pip install 'fullshard[{extra}]'"
        )
        self._arguments = {"package": package, "extra": extra, "purpose": purpose}

    def __reduce__(self) -> tuple[Callable[..., MissingExtraError], tuple[()]]:
        return partial(MissingExtraError, **self._arguments), ()


@contextlib.contextmanager
def own_errors(what: str, hint: str | None = None) -> Iterator[None]:
    """Convert any error that a library raises within the block, for example for a bad file, to a `ConfigError`."""
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {error}", hint=hint) from error
