"""Files as sources of a configuration, in any dialect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.config.accelerate_file import ACCELERATE
from fullshard.config.deepspeed import DEEPSPEED
from fullshard.config.dialect import Dialect, Problem, Reading
from fullshard.config.document import parse_document, read_document
from fullshard.config.environment import load_arguments
from fullshard.config.native import NATIVE
from fullshard.config.origin import Entry, Origin
from fullshard.config.settings import closest
from fullshard.config.transformers import FSDP_ARGUMENTS, TRANSFORMERS
from fullshard.core.paths import local_path

FILE_DIALECTS = (NATIVE, ACCELERATE, DEEPSPEED, TRANSFORMERS, FSDP_ARGUMENTS)
"""The dialects of a file. If a file reads equally well in two of them, the first one wins."""


def load_file(path: str | Path) -> Reading:
    """Read the settings of a YAML or JSON file, in the dialect that knows most of its keys.

    Raises:
        ConfigError: the file cannot be read as a mapping. Faults of keys and values are in the reading's problems.
    """
    path = local_path(path)
    return _read(read_document(path), path.parent)


def load_fsdp_config(value: str | Path | Mapping[str, Any], flag: str = "--fsdp_config") -> Reading:
    """Read the settings of Transformers' `--fsdp_config`: a file, JSON text, or (in a script) a mapping.

    Raises:
        ConfigError: see `load_file`.
    """
    if isinstance(value, Mapping):
        return load_arguments(value, TRANSFORMERS, flag)
    if not str(value).lstrip().startswith("{"):
        return load_file(value)
    return TRANSFORMERS.read(_at(parse_document(str(value), "fsdp_config.json"), Origin.flag(flag)))


def _at(entries: tuple[Entry, ...], origin: Origin) -> tuple[Entry, ...]:
    """Return the entries with one place as the origin of each."""
    return tuple(
        Entry(entry.key, _at(entry.value, origin) if entry.is_mapping else entry.value, origin) for entry in entries
    )


def _read(entries: tuple[Entry, ...], directory: Path) -> Reading:
    known = [sum(dialect.find(entry.key) is not None for entry in entries) for dialect in FILE_DIALECTS]
    if not max(known):
        return Reading(problems=[_unknown(entry) for entry in entries])
    likely = [dialect for dialect, count in zip(FILE_DIALECTS, known, strict=True) if count == max(known)]
    readings = {dialect.name: dialect.read(entries) for dialect in likely}
    dialect = min(likely, key=lambda dialect: len(readings[dialect.name].problems))
    reading = readings[dialect.name]
    for entry in entries:
        others = [other for other in FILE_DIALECTS if other.find(entry.key)]
        if not dialect.find(entry.key) and others:
            reading.problems = [problem for problem in reading.problems if problem.origins != (entry.origin,)]
            reading.problems.append(_mixed(entry, dialect, others[0]))
    further = reading.entries.get("deepspeed_config_file")
    if further is not None and further.value:
        # As in Accelerate, relative to the working directory; then beside the file.
        path = local_path(str(further.value))
        reading.add(DEEPSPEED.read(read_document(path if path.exists() else directory / path)))
        reading.find_contradictions()
    return reading


def _unknown(entry: Entry) -> Problem:
    spellings = [spelling for dialect in FILE_DIALECTS for spelling in dialect.spellings()]
    close = closest(entry.key.lower(), spellings, 0.6)
    message = f"unknown key {entry.key!r}, in every kind of configuration that is understood"
    return Problem((entry.origin,), message, f"did you mean {close!r}?" if close else _SECTIONS)


def _mixed(entry: Entry, dialect: Dialect, other: Dialect) -> Problem:
    for key in dialect.keys:
        if key.section is not None and key.section.find(entry.key):
            return Problem((entry.origin,), f"{entry.key!r} stands outside its section", f"write it under {key.name!r}")
    message = f"{entry.key!r} is a key of {other.name}, and the rest of the file is {dialect.name}"
    return Problem((entry.origin,), message, "use one file for each, or the words of one")


_SECTIONS = f"fullshard's sections are {', '.join(key.name for key in NATIVE.keys)}"
