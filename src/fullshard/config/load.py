"""Readers for configuration files in any dialect."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.config.accelerate_file import ACCELERATE
from fullshard.config.deepspeed import DEEPSPEED
from fullshard.config.dialect import Dialect, Key, Problem, Reading
from fullshard.config.document import parse_document, read_document
from fullshard.config.origin import Entry, Origin, entries_of
from fullshard.config.schema import GROUPS
from fullshard.config.settings import closest
from fullshard.config.transformers import FSDP_ARGUMENTS, TRANSFORMERS
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

NATIVE = Dialect(
    "a fullshard configuration",
    tuple(
        Key(
            group,
            section=Dialect(
                f"the section {group!r}", tuple(Key(name, target=f"{group}.{name}") for name in model.model_fields)
            ),
        )
        for group, model in GROUPS.items()
    ),
)
"""fullshard's YAML, with the groups of `RunConfig` as sections and their fields as keys."""

RECIPE_SECTIONS = ("plan", "sft", "train")
"""Sections of a recipe besides the settings of a run: the question to the planner, and arguments of two commands."""

FILE_DIALECTS = (NATIVE, ACCELERATE, DEEPSPEED, TRANSFORMERS, FSDP_ARGUMENTS)
"""The dialects of a file. If a file reads equally well in two of them, the first one wins."""


def load_file(path: str | Path) -> Reading:
    """Read the settings of a YAML or JSON file, in the dialect that recognizes most of its keys."""
    path = local_path(path)
    return _read(tuple(entry for entry in read_document(path) if entry.key not in RECIPE_SECTIONS), path.parent)


def recipe_arguments(entries: Iterable[Entry], command: str) -> tuple[Entry, ...] | None:
    """Return the section of a recipe for `command`, or None for other files. Other recipes raise `ConfigError`."""
    sections = {entry.key: entry for entry in entries if entry.key in RECIPE_SECTIONS}
    if command in sections:
        return tuple(sections[command].value)
    if sections:
        first = next(iter(sections.values())).origin
        raise ConfigError(
            f"{first}: this recipe has no section {command!r}",
            hint=f"`fullshard {command}` cannot run this plan; the first lines of the file say what can",
        )
    return None


def load_fsdp_config(value: str | Path | Mapping[str, Any], flag: str = "--fsdp_config") -> Reading:
    """Read the settings of Transformers' `--fsdp_config`, given as a file, JSON text, or (in a script) a mapping."""
    if isinstance(value, Mapping):
        return TRANSFORMERS.read(entries_of(value, flag))
    if not str(value).lstrip().startswith("{"):
        return load_file(value)
    return TRANSFORMERS.read(_at(parse_document(str(value), "fsdp_config.json"), Origin.flag(flag)))


def _at(entries: tuple[Entry, ...], origin: Origin) -> tuple[Entry, ...]:
    """Return copies of the entries, all with the given origin."""
    return tuple(Entry(e.key, _at(e.value, origin) if e.is_mapping else e.value, origin) for e in entries)


def _unknown(entry: Entry) -> Problem:
    close = closest(entry.key.lower(), [name for dialect in FILE_DIALECTS for name in dialect.spellings()], 0.6)
    hint = f"did you mean {close!r}?" if close else f"fullshard's sections are {', '.join(GROUPS)}"
    return Problem((entry.origin,), f"no kind of configuration has the key {entry.key!r}", hint)


def _read(entries: tuple[Entry, ...], directory: Path) -> Reading:
    known = [sum(dialect.find(entry.key) is not None for entry in entries) for dialect in FILE_DIALECTS]
    if entries and not max(known):
        return Reading(problems=[_unknown(entry) for entry in entries])
    likely = [dialect for dialect, count in zip(FILE_DIALECTS, known, strict=True) if count == max(known)]
    readings = {dialect.name: dialect.read(entries) for dialect in likely}
    dialect = min(likely, key=lambda dialect: len(readings[dialect.name].problems))
    reading = readings[dialect.name]
    further = reading.entries.get("deepspeed_config_file")
    if further is not None and further.value:
        # Relative to the working directory, as in Accelerate, or else to the file.
        path = local_path(str(further.value))
        reading.add(DEEPSPEED.read(read_document(path if path.exists() else directory / path)))
        reading.find_contradictions()
    return reading
