"""Writes a `RunConfig` as YAML with an explanation of every setting, and the JSON schema of this YAML."""

import textwrap
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from fullshard.config.schema import GROUPS, RunConfig
from fullshard.config.settings import words_of
from fullshard.core.errors import ConfigError
from fullshard.core.files import write_text
from fullshard.core.strategy import STRATEGIES

WIDTH = 110
"""The width of a comment line in characters."""


def write_native(config: RunConfig, *, comments: bool = True, only_changed: bool = False) -> str:
    """Return the configuration as YAML that `load_file` reads back, on request with comments or only what changed."""
    lines = []
    if comments:
        lines += [
            "# A configuration of fullshard. Use it: fullshard launch --config_file THIS_FILE script.py",
            "# Show the resulting values and their sources: fullshard config explain THIS_FILE",
        ]
        if not only_changed:
            lines.append("# A setting after a `#` has its default; remove the `#` to change it.")
    for group, model in GROUPS.items():
        body = [
            line
            for name, field in model.model_fields.items()
            for line in _lines(name, field, config.value(f"{group}.{name}"), comments, only_changed)
        ]
        if body:
            head = _comment(RunConfig.model_fields[group].description, "") if comments else ()
            lines += ["", *head, f"{group}:", *body]
    if not any(line and not line.startswith("#") for line in lines):
        lines += ["", "launch: # every setting has its default"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _lines(name: str, field: FieldInfo, value: Any, comments: bool, only_changed: bool) -> list[str]:
    is_default = value == field.default
    if is_default and only_changed:
        return []
    setting = f"{name}: {scalar(value)}"
    words = f" One of: {', '.join(words)}." if len(words := words_of(field)) > 1 else ""
    head = _comment(f"{field.description}{words}", "  ") if comments else ()
    return [*head, f"  # {setting}" if is_default else f"  {setting}"]


def _comment(text: str | None, indent: str) -> list[str]:
    # Two `#` distinguish an explanation from a setting that is commented out.
    prefix = f"{indent}## "
    words = " ".join((text or "").split()).replace("None:", "null:")  # as in YAML
    return textwrap.wrap(words, WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def scalar(value: Any) -> str:
    """Return a value as one line of YAML. Quote text that a reader could mistake for another type."""
    from ruamel.yaml import YAML

    if isinstance(value, tuple | list):
        return f"[{', '.join(scalar(item) for item in value)}]"
    yaml = YAML(typ="safe", pure=True)
    yaml.width = 2**31  # one line, however long
    if isinstance(value, str) and (not (value.isascii() and value.isidentifier()) or value.lower() in _YAML_WORDS):
        yaml.default_style = '"'  # type: ignore[assignment]
    text = StringIO()
    yaml.dump(value, text)
    return text.getvalue().removesuffix("...\n").strip() if value is not None else "null"


_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}
"""Words that YAML 1.1, which most editors and tools use, does not read as strings."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of fullshard's YAML. The reader also accepts some spellings that the schema does not."""
    schema: dict[str, Any] = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "fullshard configuration"
    sharding = schema["$defs"]["ShardingConfig"]["properties"]
    names = [*STRATEGIES, *(row.code for row in STRATEGIES.values() if row.code)]
    sharding["strategy"] = {**sharding["strategy"], "enum": names}
    del sharding["strategy"]["type"]
    sharding["wrap_classes"] = {
        **{key: value for key, value in sharding["wrap_classes"].items() if key not in ("type", "items")},
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    for group, model in GROUPS.items():  # a section whose lines are all comments is null
        schema["properties"][group] = {
            "description": RunConfig.model_fields[group].description,
            "anyOf": [{"$ref": f"#/$defs/{model.__name__}"}, {"type": "null"}],
        }
    return schema


def save_text(text: str, path: Path, *, overwrite: bool) -> None:
    """Write a new file. Raise a `ConfigError` if it exists and `overwrite` is false, or if it cannot be written."""
    try:
        if not overwrite:
            path.touch(exist_ok=False)  # one of two simultaneous writers gets an error
        try:
            write_text(path, text)
        except BaseException:
            if not overwrite:
                path.unlink()
            raise
    except FileExistsError:
        raise ConfigError(f"{path} already exists", hint="choose another file, or pass --overwrite") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="choose another file") from None
