"""The questionnaire of `fullshard config`, which asks about settings in a terminal and writes the answers to a file."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fullshard.config import values
from fullshard.config.hardware import Hardware, detect_hardware
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.settings import About, SettingsError
from fullshard.config.write import save_text, write_native
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path
from fullshard.core.strategy import STRATEGIES

Answers = Mapping[str, Any]
"""The answers so far, by path of the setting."""

_WHEN: dict[str, Callable[[Answers], bool]] = {
    "launch.num_machines": lambda _: True,
    "launch.num_processes": lambda _: True,
    "launch.main_process_ip": lambda given: given["launch.num_machines"] > 1,
    "launch.main_process_port": lambda given: given["launch.num_machines"] > 1,
    "launch.device": lambda _: True,
    "precision.mode": lambda _: True,
    "sharding.strategy": lambda given: given["launch.num_processes"] != 1,
    "sharding.shard_size": lambda given: STRATEGIES[given.get("sharding.strategy", "FULL_SHARD")].is_hybrid,
    "sharding.activation_checkpointing": lambda _: True,
    "sharding.wrap": lambda _: True,
    "sharding.wrap_classes": lambda given: given["sharding.wrap"] == "class",
    "sharding.wrap_min_numel": lambda given: given["sharding.wrap"] == "size",
    "checkpoint.state_dict_type": lambda given: given["launch.num_processes"] != 1,
    "training.gradient_accumulation_steps": lambda _: True,
}
"""The condition for asking about each setting, in the order of the questions."""


class Question(NamedTuple):
    """A question about the setting at `path`.

    `choices` lists the possible answers with their descriptions, and is empty if the user may enter any text. `default`
    is the suggested answer. `fault` is a function that describes what is wrong with an answer, or returns None.
    """

    path: str
    choices: dict[Any, str]
    default: Any
    fault: Callable[[Any], str | None]


def interview(hardware: Hardware, reply: Callable[[Question], Any]) -> RunConfig:
    """Ask every question that applies through `reply`, and return the resulting configuration."""
    given: dict[str, Any] = {}
    for path, when in _WHEN.items():
        if not when(given):
            continue
        default, fault = SETTINGS[path].default, functools.partial(_fault, dict(given), path)
        if hardware.accelerators:
            count = len(hardware.accelerators) * given.get("launch.num_machines", 1)
            default = {"launch.num_processes": count, "precision.mode": "bf16"}.get(path, default)
        choices = {value: words for value, words in About.of(SETTINGS[path]).answers.items() if fault(value) is None}
        given[path] = _read(path, reply(Question(path, choices, default, fault)))
    return RunConfig.of_paths(given)


def _read(path: str, answer: Any) -> Any:
    return answer if About.of(SETTINGS[path]).answers else values.coerce(path, answer)


def _fault(given: Answers, path: str, answer: Any) -> str | None:
    asked = {path.partition(".")[2] for path in (*given, path)}
    try:
        RunConfig.of_paths({**given, path: _read(path, answer)})
    except SettingsError as error:
        for found in error.faults:
            if {name.rpartition(".")[2] for name in found.settings} <= asked:  # otherwise, a later answer may fix it
                return f"{found.message}; {found.hint}" if found.hint else found.message
    except ValueError as error:
        return str(error)
    return None


def run() -> int:
    """Ask the questions, write the file, and print how to use it. Return the exit code, or raise `ConfigError`."""
    import questionary

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the questionnaire needs a terminal, but standard input or output is not a terminal",
            hint="use `fullshard config default --output FILE` to write a file that you can edit",
        )
    hardware = detect_hardware()
    print(f"This host has {len(hardware.accelerators)} GPUs of NVIDIA.", hardware.failure or "")
    print("Ctrl-C ends; nothing is written before the last question. The file lists the settings not asked here.\n")
    try:
        config = interview(hardware, _reply)
        name = questionary.text("Which file should be written?", default="fullshard.yaml", validate=_path_fault)
        path = local_path(name.unsafe_ask().strip())
        print("\nThis is what will be written, in addition to the defaults:\n")
        print(write_native(config, comments=False, only_changed=True))
        if not questionary.confirm(f"Write {path}?").unsafe_ask():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, EOFError):
        print("\nnothing was written")
        return 130  # as in a shell
    save_text(write_native(config), path, overwrite=False)
    where = f", on each of the {config.launch.num_machines} hosts" if config.launch.num_machines > 1 else ""
    print(f"\nwrote {path}\nstart{where}: fullshard launch --config_file {path} script.py")
    return 0


def _reply(question: Question) -> Any:
    import questionary

    text = About.of(SETTINGS[question.path]).ask
    if question.choices:
        choices = [questionary.Choice(words, value) for value, words in question.choices.items()]
        return questionary.select(text, choices, default=question.default).unsafe_ask()
    default = "" if question.default in (None, ()) else str(question.default)
    return questionary.text(text, default=default, validate=lambda said: question.fault(said) or True).unsafe_ask()


def _path_fault(text: str) -> bool | str:
    try:
        path = local_path(text.strip())
    except ConfigError as error:
        return str(error)
    if path.suffix not in (".yaml", ".yml"):
        return f"expected a name that ends in .yaml, got {text!r}"
    if not path.absolute().parent.is_dir():
        return f"the folder {path.parent} does not exist"
    return f"{path} already exists" if path.exists() else True
