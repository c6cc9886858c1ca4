"""The `fullshard sft` command, which fine-tunes a model in new processes or in processes that a launcher started."""

import argparse
import functools
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import typer

from fullshard.config.schema import GROUPS
from fullshard.config.settings import COUNTS
from fullshard.core.errors import ConfigError, MissingExtraError
from fullshard.core.paths import local_path

_LAUNCH = ("num_processes", "cpu", "config_file", "quantize", "max_restarts", "grace_period", "timeout")
RECIPE = "fullshard.recipes.sft"
_USAGE = """fullshard sft [-n N] [--cpu] --model_name_or_path M --dataset_name D ...
       fullshard sft RUN.yaml [--name VALUE ...]

Fine-tune a model on chats or texts: all weights, LoRA (--use_peft), or LoRA on
a quantized model (--load_in_4bit, or --quantize nf4). RUN.yaml holds the same
names, and fullshard's sections (launch, sharding, ...), or is a recipe that
`fullshard plan --write` has written. `--help-all` lists all flags. Other flags
of `fullshard launch` go with
  fullshard launch ... -m fullshard.recipes.sft --model_name_or_path ...
"""


def sft(context: typer.Context) -> None:
    """Fine-tune all weights of a model, or LoRA or QLoRA adapters. `fullshard sft --help` lists the options."""
    if not context.args or context.args[0] in ("-h", "--help", "--help-all"):
        _print_help(is_complete=context.args[:1] == ["--help-all"])
        raise typer.Exit(0 if context.args else 2)
    if find_spec("trl") is None:
        raise MissingExtraError("trl", extra="sft", purpose="fullshard sft")
    from fullshard.launch.scratch import scratch_directory

    with scratch_directory("fullshard-sft-") as directory:
        launch_words, words = split_words(context.args, directory)
        if "RANK" in os.environ:
            if launch_words:
                raise ConfigError(
                    f"{launch_words[0]} has no effect because a launcher has already started the processes"
                )
            from fullshard.recipes.sft import main

            main(words)
            return
        from fullshard.cli.main import app

        app(["launch", *launch_words, "-m", RECIPE, *words])


def _print_help(*, is_complete: bool) -> None:
    """Print the most used flags in groups and, if `is_complete`, all others below them."""
    from fullshard.recipes.sft_arguments import FLAGS, make_parser

    parser = make_parser()
    parser.usage = _USAGE
    parser.formatter_class = functools.partial(argparse.HelpFormatter, width=80, max_help_position=32)
    others, known = parser._optionals, parser._option_string_actions
    for title, texts in FLAGS["help"].items():
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            action = known.get(f"--{name}") or parser.add_argument(f"--{name}")
            others._group_actions.remove(action)
            group._group_actions.append(action)
            action.help = text if action.default in (None, False, "none") else f"{text} Default: {action.default}."
    for action in parser._actions:
        action.nargs, action.option_strings = 0, action.option_strings[:1]
    parser._action_groups = parser._action_groups[2:] + [others] * is_complete
    parser.print_help()


def split_words(args: Sequence[str], directory: Path) -> tuple[list[str], list[str]]:
    """Split arguments into the launcher's flags, with a copy of a file's sections in `directory`, and the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _LAUNCH:
        names = [f"--{name}", f"--{name.replace('_', '-')}", *(["-n"] if name == "num_processes" else [])]
        parser.add_argument(*dict.fromkeys(names), dest=name, action="store_true" if name == "cpu" else "store")
    try:
        found, words = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if other := next((word for word in words if word.partition("=")[0].strip("-").replace("-", "_") in COUNTS), None):
        raise ConfigError(f"fullshard sft has no option {other}", hint=f"use --{COUNTS[0]}")
    taken = [(f"--{name}", value) for name, value in vars(found).items() if value]
    flags = [word for flag, value in taken for word in ((flag,) if value is True else (flag, value))]
    if words and not words[0].startswith("-"):
        flags += _sections(local_path(words[0]), directory, flags)
    return flags, words


def _sections(path: Path, directory: Path, launch_words: Sequence[str]) -> list[str]:
    """Copy the launcher's sections of a configuration file to a file in `directory`. Return the flag that names it."""
    from ruamel.yaml import YAML

    from fullshard.config.document import read_document
    from fullshard.config.load import NATIVE
    from fullshard.config.resolve import resolve

    entries = [entry for entry in read_document(path) if entry.key in GROUPS]
    if not entries:
        return []
    resolve([NATIVE.read(entries)])  # so that errors name this file
    if "--config_file" in launch_words:
        raise ConfigError(
            f"{path} contains the section {entries[0].key}, but --config_file sets a different configuration file"
        )
    with (directory / path.name).open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump({entry.key: entry.plain for entry in entries}, file)
    return ["--config_file", str(directory / path.name)]
