"""Readers for YAML and JSON files that keep the line and column of every entry."""

import itertools
import json
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from fullshard.config.origin import Entry, Origin, Precedence
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

MAX_NBYTES = 2**18
"""The maximum size of a configuration file. The longest known files have a few thousand bytes."""
_MAX_VALUES = 20_000
"""The maximum number of values in a configuration, because YAML aliases can multiply them."""


def read_document(path: str | Path) -> tuple[Entry, ...]:
    """Return the top-level entries of a YAML or JSON file. Raise `ConfigError` if it is missing or invalid."""
    path = local_path(path)
    if path.is_dir():
        what = f"{path} is a directory, but a configuration must be a file"
        raise ConfigError(what, hint="pass the path of a file in it")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        if len(data) > MAX_NBYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_NBYTES} bytes",
                hint="check the path; a configuration file is normally only a few lines long",
            )
        text = data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration file {path} does not exist", hint=f"check the files in {path.parent}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="use a UTF-8 text file") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> tuple[Entry, ...]:
    """Return the top-level entries of YAML or JSON text. Messages use `name` as the name of the file."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    if name.endswith(".json"):
        _check_json(text, name)
        text = text.replace("\t", " ")  # JSON allows tabs where YAML does not
    try:
        content = YAML(typ="rt").load(StringIO(text))
    except MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark is not None else "1:1"
        problem = (error.problem or "").split(" with value")[0]  # for a duplicate key
        hint = "a key needs a colon and a space before its value, nested keys the same indentation; each stands once"
        raise ConfigError(f"{name}:{place}: the file is not valid YAML: {problem}", hint=hint) from None
    except Exception as error:  # ruamel raises plain errors for malformed tags and numbers
        raise ConfigError(f"{name}:1:1: the file is not valid YAML: {error}", hint="check the YAML syntax") from None
    if isinstance(content, Mapping):
        return _entries(content, name, itertools.count(1))
    got = "nothing" if content is None else "a list" if isinstance(content, list) else "a single value"
    raise ConfigError(
        f"{name}:1:1: expected `key: value` lines, got {got}", hint="use `fullshard config default` to write an example"
    )


def _entries(mapping: Any, name: str, values: Iterator[int]) -> tuple[Entry, ...]:
    found = []
    for key in mapping:
        # A key that is merged in (<<) has no position here.
        line, column = (mapping.lc.data or {}).get(key, (mapping.lc.line, mapping.lc.col))[:2]
        origin = Origin(Precedence.FILE, f"{name}:{line + 1}:{column + 1}")
        found.append(Entry(str(key), _value(mapping[key], name, values), origin))
    return tuple(found)


def _value(value: Any, name: str, values: Iterator[int]) -> Any:
    if next(values) > _MAX_VALUES:
        raise ConfigError(
            f"{name}: the file has more than {_MAX_VALUES} values", hint="check the aliases (*name) in the file"
        )
    if isinstance(value, Mapping):
        return _entries(value, name, values)
    if isinstance(value, list):
        return [_value(item, name, values) for item in value]
    # ruamel's scalars keep their notation; only the plain value is needed.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _check_json(text: str, name: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}:{error.lineno}:{error.colno}: the file is not valid JSON: {error.msg}",
            hint="use double quotes, no comments, and no comma after the last item",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; 1000 brackets
        raise ConfigError(f"{name}:1:1: the file is not valid JSON: {error}", hint="check the file") from None
