"""Tables of configuration dialects, with a row for each key that users may write and its effect in fullshard.

A key is used as it is, translated (a note names the resulting setting), refused, or without effect (a note gives the
reason). A key that is not in the table is an error with a suggestion. The documentation's tables and the tests are
generated from these rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from fullshard.config import values
from fullshard.config.origin import Entry, Origin, Precedence
from fullshard.config.settings import closest, plain_message
from fullshard.core.errors import ConfigError

Settings = Mapping[str, Any]
"""Values of settings by path (`group.name`)."""

COMMENT = ("_", "//", "$")
"""Prefixes of keys that are not settings: comments in JSON, and `$schema` for editors."""

Read = Callable[[Any], Settings | str | None]
"""Converts a value to settings; see `Key.read`."""


class Status(StrEnum):
    """The effect of a key in fullshard."""

    USED = "used"
    TRANSLATED = "translated"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """A row of a dialect. It describes one key, under the name that the current version of the tool uses."""

    name: str  # without dashes and prefixes
    status: Status = Status.USED  # the effect of the key
    target: str = ""  # the path of the setting that the key sets. If there are several settings, see `read`.
    because: str = ""  # why the key has no effect or is refused; for a translated key, its meaning in fullshard
    spellings: tuple[str, ...] = ()  # deprecated or incorrect spellings that are accepted too
    # Converts the value to settings by path, for rows that do more than `target = value`. Raises `ConfigError` or
    # `ValueError` if the value is invalid. Returns None if the key has no effect, or a string with the reason.
    read: Read | None = None
    section: Dialect | None = None  # the dialect of the nested mapping, if the value is one
    # Values that switch the feature off. They are allowed even if the key is refused. Rows with `read` do not use them.
    unset: tuple[Any, ...] = (None, False, "", "no", "false", "none")
    variable: str | None = None  # the environment variable that corresponds to the key

    def settings(self, value: Any) -> Settings | str | None:
        """Return the settings that `value` sets. Instead, this may be None or a reason, as described for `read`."""
        if self.read is not None:
            return self.read(value)
        return {self.target: values.coerce(self.target, value)} if self.target else {}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with its path (`group.name`), the place where it was written, and the key that was used there."""

    path: str
    value: Any
    origin: Origin
    key: str


@dataclass(frozen=True, slots=True)
class Note:
    """A note on a key that was not used as written. Its message is the origin, the key, and then `text`."""

    origin: Origin
    key: str
    status: Status
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.key} {self.text}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse a configuration, with the places to check and one action that fixes it."""

    origins: tuple[Origin, ...]
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = ", ".join(dict.fromkeys(origin.text for origin in self.origins))
        return f"{where}: {self.message}" if where else self.message


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one `ConfigError` that lists all problems, or return if there are none."""
    problems = list(problems)
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigError(str(problems[0]), hint=problems[0].hint)
    lines, said = [], set()
    for problem in problems:  # show a hint that lists all keys only once
        lines.append(f"  {problem}" + (f" ({problem.hint})" if problem.hint and problem.hint not in said else ""))
        said.add(problem.hint)
    raise ConfigError(
        "\n".join([f"the configuration has {len(problems)} problems", *lines]),
        hint="fix these problems and try again; `fullshard config check` checks a file without running it",
    )


