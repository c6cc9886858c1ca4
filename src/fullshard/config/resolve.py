"""Merges the readings of all sources into one `RunConfig`. For each setting, the highest precedence wins."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fullshard.config.dialect import Note, Problem, Reading, Setting, refuse
from fullshard.config.origin import DEFAULT, Origin
from fullshard.config.schema import GROUPS, SETTINGS, RunConfig, settings_of
from fullshard.config.settings import About, Fault, SettingsError


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid configuration, the settings that any source has set, by path, and notes about the other keys."""

    config: RunConfig
    settings: dict[str, Setting]
    notes: tuple[Note, ...]

    def origin(self, path: str) -> Origin:
        """Return the origin of the value at `group.name`."""
        return self.settings[path].origin if path in self.settings else DEFAULT

    def explained(self) -> Iterator[dict[str, Any]]:
        """Yield every setting in the order of the schema, with its value, default, source, and the key as written."""
        for path, field in SETTINGS.items():
            value, setting = self.config.value(path), self.settings.get(path)
            follows = setting is None and value != field.default  # `wrap` if classes or a size are set
            yield {
                "path": path,
                "value": value,
                "default": field.default,
                "source": "follows from other settings" if follows else self.origin(path).text,
                "written_as": None if setting is None or setting.key == path.split(".")[1] else setting.key,
                "description": " ".join((field.description or "").split()),
            }


def resolve(readings: Iterable[Reading]) -> Resolved:
    """Merge readings and validate the result. Among settings with the same precedence, the last one wins.

    Raises:
        ConfigError: If a reading has problems or if settings are incompatible. The message lists all problems
            with their origins.
    """
    readings = list(readings)
    problems = [problem for reading in readings for problem in reading.problems]
    settings = _merge(setting for reading in readings for setting in reading.settings)
    mentioned = {origin for problem in problems for origin in problem.origins}
    values = {path: setting.value for path, setting in settings.items()}
    problems += [fault for fault in _faults_of_groups(settings, values) if not mentioned & set(fault.origins)]
    refuse(problems)
    try:
        config = RunConfig.of_paths(values)
    except SettingsError as error:
        refuse(_problem(fault, settings) for fault in error.faults)
        raise
    return Resolved(config, settings, tuple(note for reading in readings for note in reading.notes))


def _merge(found: Iterable[Setting]) -> dict[str, Setting]:
    by_path: dict[str, Setting] = {}
    for setting in sorted(found, key=lambda setting: setting.origin.precedence):  # stable, so the later setting wins
        by_path[setting.path] = setting
    for path, setting in list(by_path.items()):
        for name in About.of(SETTINGS[path]).overruled_by:
            other = by_path.get(f"{path.partition('.')[0]}.{name}")
            if (path, name, other and other.value) == ("sharding.wrap_classes", "wrap", "auto"):
                continue  # `auto` includes units by class, and this setting names the classes
            if other is not None and other.origin.precedence > setting.origin.precedence:
                by_path.pop(path, None)
    return by_path


def _faults_of_groups(settings: dict[str, Setting], values: dict[str, Any]) -> list[Problem]:
    problems = []
    for group, model in GROUPS.items():
        try:
            model(**settings_of(group, values))
        except SettingsError as error:
            problems += [_problem(fault, settings, f"{group}.") for fault in error.faults]
    return problems


def _problem(fault: Fault, settings: dict[str, Setting], prefix: str = "") -> Problem:
    blamed = [settings[prefix + name] for name in fault.settings if prefix + name in settings]
    message = fault.message
    for setting in blamed:
        name = setting.path.split(".")[1]
        if setting.key != name:  # the user wrote another name for it
            message += f" ({setting.key} sets {name})"
    return Problem(tuple(setting.origin for setting in blamed), message, fault.hint)
