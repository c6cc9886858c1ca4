"""The environment variables that are fullshard's own: one row each, from which the documentation's table is made.

Users set the first ones, to turn off what is done for speed or memory. The launcher sets the others for its workers. A
variable that begins like these and is in no row is an error.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fullshard.core.errors import ConfigError

PREFIX = "FULLSHARD_"


@dataclass(frozen=True, slots=True)
class Switch:
    """One variable.

    Attributes:
        name: the variable.
        about: what it is about.
        values: what each value does; the first one is what happens without the variable. Empty: anything of `form`.
        form: see there.
    """

    name: str
    about: str
    values: Mapping[str, str] = field(default_factory=dict)
    form: str = "any text"

    def read(self, environ: Mapping[str, str] | None = None) -> str:
        """Its value, in `os.environ` unless `environ` is given; the first of `values` if it is not set, or empty.

        Raises:
            ConfigError: it is none of `values`.
        """
        value = (os.environ if environ is None else environ).get(self.name, "").strip()
        if value and self.values and value not in self.values:
            raise ConfigError(f"${self.name} = {value!r}", hint=self.hint)
        return value or next(iter(self.values), "")

    @property
    def hint(self) -> str:
        """What to do about another value."""
        return f"use {' or '.join(self.values)}, or leave it out"


COMM = Switch(
    "FULLSHARD_COMM",
    "what ranks on CPUs send through",
    {"auto": "the fastest that all of them can have", "gloo": "torch's Gloo, without shared memory"},
)
GRADIENTS = Switch(
    "FULLSHARD_GRADIENTS",
    "gradients of large layers, tied weights and embeddings",
    {"uses": "made where they are reduced", "whole": "left to autograd, which makes each in memory of its own"},
)
HEAP = Switch(
    "FULLSHARD_HEAP",
    "free pages of the heap, on CPUs",
    {"trim": "given back to the system in the course of a step", "keep": "left to the allocator"},
)
OFFLOAD = Switch(
    "FULLSHARD_OFFLOAD",
    "copies between host and device",
    {
        "overlap": "beside what is computed",
        "in-turn": "one after the other, without streams",
        "rehearse": "also on a CPU, to further memory, to see what is moved",
    },
)
OPTIMIZER = Switch(
    "FULLSHARD_OPTIMIZER",
    "what torch's element-wise optimizers update",
    {"segments": "neighbouring slices as one tensor", "slices": "each parameter's slice by itself"},
)
TIMEOUT = Switch(
    "FULLSHARD_TIMEOUT", "how long a rank waits for another, where the script does not say", form="a number of seconds"
)
TOKEN = Switch("FULLSHARD_TOKEN", "what the launchers of a job on several hosts must all know")
CONFIG = Switch("FULLSHARD_CONFIG", "file with the resolved configuration")
PREEMPTION_DIR = Switch(
    "FULLSHARD_PREEMPTION_DIR", "where ranks say that they listen to signals, stop because of one, and where they are"
)
ELASTIC = Switch("FULLSHARD_ELASTIC", "fewest and most ranks of a job whose hosts may come and go", form="MIN:MAX")
COPIES_DIR = Switch("FULLSHARD_COPIES_DIR", "where ranks may keep copies of their state in host memory")
MAX_LOST_STEPS = Switch("FULLSHARD_MAX_LOST_STEPS", "how many steps a kill may undo, for a script's `MemoryCopies`")
HANDED_OVER = (
    Switch("FULLSHARD_CHECK_PLAN", "the step that is compared with its plan"),
    CONFIG,
    COPIES_DIR,
    ELASTIC,
    MAX_LOST_STEPS,
    Switch("FULLSHARD_LAUNCHER_PID", "the launcher's process, with which workers end"),
    PREEMPTION_DIR,
    Switch("FULLSHARD_STEP_IN_BACKWARD", "the script's optimizer steps in backward"),
    Switch("FULLSHARD_TRAINER_HOOK", "the module that gives a script fullshard's Trainer"),
    Switch("FULLSHARD_WARM_SPARES", "the launcher has processes wait with a rank's imports done"),
)
SWITCHES = {switch.name: switch for switch in (COMM, GRADIENTS, HEAP, OFFLOAD, OPTIMIZER, TIMEOUT, TOKEN, *HANDED_OVER)}
"""All of them, by name; those that the launcher sets come last."""


def timeout_of_environment(environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds that `TIMEOUT` asks for, in `os.environ` unless `environ` is given; None if it does not.

    Raises:
        ConfigError: that is no time.
    """
    text = TIMEOUT.read(environ)
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"${TIMEOUT.name} = {text!r}", hint="use a number of seconds, or leave it out")
    return seconds


def elastic_ranks() -> tuple[int, int] | None:
    """Fewest and most ranks that the job may have; None if their number is fixed."""
    least, _, most = ELASTIC.read().partition(":")
    return (int(least), int(most)) if most else None


def faults(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that begin like fullshard's and are none, or have an unknown value: `(name, what is wrong, hint)`."""
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        value = environ[name].strip()
        if name not in SWITCHES:
            known = [switch.removeprefix(PREFIX) for switch in SWITCHES]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else f"unset it; known are {', '.join(SWITCHES)}"
            yield name, f"unknown variable {name} = {value!r}", hint
        elif value and SWITCHES[name].values and value not in SWITCHES[name].values:
            yield name, f"{name} = {value!r}", SWITCHES[name].hint
    try:
        timeout_of_environment(environ)
    except ConfigError:
        yield TIMEOUT.name, f"{TIMEOUT.name} = {environ[TIMEOUT.name]!r}", f"use {TIMEOUT.form}, or leave it out"


def check_switches() -> None:
    """See to it that this process's variables are ones that fullshard has.

    Raises:
        ConfigError: one is not.
    """
    for _, message, hint in faults(os.environ):
        raise ConfigError(message, hint=hint)
