"""Report the progress of a long copy, after every chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fullshard.checkpoint.tensor_file import Bytes

Progress = Callable[[int], None]
"""Called with the bytes that were just written."""


def silent(nbytes: int) -> None:
    """Tell nobody."""


def reported(parts: Iterable[Bytes], progress: Progress) -> Iterator[Bytes]:
    """Hand chunks on, and tell their size once they are written."""
    for part in parts:
        yield part
        progress(part.nbytes)
