"""YAML and JSON files as entries that know their line and column."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from fullshard.config.origin import Entry, Origin
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

MAX_NBYTES = 2**18
"""Largest configuration file; the longest known ones have a few thousand bytes."""
_MAX_VALUES = 20_000
"""Most values of a configuration: the aliases of YAML make many out of a few."""


def read_document(path: str | Path) -> tuple[Entry, ...]:
    """Return the top-level entries of a YAML or JSON file.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not valid, has a key twice, or holds no mapping.
    """
    path = local_path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, a configuration is a file", hint="name the file in it")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        if len(data) > MAX_NBYTES:
            raise ConfigError(f"{path} has more than {MAX_NBYTES} bytes", hint="a configuration is a few lines of text")
        text = data.decode("utf-8-sig")  # editors on Windows begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} does not exist", hint=_nearby(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="a configuration is a UTF-8 text file") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> tuple[Entry, ...]:
    """Return the top-level entries of YAML or JSON text; `name` stands for the file in messages.

    Raises:
        ConfigError: see `read_document`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError

    if name.endswith(".json"):
        _check_json(text, name)
        text = text.replace("\t", " ")  # JSON allows tabs where YAML does not
    try:
        content = YAML(typ="rt").load(StringIO(text))
    except DuplicateKeyError as error:
        raise ConfigError(
            f"{_mark(name, error.problem_mark)}: {(error.problem or '').split(' with value')[0]}",
            hint="keep one of the two",
        ) from None
    except MarkedYAMLError as error:
        raise ConfigError(
            f"{_mark(name, error.problem_mark or error.context_mark)}: not valid YAML: {error.problem}",
            hint="a key needs a colon and a space before its value, and nested keys the same indentation",
        ) from None
    except Exception as error:  # ruamel raises plain errors for malformed tags and numbers
        raise ConfigError(f"{name}:1:1: not valid YAML: {error}", hint="see the YAML syntax") from None
    if content is None:
        raise ConfigError(f"{name}:1:1: the file is empty", hint="`fullshard config default` writes one to start from")
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{name}:1:1: expected `key: value` lines, got a {'list' if isinstance(content, list) else 'single value'}",
            hint="`fullshard config default` writes an example",
        )
    return _entries(content, name, itertools.count(1))


def _entries(mapping: Any, name: str, values: Iterator[int]) -> tuple[Entry, ...]:
    found = []
    for key in mapping:
        # A key that is merged in (<<) has no place of its own there.
        line, column = (mapping.lc.data or {}).get(key, (mapping.lc.line, mapping.lc.col))[:2]
        found.append(Entry(str(key), _value(mapping[key], name, values), Origin.file(name, line + 1, column + 1)))
    return tuple(found)


def _value(value: Any, name: str, values: Iterator[int]) -> Any:
    if next(values) > _MAX_VALUES:
        raise ConfigError(f"{name}: more than {_MAX_VALUES} values", hint="check its aliases (*name)")
    if isinstance(value, Mapping):
        return _entries(value, name, values)
    if isinstance(value, list):
        return [_value(item, name, values) for item in value]
    # ruamel's scalars remember how they were written; only the plain value is wanted.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _check_json(text: str, name: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}",
            hint="JSON has double quotes, no comments and no comma after the last item",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; 1000 brackets
        raise ConfigError(f"{name}:1:1: not valid JSON: {error}", hint="check the file") from None


def _mark(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{name}:1:1"


def _nearby(path: Path) -> str:
    try:
        files = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml", ".json"))
    except OSError:
        return "check the path"
    return f"{path.parent} has {', '.join(files[:8])}" if files else "`fullshard config default` writes one"
