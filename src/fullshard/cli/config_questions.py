"""The questions of `fullshard.config.questions` in a terminal; the answers go to a file."""

from __future__ import annotations

import sys
from typing import Any

from fullshard.config.hardware import detect_hardware
from fullshard.config.questions import BACK, Interview, Question, hardware_words
from fullshard.config.schema import RunConfig
from fullshard.config.write import save_text, write_native
from fullshard.config.write_accelerate import write_accelerate
from fullshard.core.errors import ConfigError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""

_BACK_WORD = "back"


def run() -> int:
    """Ask, write and say how to go on; return the exit code.

    Raises:
        ConfigError: this is no terminal, or the file cannot be written.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the questionnaire needs a terminal, and standard input or output is none",
            hint="`fullshard config default --output FILE` writes a file to edit",
        )
    hardware = detect_hardware()
    interview = Interview(hardware)
    print(f"This host has {hardware_words(hardware)}.")
    if hardware.failure:
        print(f"Accelerators could not be counted: {hardware.failure}")
    print("The recommended answer comes first. Ctrl-C ends; nothing is written before the last question.\n")
    try:
        while not _is_done(interview):
            pass
    except (KeyboardInterrupt, EOFError):
        print("\nnothing was written")
        return INTERRUPTED
    _write(interview)
    return 0


def _is_done(interview: Interview) -> bool:
    """Ask one question; return whether it was the last and everything is confirmed."""
    question = interview.next()
    answer = _ask(interview, question) if question is not None else _confirm(interview)
    if answer is BACK:
        interview.back()
    elif question is not None:
        interview.answer(question, answer)
    return question is None and answer is not BACK


def _ask(interview: Interview, question: Question) -> Any:
    import questionary

    is_first = not interview.answers.given
    if question.choices is not None:
        choices = [questionary.Choice(choice.title, choice.value) for choice in question.choices(interview.answers)]
        back = [] if is_first else [questionary.Choice("(back)", BACK)]
        return questionary.select(question.text, [*choices, *back]).unsafe_ask()

    def fault(text: str) -> bool | str:
        if text.strip().lower() == _BACK_WORD:
            return True
        return interview.fault(question, text) or True

    text = questionary.text(
        question.text,
        default=question.default(interview.answers),
        validate=fault,
        instruction=f"({_BACK_WORD}: the question before) ",
    ).unsafe_ask()
    return BACK if text.strip().lower() == _BACK_WORD else text


def _confirm(interview: Interview) -> Any:
    import questionary

    print("\nThis is what will be written, besides the defaults:\n")
    print(write_native(interview.config(), comments=False, only_changed=True))
    choices = [questionary.Choice(f"yes: write {interview.answers['path']}", True), questionary.Choice("(back)", BACK)]
    return questionary.select("Is it right?", choices).unsafe_ask()


def _write(interview: Interview) -> None:
    config, path = interview.config(), interview.answers["path"]
    if interview.answers["form"] == "accelerate":
        text, remarks = write_accelerate(config)
    else:
        text, remarks = write_native(config), []
    save_text(text, path, overwrite=bool(interview.answers["overwrite"]))
    print(f"\nwrote {path}")
    for remark in remarks:
        print(f"note: {remark}")
    print(f"start{_where(config)}: fullshard launch --config_file {path} script.py")


def _where(config: RunConfig) -> str:
    return "" if config.launch.num_machines == 1 else f", on each of the {config.launch.num_machines} hosts"
