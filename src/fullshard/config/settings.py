"""The base class of settings groups, which are frozen and validated. Their errors name the setting and a remedy."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fullshard.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class About:
    """Additional facts about a setting, which are not in its description."""

    ask: str = ""  # the question in the questionnaire; empty if the questionnaire does not ask about the setting
    answers: Mapping[Any, str] = dataclasses.field(default_factory=dict)  # by value; empty for text or a number
    # Other settings of the group that express the same choice. If a source of higher precedence sets one of them, this
    # setting is ignored.
    overruled_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, setting: FieldInfo) -> Self:
        """Return the `About` facts that are attached to a setting."""
        return next((found for found in setting.metadata if isinstance(found, cls)), cls())


def setting(
    default: Any,
    *,
    ask: str = "",
    answers: Mapping[Any, str] | None = None,
    overruled_by: tuple[str, ...] = (),
    **bounds: Any,
) -> Any:
    """Return a field of `Settings` with these facts (see `About`). `bounds` are passed to pydantic's `Field`."""
    field = Field(default=default, **bounds)
    field.metadata.append(About(ask, answers or {}, overruled_by))
    return field


ANY_CASE = BeforeValidator(lambda value: value.strip().upper() if isinstance(value, str) else value)
"""Lets users write an upper-case word in any case."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An invalid setting or combination: the settings to blame (likeliest first), a message, and one fix."""

    settings: tuple[str, ...]
    message: str
    hint: str | None = None


class SettingsError(ConfigError):
    """Raised if settings of a group are invalid. `faults` lists every fault that was found."""

    def __init__(self, group: str, faults: Sequence[Fault]) -> None:
        hints = list(dict.fromkeys(fault.hint for fault in faults if fault.hint))
        super().__init__(f"{group}: {'; '.join(fault.message for fault in faults)}", hint="; ".join(hints) or None)
        self.group, self.faults = group, tuple(faults)

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[Fault, ...]]]:
        return type(self), (self.group, self.faults)


class CombinationError(ConfigError):
    """Raised if individually valid settings are incompatible. `settings` names them, the most likely culprit first."""

    def __init__(self, message: str, *settings: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.settings = settings


def plain_message(error: BaseException) -> str:
    """Return the message of an error without its hint."""
    return str(error).split("\nhint: ")[0]


class Settings(BaseModel):
    """A frozen group of settings. Its constructor raises `SettingsError` if a setting is invalid."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # infinity would become null, which has another meaning
        use_attribute_docstrings=True,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(type(self).__name__, [self._fault(item) for item in error.errors()]) from None

    @classmethod
    def of(cls, value: Mapping[str, Any] | Self | None) -> Self:
        """Build settings from a mapping, or the defaults from None. Return existing settings unchanged."""
        if isinstance(value, cls):
            return value
        if value is not None and not isinstance(value, Mapping):
            what = f"{cls.__name__} cannot be built from a {type(value).__name__}"
            raise ConfigError(what, hint="pass a dict of settings")
        return cls(**(value or {}))

    @classmethod
    def _fault(cls, item: Any) -> Fault:
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            return Fault((where,), f"unknown setting {where!r}", suggestion(where, cls.model_fields))
        if item["type"] == "value_error":
            cause = item["ctx"]["error"]
            names = getattr(cause, "settings", ()) or ((where,) if where else ())
            return Fault(names, plain_message(cause), getattr(cause, "hint", None))
        first = str(item["loc"][0])
        message = f"setting {where!r}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"
        return Fault((first,), message, cls._advice(first, item["input"]))

    @classmethod
    def _advice(cls, name: str, value: object) -> str:
        """Return a hint for a wrong value: the allowed choice that it resembles, or else the setting's description."""
        field = cls.model_fields[name]
        close = closest("cuda" if value == "gpu" else str(value), words_of(field))
        return f"did you mean {close}?" if close else f"{name}: {(field.description or '').split('. ')[0].rstrip('.')}"


def words_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a setting accepts, or an empty tuple if it is not limited to certain words."""
    kinds = (field.annotation, *get_args(field.annotation))
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


COUNTS = ("num_processes", "nproc", "nproc_per_node", "gpus", "num_gpus", "n_gpus", "ngpus", "nprocs")  # of processes


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the most similar known name, or None if no similarity (0 to 1) is at least `cutoff`."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the known name that it resembles, or else the list of known names."""
    names = list(known)
    close = closest(name, names, 0.6)
    return f"did you mean {close!r}?" if close else f"use one of {', '.join(names)}"
