"""The flags of `fullshard launch`: Accelerate's, torchrun's, and a flag for each setting of the schema.

Each flag that changes a setting is a row of a dialect, like a key in a file. This module also splits a command line
into flags and the program to run. All arguments after the program are passed to the program.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fullshard.config import values
from fullshard.config.accelerate import FLAT, ON_EACH_HOST, hosts
from fullshard.config.deepspeed import DEEPSPEED_SHORT
from fullshard.config.dialect import Dialect, Key, Problem, Reading, Settings, Status, refuse, rows, switch
from fullshard.config.load import load_file, load_fsdp_config
from fullshard.config.origin import Entry, Origin
from fullshard.config.schema import SETTINGS
from fullshard.config.settings import COUNTS, closest, plain_message, words_of
from fullshard.config.transformers import read_fsdp_words
from fullshard.config.xla import XLA_TRAINS, asks_for_xla
from fullshard.core.errors import ConfigError

Kind = Literal["script", "module", "program"]


def _endpoint(value: Any) -> Settings:
    """Read the address and port of the main host from `host`, `host:port`, `[address]:port`, or an IPv6 address."""
    text = values.text(value)
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (host.count(":") and not host.endswith("]")):
        host, port = text, ""
    settings: dict[str, Any] = {"launch.main_process_ip": host.strip("[]")}
    return settings | {"launch.main_process_port": values.integer(port)} if port else settings


def _sharded(value: Any) -> Settings:
    if not values.boolean(value):
        raise ConfigError("the model is always sharded", hint="use --strategy NO_SHARD to keep unsharded replicas")
    return {}


_LAUNCHER_KEYS = (
    Key("cpu", Status.TRANSLATED, "launch.device", read=switch("launch.device", "cpu")),
    Key(
        "multi_gpu",
        Status.TRANSLATED,
        "sharding.strategy",
        because="every rank has an unsharded replica",
        read=switch("sharding.strategy", "NO_SHARD"),
    ),
    Key("use_fsdp", read=_sharded),
    Key("nnodes", Status.TRANSLATED, "launch.num_machines", read=hosts),
    Key("rdzv_endpoint", Status.TRANSLATED, "launch.main_process_ip", read=_endpoint),
    Key("tpu", Status.TRANSLATED, because=XLA_TRAINS, read=asks_for_xla),
    *rows("launcher"),
)

_NOT_HERE = {
    "models can only be divided by sharding": ("megatron_lm_", "use_megatron_lm"),
    "jobs are started on your own machines": ("aws_",),
    "only Transformer Engine and MS-AMP use it": ("fp8_",),
    ON_EACH_HOST: ("tpu_cluster", "vm"),
    "set the variables where you start the launcher; processes inherit them": ("env",),
    "processes are started by the launcher or by Slurm": ("mpirun_",),
    "only torchrun has this flag": (
        *("run_path", "virtual_local_rank", "logs_specs", "local_ranks_filter", "numa_binding", "signals_to_handle"),
        *("event_log_handler", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    ),
}
"""Prefixes of refused flags, by reason."""

_NAMED_OTHERWISE = {"mode"}
"""Fields whose names would be unclear as flags: the flag for the precision mode is --mixed_precision."""


def _own_keys(taken: set[str]) -> tuple[Key, ...]:
    names = {path: path.split(".")[1] for path in SETTINGS}
    return tuple(Key(name, target=path) for path, name in names.items() if name not in taken | _NAMED_OTHERWISE)


_OTHERS = (*FLAT.keys, *(key for key in DEEPSPEED_SHORT.keys if FLAT.find(key.name) is None), *_LAUNCHER_KEYS)

FLAGS = Dialect(
    "fullshard launch",
    (*_OTHERS, *_own_keys({spelling for key in _OTHERS for spelling in (key.name, *key.spellings)})),
    finish=FLAT.finish,
)
"""Every flag that changes a setting."""


@dataclass(frozen=True, slots=True)
class Option:
    """A flag that controls the command itself. `short` is its one-letter form. A switch has an empty `metavar`."""

    name: str
    short: str = ""
    metavar: str = ""
    help: str = ""


OPTIONS = (
    Option(
        "config_file", metavar="FILE", help="Settings, in YAML or JSON of any dialect; `none` uses no default file."
    ),
    Option("module", "m", help="Run a module, as `python -m` does."),
    Option("no_python", help="Run a program that is not a Python script."),
    Option("take", metavar="NAMES", help="`fully_shard`: what the script imports from torch as this is fullshard's."),
    Option("dry_run", help="Print what would run on each host, and end."),
    Option(
        "print", metavar="slurm|kubernetes|trainjob", help="Print a batch script or a manifest that runs this, and end."
    ),
    Option("quiet", "q", help="Print no summary before the start."),
    Option("fsdp", metavar="WORDS", help='Transformers\' words, such as "full_shard auto_wrap offload".'),
    Option("fsdp_config", metavar="FILE", help="Transformers' fsdp_config: a file, or JSON."),
    Option("nproc_per_node", metavar="N", help="Processes per host, as torchrun counts: a number, auto, gpu or cpu."),
    Option("standalone", help="One host, with a free port."),
    Option("tee", "t", metavar="STREAMS", help="Streams to show and to write into --log_dir, as torchrun has it."),
    Option("redirects", "r", metavar="STREAMS", help="Streams to write into --log_dir only, as torchrun has it."),
    Option("help", "h", help="Print the flags that most jobs need."),
    Option("help_all", help="Print all flags."),
)

SHORT = {"n": "num_processes", **{option.short: option.name for option in OPTIONS if option.short}}
"""The one-letter flags and their long forms. `-n` has the same meaning in `train` and `doctor`."""

_KINDS: dict[str, Kind] = {"module": "module", "no_python": "program"}
_TRUTHS = {
    *("cpu", "use_cpu", "multi_gpu", "use_fsdp", "use_deepspeed", "use_parallelism_config", "tpu", "no_tpu_cluster"),
    *("same_network", "enable_cpu_affinity", "fp16", "fsdp_use_orig_params", "fsdp_limit_all_gathers", "use_xpu"),
    *("dynamo_use_regional_compilation", "downcast_bf16", "tpu_use_cluster", "tpu_use_sudo"),
    *("fsdp_activation_checkpointing_offload", "zero3_init_flag", "zero3_save_16bit_model"),
}
_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(slots=True)
class CommandLine:
    """A command line, split into flags, the target, and the arguments of the target."""

    kind: Kind = "script"
    target: str | None = None
    arguments: list[str] = field(default_factory=list)
    options: dict[str, Entry] = field(default_factory=dict)  # the flags that control this command itself, by name
    entries: list[Entry] = field(default_factory=list)  # the other flags, which change settings
    given: list[tuple[str, list[str]]] = field(default_factory=list)  # all flags in order, each with its words

    def option(self, name: str) -> Any:
        """Return the value of an option, or None if it was not given."""
        return self.options[name].value if name in self.options else None

    def readings(self) -> list[Reading]:
        """Return the settings read from the flags and from files that they name, in ascending order of precedence."""
        readings = []
        if (further := self.options.get("fsdp_config")) is not None:
            value, origin = str(further.value), further.origin
            if " " in value.strip() and not value.lstrip().startswith("{") and not Path(value).exists():
                raise ConfigError(f"{origin}: {value!r} is not a file", hint="check whether a closing quote is missing")
            readings.append(load_fsdp_config(value, origin.text))
        if (words := self.options.get("fsdp")) is not None:
            readings.append(read_fsdp_words(words.value, words.origin))
        reading = FLAGS.read(self.entries)
        if (file := reading.entries.get("deepspeed_config_file")) is not None:
            readings.append(load_file(str(file.value)))
        return [*readings, reading]


def parse(argv: Sequence[str]) -> CommandLine:
    """Split a command line into flags and the program with its arguments. Raise `ConfigError` for unknown flags."""
    line = CommandLine()
    problems: list[Problem] = []
    rest = list(argv)
    while rest:
        written = rest.pop(0)
        if written == "--" or not written.startswith("-") or written == "-":
            rest = rest if written == "--" else [written, *rest]
            break
        try:
            _take(line, written, rest)
        except ConfigError as error:
            problems.append(Problem((Origin.flag(written.partition("=")[0]),), plain_message(error), error.hint))
    refuse(problems)
    if rest:
        line.target, line.arguments = rest[0], rest[1:]
    return line


def _take(line: CommandLine, written: str, rest: list[str]) -> None:
    spelled, equals, value = written.partition("=")
    name = SHORT.get(spelled[1:]) if not spelled.startswith("--") else spelled[2:].replace("-", "_")
    negated = False
    if name is not None and _find(name) is None and name.startswith("no_") and _is_truth(name[3:]):
        name, negated = name[3:], True
    found = None if name is None else _find(name)
    if name is None or found is None:
        why = next((why for why, families in _NOT_HERE.items() if (name or "").startswith(families)), None)
        if why is not None:
            raise ConfigError(f"the flag is not supported: {why}", hint="remove it")
        raise ConfigError("unknown flag", hint=_suggestion(spelled))
    consumed: list[str] = []
    content: Any = value
    if isinstance(found, Option) and not found.metavar:
        if equals:
            raise ConfigError(f"the flag does not take a value, got {value!r}", hint=f"write {spelled}")
        content = True
    elif negated and not equals:
        content = False
    elif _is_truth(name) and not equals:
        content = True
        if rest and rest[0].strip().lower() in (*_WORDS, *flag_choices(name)):
            consumed = [content := rest.pop(0)]
    elif not equals:
        if not rest or rest[0].startswith("--"):
            raise ConfigError("the flag requires a value", hint=f"write {spelled}=VALUE")
        consumed = [content := rest.pop(0)]
    entry = Entry(name, content, Origin.flag(spelled))
    if not isinstance(found, Option):
        line.entries.append(entry)
    elif found.name in line.options and line.options[found.name].value != content:
        raise ConfigError("the flag was given twice with different values", hint="keep one of the two")
    else:
        line.options[found.name] = entry
        line.kind = _KINDS.get(found.name, line.kind)
    line.given.append((name, [written, *consumed]))


def flag_choices(written: str) -> tuple[str, ...]:
    """Return the allowed values of a flag, or an empty tuple if any value of its type is allowed."""
    found = _find(written.lstrip("-").replace("-", "_"))
    if isinstance(found, Option):
        return tuple(found.metavar.split("|")) if "|" in found.metavar else ()
    if found is None or not found.target:
        return ()
    return words_of(SETTINGS[found.target])


def completions(given: Sequence[str], word: str) -> list[str]:
    """Return the flags, or the values of the last flag in `given`, to which a shell may complete `word`."""
    with contextlib.suppress(ConfigError):  # the last flag lacks its value
        if parse(given).target is not None:
            return []  # the shell completes the script's arguments
    known = (key.name for key in FLAGS.keys if key.status is not Status.REFUSED)
    flags = [f"--{name}" for name in (*(option.name for option in OPTIONS), *known)] if word.startswith("-") else []
    values = flag_choices(given[-1]) if given and given[-1].startswith("--") else ()
    return [found for found in (*values, *flags) if found.startswith(word[:2] + word[2:].replace("-", "_"))]


def _find(name: str) -> Option | Key | None:
    return next((option for option in OPTIONS if option.name == name), None) or FLAGS.find(name)


def _is_truth(name: str) -> bool:
    key = FLAGS.find(name)
    if key is None:
        return False
    if key.name in _TRUTHS:
        return True
    if key.read is not None or not key.target:  # a key with a reader accepts more than yes and no
        return False
    kind = SETTINGS[key.target].annotation
    return kind is bool or bool in get_args(kind)


def _suggestion(spelled: str) -> str:
    known = [option.name for option in OPTIONS] + FLAGS.spellings()
    wanted = spelled.lstrip("-").replace("-", "_").lower()
    longer = [name for name in known if name.startswith(wanted) and len(wanted) > 2]  # argparse accepts abbreviations
    close = COUNTS[0] if wanted in COUNTS else next(iter(longer), None) or closest(wanted, known, 0.6)
    if close:
        return f"did you mean --{close}?"
    return "put flags of the script after the script; see `fullshard launch --help_all` for the others"
