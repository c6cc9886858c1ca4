"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to in the place of `path`, which gets the content when the block ends well.

    Until then, and after an error, `path` is what it was before. A device or a pipe is written to as it is: a file in
    its place would be another thing.

    Args:
        path: the file in the end; its directory must exist.

    Raises:
        OSError: it cannot be written; with its name, which an error of a full disk lacks.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise  # of something else
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
