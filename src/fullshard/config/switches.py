"""A table of fullshard's own environment variables. The table in the documentation is generated from these rows.

Users can set the first variables, for example to turn off an optimization. The launcher sets the others for its
workers. A variable with fullshard's prefix that is not in the table is an error.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fullshard.core.errors import ConfigError

PREFIX = "FULLSHARD_"


@dataclass(frozen=True, slots=True)
class Switch:
    """An environment variable, what it controls, and the effect of each value, of which the first is the default."""

    name: str
    about: str
    values: Mapping[str, str] = field(default_factory=dict)
    form: str = "any text"
    takes: Callable[[str], object] = bool

    def read(self, environ: Mapping[str, str] | None = None) -> str:
        """Return the variable's value in `environ` (or `os.environ`). If it is unset or empty, return the default."""
        value = (os.environ if environ is None else environ).get(self.name, "").strip()
        if self.is_wrong(value):
            raise ConfigError(f"${self.name} has the invalid value {value!r}", hint=self.hint)
        return value or next(iter(self.values), "")

    def is_wrong(self, value: str) -> bool:
        """Return whether a value is invalid. An empty value counts as unset and is valid."""
        return bool(value) and not (value in self.values if self.values else self.takes(value))

    @property
    def hint(self) -> str:
        """Return a hint for an invalid value."""
        return f"use {' or '.join(self.values) or self.form}, or unset it"


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < _MOST_SECONDS
    except ValueError:
        return False


def _is_span(text: str) -> bool:
    found = re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", text, re.ASCII)
    return found is not None and int(found[1]) <= int(found[2])


def _is_count(text: str) -> object:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII)


_MOST_SECONDS = 10**9


COMM = Switch(
    "FULLSHARD_COMM",
    "the transport between ranks on CPUs",
    {"auto": "the fastest that all ranks support", "gloo": "torch's Gloo, without shared memory"},
)
OFFLOAD = Switch(
    "FULLSHARD_OFFLOAD",
    "copies between host and device",
    {
        "overlap": "in parallel with computation",
        "in-turn": "sequentially, without streams",
        "rehearse": "also on a CPU, to separate memory, to test the copies",
    },
)
TIMEOUT = Switch(
    "FULLSHARD_TIMEOUT",
    "how long a rank waits for another if the script does not set a time",
    form="a number of seconds",
    takes=_is_time,
)
TAKE = Switch(
    "FULLSHARD_TAKE",
    "which names of torch a program gets from fullshard, under `fullshard launch` or `python -m fullshard.take`",
    {"none": "no names", "fully_shard": "`fully_shard`, `FSDPModule` and the names around them"},
)
TOKEN = Switch("FULLSHARD_TOKEN", "the secret shared by the launchers of a job on several hosts")
CONFIG = Switch("FULLSHARD_CONFIG", "the file with the resolved configuration")
LAUNCHER_PID = Switch(
    "FULLSHARD_LAUNCHER_PID",
    "the launcher's process ID; workers end when it ends",
    form="a process ID",
    takes=_is_count,
)
PREEMPTION_DIR = Switch(
    "FULLSHARD_PREEMPTION_DIR", "the directory where ranks report how they handle signals, and their progress"
)
ELASTIC = Switch(
    "FULLSHARD_ELASTIC", "the minimum and maximum number of ranks of an elastic job", form="MIN:MAX", takes=_is_span
)
COPIES_DIR = Switch("FULLSHARD_COPIES_DIR", "the directory where ranks may keep copies of their state in host memory")
MAX_LOST_STEPS = Switch(
    "FULLSHARD_MAX_LOST_STEPS",
    "the maximum number of steps that a kill may lose, for `MemoryCopies` in a script",
    form="a number of steps",
    takes=_is_count,
)
HANDED_OVER = (
    Switch("FULLSHARD_CHECK_PLAN", "whether a step is compared with its plan", form="1", takes="1".__eq__),
    CONFIG,
    COPIES_DIR,
    ELASTIC,
    MAX_LOST_STEPS,
    LAUNCHER_PID,
    PREEMPTION_DIR,
    Switch(
        "FULLSHARD_STEP_IN_BACKWARD", "whether the script's optimizer steps in backward", form="1", takes="1".__eq__
    ),
    Switch("FULLSHARD_TRAINER_HOOK", "the function that gives a script fullshard's Trainer"),
)
SWITCHES = {switch.name: switch for switch in (COMM, OFFLOAD, TAKE, TIMEOUT, TOKEN, *HANDED_OVER)}
"""All variables by name. Those that the launcher sets come last."""


def timeout_of_environment() -> float | None:
    """Return the number of seconds in the variable `FULLSHARD_TIMEOUT`, or None if it is not set."""
    text = TIMEOUT.read()
    return float(text) if text else None


def elastic_ranks() -> tuple[int, int] | None:
    """Return the minimum and maximum number of ranks of the job, or None if the number is fixed."""
    least, _, most = ELASTIC.read().partition(":")
    return (int(least), int(most)) if most else None


def faults(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield `(name, message, hint)` for each unknown variable with fullshard's prefix and for each invalid value."""
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        value = environ[name].strip()
        if name not in SWITCHES:
            close = difflib.get_close_matches(name, SWITCHES, n=1, cutoff=0.85)
            hint = f"did you mean {close[0]}?" if close else f"unset it; the known variables are {', '.join(SWITCHES)}"
            yield name, f"unknown variable {name} = {value!r}", hint
        elif SWITCHES[name].is_wrong(value):
            yield name, f"{name} has the invalid value {value!r}", SWITCHES[name].hint


def check_switches() -> None:
    """Raise `ConfigError` if an environment variable with fullshard's prefix is unknown or has an invalid value."""
    for _, message, hint in faults(os.environ):
        raise ConfigError(message, hint=hint)
