"""Documents to train on: from files, from a hub dataset, or from the standard library of the running Python."""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.core.errors import DataError
from fullshard.core.imports import import_extra
from fullshard.core.paths import looks_like_path

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".py"})
"""Files of a directory that are read as text. A file that is named itself is text whatever its suffix."""

_DEFAULT_MAX_NBYTES = 12_000_000
"""Cap of the default corpus, so that tokenising it stays a matter of seconds on every Python."""

_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_FILE_ORDER_SEED = 0
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A source of documents.

    Attributes:
        description: what it is, for people.
        fingerprint: changes when the documents may have changed.
        documents: yields the documents, the same ones in the same order on every call.
    """

    description: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]


def open_corpus(data: str | None, *, text_field: str = "text", max_nbytes: int | None = None) -> Corpus:
    """Return the corpus that `data` names.

    A file of text is one document, and so is a row of JSONL or Parquet. Files of a directory come in an order that is
    shuffled but always the same, so that the end of the corpus, which is held out, is like its beginning. Files whose
    name, or a directory of whose path, begins with a dot are passed over.

    Args:
        data: a file, a directory, the name of a hub dataset (`owner/name` or `owner/name:configuration`), or None for
            the standard library.
        text_field: field or column with the text, in rows.
        max_nbytes: bytes of UTF-8 text to stop after; the last document is cut there.

    Raises:
        DataError: nothing is there, or nothing readable. Faults inside files are raised while documents are read, and
            name the file and the line.
        MissingExtraError: hub datasets or Parquet without the `hf` extra.
    """
    if data is None:
        return _files_corpus(
            "the standard library of this Python", _standard_library(), max_nbytes=max_nbytes or _DEFAULT_MAX_NBYTES
        )
    path = Path(data)
    if path.is_dir():
        return _files_corpus(str(path), _files_of(path), text_field=text_field, max_nbytes=max_nbytes)
    if path.is_file():
        return _files_corpus(str(path), [path], text_field=text_field, max_nbytes=max_nbytes)
    if looks_like_path(data):
        raise DataError(f"no file or directory {data!r}", hint="check --data")
    return _hub_corpus(data, text_field=text_field, max_nbytes=max_nbytes)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in root.rglob("*.py") if not _SKIPPED_DIRS & set(path.relative_to(root).parts)]


def _files_of(root: Path) -> list[Path]:
    readable = TEXT_SUFFIXES | {".jsonl", ".parquet"}
    files = [
        path
        for path in root.rglob("*")
        if path.suffix in readable
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"{root} has no file that ends in one of {', '.join(sorted(readable))}")
    return files


def _files_corpus(
    name: str, files: Sequence[Path], *, text_field: str | None = None, max_nbytes: int | None = None
) -> Corpus:
    files = sorted(files)
    random.Random(_FILE_ORDER_SEED).shuffle(files)
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    cap = "" if max_nbytes is None else f", the first {max_nbytes / 1e6:g} MB"
    size = sum(nbytes for _, nbytes, _ in stats) / 1e6
    return Corpus(
        description=f"{name} ({len(files)} file{'s' * (len(files) != 1)}, {size:.1f} MB{cap})",
        fingerprint=_digest(stats, text_field, max_nbytes),
        documents=lambda: _capped((d for path in files for d in _documents(path, text_field)), max_nbytes),
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _capped(documents: Iterator[str], max_nbytes: int | None) -> Iterator[str]:
    left = max_nbytes
    for document in documents:
        if left is None:
            yield document
            continue
        encoded = document.encode("utf-8")
        yield document if len(encoded) <= left else encoded[:left].decode("utf-8", errors="ignore")
        left -= len(encoded)
        if left <= 0:
            return


def _documents(path: Path, text_field: str | None) -> Iterator[str]:
    """Yield the documents of one file; `text_field` None means the default corpus, whose faults no user can mend."""
    if path.suffix == ".jsonl":
        yield from _jsonl(path, text_field or "text")
    elif path.suffix == ".parquet":
        yield from _parquet(path, text_field or "text")
    elif path.suffix == ".json":
        raise DataError(
            f"{path}: a .json file is not a list of documents", hint="write one object a line to a .jsonl file"
        )
    else:
        yield _text(path, errors="replace" if text_field is None else "strict")


def _text(path: Path, *, errors: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors=errors).removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not a line of JSON: {error}") from None
            yield _field(row, field, where=f"{path}:{number}")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _parquet(path: Path, field: str) -> Iterator[str]:
    parquet = import_extra("pyarrow.parquet", extra="hf", purpose=f"reading {path}")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path} is not a Parquet file: {error}") from None
    with file:
        if field not in file.schema_arrow.names:
            raise _no_field(str(path), "column", field, file.schema_arrow.names)
        row = 0
        for texts in _batches(file, path, field):
            for text in texts:
                row += 1
                yield _string(text, field, where=f"{path}, row {row}")


def _batches(file: Any, path: Path, field: str) -> Iterator[list[object]]:
    try:
        for batch in file.iter_batches(columns=[field]):
            yield batch.column(0).to_pylist()
    except (ValueError, OSError) as error:  # a page that is damaged, or text that is not UTF-8
        raise DataError(f"{path} is damaged: {error}", hint="copy or download it again") from None


def _hub_corpus(name: str, *, text_field: str, max_nbytes: int | None) -> Corpus:
    datasets = import_extra("datasets", extra="hf", purpose=f"reading the hub dataset {name!r}")
    repository, _, configuration = name.partition(":")
    try:
        # Streamed, so that --max-data-mb reads no more than it needs.
        rows = datasets.load_dataset(repository, configuration or None, split="train", streaming=True)
    except Exception as error:
        raise DataError(
            f"no file or directory {name!r}, and no hub dataset of that name could be opened: {error}",
            hint="check --data, and the network if it is a hub name",
        ) from error

    def documents() -> Iterator[str]:
        for number, row in enumerate(rows):
            yield _field(row, text_field, where=f"{name}, row {number}")

    return Corpus(
        description=f"hub dataset {name}",
        fingerprint=_digest("hub", name, text_field, max_nbytes),
        documents=lambda: _capped(documents(), max_nbytes),
    )


def _field(row: object, field: str, *, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with the field {field!r}, got {type(row).__name__}")
    if field not in row:
        raise _no_field(where, "field", field, list(row))
    return _string(row[field], field, where=where)


def _string(value: object, field: str, *, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} must be text, got {type(value).__name__}")
    try:
        value.isascii() or value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise DataError(
            f"{where}: {field!r} has {half} alone at character {error.start}, half of a character"
        ) from None
    return value


def _no_field(where: str, kind: str, field: str, present: Sequence[str]) -> DataError:
    there = ", ".join(repr(name) for name in present) or "none"
    return DataError(f"{where}: no {kind} {field!r} (there are: {there})", hint=f"name the {kind} with --text-field")
