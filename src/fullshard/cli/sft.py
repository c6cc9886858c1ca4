"""`fullshard sft`: fine-tune a model; starts the processes, or takes part in a run that a launcher started."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from fullshard.config.schema import GROUPS
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path

_LAUNCH = {
    "--num_processes": 2,
    "-n": 2,
    "--config_file": 2,
    "--check_plan": 1,
    "--max_restarts": 2,
    "--grace_period": 2,
    "--timeout": 2,
}
"""The launcher's flags, and how many words each takes; those of one word may be followed by true or false."""
_SAYS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_RECIPE = "fullshard.recipes.sft"
_HELP = """Usage: fullshard sft [-n N] [--config_file FILE]
                     --model_name_or_path M --dataset_name D ...
       fullshard sft RUN.yaml

Fine-tune a model on chats or texts: all weights, LoRA (--use_peft), or LoRA on
a quantised model (--load_in_4bit). The flags are TRL's; those of PEFT's
examples/sft/train.py are translated; docs/sft.md lists what is particular.
RUN.yaml holds the same names, and fullshard's sections (launch, sharding, ...)
beside them. --num_processes (-n), --config_file, --check_plan, --max_restarts,
--grace_period and --timeout are those of `fullshard launch`; its other flags
go with
  fullshard launch ... -m fullshard.recipes.sft --model_name_or_path ...
"""


def sft(context: typer.Context) -> None:
    """Fine-tune a model: all weights, LoRA or QLoRA. `fullshard sft --help` says how."""
    words = list(context.args)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_HELP + _help_of_flags())
        raise typer.Exit(0 if words else 2)
    from fullshard.launch.scratch import scratch_directory

    launch_words = _take_launch_flags(words)
    with scratch_directory("fullshard-sft-") as directory:
        if len(words) == 1 and not words[0].startswith("-"):
            words = _split_file(local_path(words[0]), directory, launch_words)
        if "RANK" in os.environ:
            if launch_words:
                raise ConfigError(f"{launch_words[0]} has no effect here: a launcher has started the processes already")
            from fullshard.recipes.sft import main

            main(words)
            return
        from fullshard.cli.main import app

        app(["launch", *launch_words, "-m", _RECIPE, *words])


def _help_of_flags() -> str:
    """Return the help on our own flags, and the names of TRL's."""
    from fullshard.recipes.sft_arguments import OwnArguments, make_parser

    own = {field.name: str(field.metadata["help"]) for field in fields(OwnArguments)}
    theirs = " ".join(f"--{action.dest}" for action in make_parser()._actions if action.dest not in (*own, "help"))
    layout: dict[str, Any] = {"width": 80, "break_on_hyphens": False}
    lines = [textwrap.fill(f"  --{name:<24}{text}", subsequent_indent=" " * 28, **layout) for name, text in own.items()]
    page = textwrap.fill(theirs, initial_indent="  ", subsequent_indent="  ", **layout)
    return "\n".join(["", "Flags:", *lines, "", "Of TRL's SFTConfig, ModelConfig and ScriptArguments:", page, ""])


def completions(words: Sequence[str]) -> dict[str, str]:
    """Return possible next words; see `RawCommand`."""
    if words and not words[0].startswith("-"):  # a file, which holds everything
        return {}
    from fullshard.recipes.sft_arguments import RENAMED, OwnArguments  # TRL's own would take seconds to import

    own = {f"--{field.name}": str(field.metadata["help"]) for field in fields(OwnArguments)}
    theirs = ("model_name_or_path", "dataset_name", "output_dir", *RENAMED.values())
    return dict.fromkeys([*_LAUNCH, *(f"--{name}" for name in theirs)], "") | own


def _take_launch_flags(words: list[str]) -> list[str]:
    """Remove the launcher's flags from `words`, and return them."""
    taken: list[str] = []
    for position in reversed(range(len(words))):
        name, sign, value = words[position].partition("=")
        if name.startswith("--"):
            name = name.replace("-", "_").replace("__", "--", 1)
        if name not in _LAUNCH:
            continue
        count = 1 if sign else _LAUNCH[name]
        flag = words[position : position + count]
        if _LAUNCH[name] == 1:
            is_on = _SAYS.get((value if sign else "".join(words[position + 1 : position + 2])).lower())
            if sign and is_on is None:
                raise ConfigError(f"{name} = {value!r}", hint="use true or false")
            count = 1 if sign or is_on is None else 2
            flag = [] if is_on is False else [name]
        taken = [*flag, *taken]
        del words[position : position + count]
    return taken


def _split_file(path: Path, directory: Path, launch_words: list[str]) -> list[str]:
    """Split a file for both into one for the launcher and one for the recipe."""
    from ruamel.yaml import YAML

    from fullshard.config.document import read_document
    from fullshard.config.load import NATIVE
    from fullshard.config.resolve import resolve

    entries = read_document(path)
    resolve([NATIVE.read(entry for entry in entries if entry.key in GROUPS)])  # errors name this file, not its parts
    values = {entry.key: entry.plain for entry in entries}
    shared = {name: values.pop(name) for name in list(values) if name in GROUPS}
    yaml = YAML(typ="safe")
    if shared:
        if any(word.startswith(("--config_file", "--config-file")) for word in launch_words):
            raise ConfigError(f"{path} has the sections {', '.join(shared)}, and --config_file names another file")
        with (directory / path.name).open("w", encoding="utf-8") as file:
            yaml.dump(shared, file)
        launch_words += ["--config_file", str(directory / path.name)]
    recipe = directory / "sft.yaml"
    with recipe.open("w", encoding="utf-8") as file:
        yaml.dump(values, file)
    return [str(recipe)]