@dataclass(slots=True)
class Reading:
    """The settings that one source contains, as written there, and the problems found in it."""

    settings: list[Setting] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, other: Reading) -> None:
        """Add the settings, notes, problems, and entries of another reading."""
        self.settings += other.settings
        self.notes += other.notes
        self.problems += other.problems
        self.entries |= other.entries

    def setting(self, path: str) -> Setting | None:
        """Return the last setting for `path`, or None if there is none."""
        return next((setting for setting in reversed(self.settings) if setting.path == path), None)

    def drop(self, path: str, because: str) -> None:
        """Remove a setting that has no effect in combination with the others, and add a note about it."""
        for setting in [setting for setting in self.settings if setting.path == path]:
            self.settings.remove(setting)
            self.notes.append(_note(setting, because))

    def find_contradictions(self) -> None:
        """Add a problem for two keys that set one setting to different values, so that neither wins silently."""
        first: dict[str, Setting] = {}
        known = {origin for problem in self.problems for origin in problem.origins if len(problem.origins) > 1}
        for setting in self.settings:
            other = first.setdefault(setting.path, setting)
            if other.value != setting.value and setting.origin.precedence == other.origin.precedence:
                theirs, ours = shown(other.value), shown(setting.value)
                message = f"{other.key} means {setting.path} = {theirs}, {setting.key} means {ours}"
                if other.key == setting.key and other.origin.text == setting.origin.text:
                    message = f"{setting.key} is given twice, as {theirs} and as {ours}"
                if not known & {other.origin, setting.origin}:  # otherwise, a rule has reported it already
                    self.problems.append(Problem((other.origin, setting.origin), message, "keep one of the two"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """The keys that one tool or one kind of file uses. `finish` applies rules that depend on several keys."""

    name: str
    keys: tuple[Key, ...]
    prefix: str = ""
    finish: Callable[[Reading], None] | None = None

    def find(self, name: str) -> Key | None:
        """Return the row for a key, or None. Ignore case and the prefix, and treat `-` and `_` as the same."""
        wanted = _normal(name)
        options = {wanted, self.prefix + wanted, wanted.removeprefix(self.prefix)} if self.prefix else {wanted}
        for key in self.keys:
            if options & {_normal(spelling) for spelling in (key.name, *key.spellings)}:
                return key
        return None

    def spellings(self) -> list[str]:
        """Return every accepted spelling of every key."""
        return [spelling for key in self.keys for spelling in (key.name, *key.spellings)]

    def read(self, entries: Iterable[Entry]) -> Reading:
        """Read the settings in the entries. Report faults in the reading's `problems` instead of raising exceptions."""
        reading = Reading()
        for entry in entries:
            key = self.find(entry.key)
            if key is None and entry.key.startswith(COMMENT):
                reading.notes.append(_note(entry, "it is a comment"))
            elif key is None:
                reading.problems.append(self._unknown(entry))
            else:
                reading.add(_read_entry(key, entry))
                reading.entries[key.name] = entry
        if self.finish is not None:
            self.finish(reading)
        reading.find_contradictions()
        return reading

    def _unknown(self, entry: Entry) -> Problem:
        for key in self.keys:
            if key.section is not None and key.section.find(entry.key):
                message = f"{entry.key!r} is outside its section"
                return Problem((entry.origin,), message, f"write it under {key.name!r}")
        known = {_normal(spelling): spelling for spelling in self.spellings()}
        close = closest(_normal(entry.key), known, 0.6) or closest(self.prefix + _normal(entry.key), known, 0.6)
        everything = ", ".join(key.name for key in self.keys)
        hint = f"did you mean {known[close]!r}?" if close else f"use one of {everything}"
        return Problem((entry.origin,), f"unknown key {entry.key!r} in {self.name}", hint)


def no_effect(because: str, *names: str, read: Read | None = None) -> tuple[Key, ...]:
    """Return rows for keys that have no effect for the same reason."""
    return tuple(Key(name, Status.NO_EFFECT, because=because, read=read) for name in names)


def refused(because: str, *names: str, read: Read | None = None) -> tuple[Key, ...]:
    """Return rows for keys that are refused for the same reason."""
    return tuple(Key(name, Status.REFUSED, because=because, read=read) for name in names)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("dialects.toml").read_text(encoding="utf-8"))


def rows(table: str, read: Read | None = None) -> tuple[Key, ...]:
    """Return the rows in a table of `dialects.toml`. They all have the same reader, or none."""
    found: list[Key] = []
    for status, keys in _tables()[table].items():
        kind = Status[status.upper()]
        if kind in (Status.USED, Status.TRANSLATED):
            found += (Key(name, kind, target, read=read) for name, target in keys.items())
        else:
            found += (Key(name, kind, because=because, read=read) for because, names in keys.items() for name in names)
    return tuple(found)


def switch(path: str, on: Any) -> Read:
    """Return a reader for a boolean that sets `path` to `on` if it is true and sets nothing if it is false."""
    return lambda value: {path: on} if values.boolean(value) else {}


def checked(read: values.Read) -> Read:
    """Return a reader for a key that has no effect but must have a valid value."""

    def check(value: Any) -> None:
        read(value)

    return check


def _normal(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _read_entry(key: Key, entry: Entry) -> Reading:
    def problem(message: str, hint: str) -> Reading:
        return Reading(problems=[Problem((entry.origin,), message, hint)])

    if key.section is not None:
        if entry.is_mapping:
            return key.section.read(entry.value)
        if values.is_none(entry.value) or entry.value == {}:
            return Reading()
        return problem(f"{entry.key} must contain nested keys, got {entry.value!r}", "indent its keys below it")
    if key.read is None and key.status is Status.REFUSED:
        value = entry.value.strip().lower() if isinstance(entry.value, str) else entry.value
        if value in [*key.unset, [], {}, ()]:
            return Reading()
        message = f"{entry.key} = {shown(entry.value)} is not supported: {key.because}"
        return problem(message, f"remove {entry.key}")
    if key.read is None and key.status is Status.NO_EFFECT:
        return Reading(notes=[_note(entry, key.because)])
    if key.read is None and entry.is_mapping:
        return problem(f"{entry.key} must be a single value, got nested keys", "write the value after the colon")
    if key.read is not None and entry.value is None:
        return Reading(notes=[_note(entry, "it has no value")])
    try:
        found = key.settings(entry.value)
    except (ConfigError, ValueError) as error:
        message = plain_message(error)
        advice = f"see {key.target} in `fullshard config explain`" if key.target else f"remove it: {key.because}"
        named = _normal(entry.key) in _normal(entry.origin.text)  # a flag or variable has the name of its key
        what = message if named and entry.origin.precedence > Precedence.FILE else f"{entry.key}: {message}"
        return problem(what, getattr(error, "hint", None) or advice)
    if found is None or isinstance(found, str):
        return Reading(notes=[_note(entry, found or key.because)])
    reading = Reading([Setting(path, value, entry.origin, entry.key) for path, value in found.items()])
    if found and (key.status is Status.TRANSLATED or _normal(entry.key) in map(_normal, key.spellings)):
        meaning = ", ".join(f"{path} = {shown(value)}" for path, value in found.items())
        reason = f" ({key.because})" if key.because else ""
        reading.notes.append(Note(entry.origin, entry.key, Status.TRANSLATED, f"is translated to {meaning}{reason}"))
    return reading


def _note(item: Entry | Setting, because: str) -> Note:
    return Note(item.origin, item.key, Status.NO_EFFECT, f"has no effect here: {because}")


def shown(value: Any) -> str:
    """Return a value as YAML would write it, on a single line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple() if value and all(isinstance(item, Entry) for item in value):
            return "{" + ", ".join(f"{item.key}: {shown(item.value)}" for item in value) + "}"
        case list() | tuple():
            return "[" + ", ".join(shown(item) for item in value) + "]"
        case str() if value == "" or value.strip() != value:
            return repr(value)
        case _:
            return str(value)
