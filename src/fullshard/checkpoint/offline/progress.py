"""Report the progress of a long copy, after every chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fullshard.checkpoint.tensor_file import Bytes

Progress = Callable[[int], None]
"""Called with the bytes that were just written."""


def silent(nbytes: int) -> None:
    """Report nothing."""


def reported(parts: Iterable[Bytes], progress: Progress) -> Iterator[Bytes]:
    """Yield the chunks, and report the size of each once it is written."""
    for part in parts:
        yield part
        progress(part.nbytes)
