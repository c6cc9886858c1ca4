"""Classes for the settings of a command that include settings of a run, whose definitions come from the schema.

    class Job(View):
        seq_len: int = Field(2048, ge=1, description="Tokens per sequence")
        shard_size: int | None = of_run("sharding.shard_size")

Bounds, defaults, and descriptions come from the schema, which also checks that the settings are compatible.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fullshard.config.dialect import Key, Read, Reading, Setting
from fullshard.config.origin import Origin
from fullshard.config.resolve import resolve
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.settings import plain_message, suggestion
from fullshard.core.errors import ConfigError, FullshardError
from fullshard.core.strategy import parse_strategy


def of_run(path: str, default: Any = ..., help: str = "", read: Read | None = None) -> Any:
    """Return a field for a run's setting, with its own `default` and `help` if given. `read` converts its value."""
    setting = SETTINGS[path]
    bounds = {
        name: getattr(rule, name) for rule in setting.metadata for name in ("gt", "ge", "le") if hasattr(rule, name)
    }
    words = " ".join((setting.description or "").replace("`", "").split()).replace("None:", "Default:").rstrip(".")
    field = Field(default=setting.default if default is ... else default, description=help or words, **bounds)
    field.metadata.append(Key("", target=path, read=read))
    return field


class View(BaseModel):
    """The frozen settings of a command. Build them with `of`, which raises a `ConfigError` if they are invalid."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")
    subject: ClassVar[str]
    """The subject of the settings, for messages."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from values by field name. Raise a `ConfigError` that lists all problems with them."""
        for name in values:
            if name not in cls.model_fields:
                raise ConfigError(f"{cls.subject} has no setting {name!r}", hint=suggestion(name, cls.model_fields))
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            problems = error.errors()
            raised = [item.get("ctx", {}).get("error") for item in problems]
            hints = dict.fromkeys(one.hint for one in raised if isinstance(one, FullshardError) and one.hint)
            raise ConfigError("; ".join(map(cls._problem, problems)), hint=" or ".join(hints) or None) from None

    @classmethod
    def _problem(cls, item: Any) -> str:
        name = ".".join(cls.spelled(str(part)) for part in item["loc"])
        if raised := item.get("ctx", {}).get("error"):  # an error of fullshard, which includes the value
            text = plain_message(raised)
            return f"{name}: {text}" if name else text
        return f"{name}: {item['msg']} (got {item['input']!r})"

    @classmethod
    def spelled(cls, name: str) -> str:
        """Return the name of a field as users write it, for error messages."""
        return name

    @classmethod
    def of_the_run(cls) -> dict[str, Key]:
        """Return the fields that are settings of a run, by name, with the rows that describe what they set."""
        return {name: row for name, field in cls.model_fields.items() for row in field.metadata if isinstance(row, Key)}

    def run_config(self, **changed: Any) -> RunConfig:
        """Return the run's configuration, with the fields in `changed` replaced. Errors begin with a field's name."""
        return resolve([Reading(settings=list(self.run_settings(**changed)))]).config

    def run_settings(self, **changed: Any) -> Iterator[Setting]:
        """Yield the settings of the run that the fields set, after replacing the fields in `changed`."""
        for name, row in self.of_the_run().items():
            value = changed.get(name, getattr(self, name))
            found = {row.target: value} if row.read is None else row.read(value)
            assert isinstance(found, Mapping)  # noqa: S101 - the rows of views have no other readers
            origin = Origin.argument(self.spelled(name))
            yield from (Setting(path, one, origin, name) for path, one in found.items())

    @field_validator("strategy", mode="before", check_fields=False)
    @classmethod
    def _known_strategy(cls, value: Any) -> str:
        return parse_strategy(value).name

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise a `ConfigError` if the fields are incompatible."""
        self.run_config()
