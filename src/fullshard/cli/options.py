"""Helpers for commands: parsers, options generated from pydantic models, and commands that do not parse their flags."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

if TYPE_CHECKING:
    from pydantic import BaseModel


_MOST_CHOICES = 60
"""The width of choices that fit next to a flag in 80 columns. Otherwise, the flag's help lists them."""


def path_word(text: str) -> Path:
    """Parse a path. This is the `parser` of every argument and option that takes a path."""
    path: Path = word(local_path, text)
    return path


def word(read: Callable[[str], Any], text: str) -> Any:
    """Parse a command-line value with `read`, and report an invalid value as a usage error."""
    try:
        return read(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def file_word(text: str) -> Path:
    """Parse the path of an output file, and check that it is writable before a long run starts."""
    path = path_word(text)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; specify a file in the folder")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist; create it or choose another folder")
    if not (os.access(path.parent, os.W_OK) or (path.exists() and os.access(path, os.W_OK))):
        raise typer.BadParameter(
            f"{path} cannot be written because {path.parent} is not writable; choose another folder"
        )
    return path


def _device_words(incomplete: str) -> list[str]:
    from fullshard.plan.hardware import DEVICES

    count = incomplete.partition("x")[0]
    return ["free", *(f"{count}x{name}" if count.isdecimal() else name for name in DEVICES)]


DeviceName = functools.partial(typer.Option, autocompletion=_device_words)
ModelName = functools.partial(
    typer.Option, autocompletion=lambda: importlib.import_module("fullshard.plan.known_models").MODELS
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
Output = Annotated[Path, typer.Argument(help="Directory to create. It appears when it is complete.", parser=path_word)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Dtype = Annotated[str | None, typer.Option(help="Dtype of stored floating-point weights: float32, bfloat16, float16.")]
MaxShardSize = Annotated[str, typer.Option(help="Bytes of tensors per file, such as 5GB (10**9) or 5GiB (2**30).")]


def check_words(words: Iterable[str]) -> None:
    """Raise `ConfigError` for arguments that are not valid UTF-8, because settings are written in UTF-8."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {word!r} is not valid UTF-8", hint="rename the file") from None


def given_settings(context: typer.Context, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user wrote, without those that have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in settings}
    return {n: v for n, v in settings.items() if (source := sources[n]) is not None and source.name != "DEFAULT"}


class RawCommand(TyperCommand):
    """A command that does not parse its arguments, because its flags include those of other launchers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store all arguments in `ctx.args` without parsing them."""
        ctx.args = list(args)
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of a word of `fullshard launch`, as objects that Typer prints."""
        from fullshard.config.flags import completions

        words = completions(ctx.args, incomplete) if self.name == "launch" else ()
        return [SimpleNamespace(value=word, type="plain", help=None) for word in words]


class ScriptCommand(TyperCommand):
    """A command whose own options end where the script or `--` begins."""

    allow_interspersed_args = False


class TrainCommand(TyperCommand):
    """The `fullshard train` command. If the user passes a removed option, it names the replacement."""

    _anew = "use another --output-dir or remove its checkpoints to start over"
    _hints: ClassVar = {
        "--resume": f"the run resumes from its newest checkpoint automatically; {_anew}",
        "--overwrite": _anew,
        **dict.fromkeys(("--num-processes", "--nproc-per-node", "--gpus", "--num-gpus"), "use --nproc"),
        "--epochs": "use --steps, the number of optimizer steps",
        "--learning-rate": "use --lr",
        "--async-save": "use Accelerator in your own script, which can save while it trains",
        "--tensorboard": "use --log-with tensorboard",
        "--prompt": "the sample continues the data; to continue a prompt, load the model that --export wrote",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise `ConfigError` with a hint if they contain a removed option."""
        for flag in (word.partition("=")[0].replace("_", "-") for word in args):
            if flag in self._hints:
                raise ConfigError(f"fullshard train has no option {flag}", hint=self._hints[flag])
        return super().parse_args(ctx, args)


def options_from(model: type[BaseModel], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a `--some-name` option to a command for each field `some_name`, or only for the fields in `names`.

    Boolean fields also get a `--no-some-name` option. The decorated function takes its own options by name and the
    values of the model's fields as the dictionary `settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        fields = [_option(name, model.model_fields[name]) for name in names or model.model_fields]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**{p.name: values.pop(p.name) for p in own}, settings=values)

        parameters = [*own, *fields]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _option(name: str, field: Any) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if field.annotation in (bool, bool | None):
        flag += "/--no-" + name.replace("_", "-")
    read = [check.func for check in field.metadata if hasattr(check, "func")]  # the field's own reader
    parser = path_word if field.annotation is Path else functools.partial(word, read[0]) if read else None
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    metavar = "<name>" if len("|".join(choices)) > _MOST_CHOICES else None
    option = typer.Option(flag, help=f"{field.description}.", parser=parser, metavar=metavar)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[field.annotation, option]
    )
