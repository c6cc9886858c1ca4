"""The `fullshard launch` command, which starts the processes of a job on this host."""

import gc
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from fullshard.cli.options import check_words
from fullshard.config.dialect import Reading, Setting, Status
from fullshard.config.environment import load_environment
from fullshard.config.flags import FLAGS, OPTIONS, SHORT, CommandLine, parse
from fullshard.config.handover import hand_over
from fullshard.config.hardware import usable_cpu_count
from fullshard.config.load import load_file
from fullshard.config.origin import Origin, Precedence
from fullshard.config.schema import SETTINGS
from fullshard.config.settings import words_of
from fullshard.config.switches import TAKE
from fullshard.config.values import integer
from fullshard.core.errors import ConfigError, tell
from fullshard.launch.bootstrap import TRAINER_HOOK, WATCHED
from fullshard.launch.plan import LaunchPlan, make_plan, script_exists, shared_settings
from fullshard.launch.slurm import read_allocation

_PER_JOB = ("num_machines", "min_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_id")

_NOT_A_SCRIPTS = ("__num_processes", "__nproc_per_node", "__num_machines", "__nnodes")


def launch(context: typer.Context) -> None:
    """Start a script in several processes on one or more hosts. `fullshard launch --help_all` lists all flags."""
    line = parse(context.args)
    if line.option("help") or line.option("help_all"):
        sys.stdout.write(help_text(is_short=not line.option("help_all")))
        return
    check_words(context.args[: len(context.args) - len(line.arguments)])
    script_exists(line)
    gc.disable()  # importing torch creates a million objects, none of which is garbage
    if line.option("print") is not None:
        from fullshard.launch.manifests import manifest

        plan = make_plan(line, read_sources(line, {}), {}, elsewhere=True)
        sys.stdout.write(manifest(str(line.option("print")), line, plan))
        return
    plan = make_plan(line, read_sources(line, os.environ), os.environ)
    if not plan.launch.machine_rank:  # only one host prints the notes
        for note in plan.resolved.notes:
            is_flag = note.origin.precedence is Precedence.FLAG
            tell(f"fullshard: {f'{note.origin} {note.text}' if is_flag else note}")
    for word in line.arguments:
        if word.partition("=")[0].replace("-", "_") in _NOT_A_SCRIPTS:
            tell(f"fullshard: {word} follows {line.target}, so it is passed to it, not to the launcher")
    if line.option("dry_run"):
        from fullshard.launch.describe import describe

        sys.stdout.write(describe(line, plan))
        return
    if not line.option("quiet"):
        tell(f"fullshard: {plan.summary()}")
    sys.exit(_start(line, plan))


def read_sources(line: CommandLine, environ: Mapping[str, str]) -> list[Reading]:
    """Read the settings from flags, a file, the environment and, unless a flag describes the hosts, Slurm."""
    flags = line.readings()
    own = flags[-1]
    if (alone := line.options.get("standalone")) is not None:
        for path, value in (("launch.num_machines", 1), ("launch.main_process_port", 0)):
            own.settings.append(Setting(path, value, alone.origin, "standalone"))
    readings = [*_file(line), load_environment(environ), *flags]
    if not any(own.setting(f"launch.{name}") for name in _PER_JOB):
        readings.append(read_allocation(environ))
    if (entry := line.options.get("nproc_per_node")) is not None:
        own.settings += list(_totals(str(entry.value).strip().lower(), entry.origin, _hosts(readings)))
    own.find_contradictions()
    return readings


def _file(line: CommandLine) -> Iterator[Reading]:
    named = line.option("config_file")
    if named is not None:
        if str(named).strip().lower() != "none":
            yield load_file(str(named))
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for name in ("default_config.yaml", "default_config.json"):
        path = home / "accelerate" / name
        if path.is_file():
            reading = load_file(path)
            tell(f"fullshard: using {path}, which `accelerate config` wrote; use --config_file none to ignore it")
            yield reading
            return


def _hosts(readings: Sequence[Reading]) -> int:
    found = [setting for reading in readings for setting in reading.settings if setting.path == "launch.num_machines"]
    return int(max(found, key=lambda setting: setting.origin.precedence).value) if found else 1


def _totals(text: str, origin: Origin, hosts: int) -> Iterator[Setting]:
    """Yield the settings that torchrun's --nproc_per_node stands for: processes on all hosts, and maybe the device."""
    if text == "auto":
        return
    if text in ("cpu", "gpu"):
        yield Setting("launch.device", "cpu" if text == "cpu" else "cuda", origin, "nproc_per_node")
    if text == "gpu":
        return
    try:
        count = usable_cpu_count() if text == "cpu" else integer(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(
            f"{origin}: expected a number, auto, gpu or cpu, got {text!r}", hint="use a number, for example 8"
        )
    yield Setting("launch.num_processes", count * hosts, origin, "nproc_per_node")


def _start(line: CommandLine, plan: LaunchPlan) -> int:
    from fullshard.launch.local import LaunchJob, run_job
    from fullshard.launch.scratch import scratch_directory

    with scratch_directory("fullshard-config-") as directory:
        variables = worker_variables(plan, directory)
        job = LaunchJob(
            plan.command,
            plan.per_host,
            plan.launch,
            {**plan.variables, **variables},
            shared_settings(plan.resolved.config) | {TAKE.name: TAKE.read({**os.environ, **plan.variables})},
            plan.join_timeout,
            plan.last_call,
            line.option("tee"),
            line.option("redirects"),
        )
        return run_job(job)


def worker_variables(plan: LaunchPlan, directory: Path) -> dict[str, str]:
    """Return the variables that pass the settings to the processes, and write the file that they name."""
    variables = hand_over(plan.handed_over(), directory / "config.json")
    variables[TRAINER_HOOK] = "fullshard.integrations.transformers.install"
    for path, (variable, *_) in WATCHED.items():
        value = plan.resolved.config.value(path)
        if value is not None and value is not False:
            variables[variable] = str(int(value))
    return variables


_COMMON = {
    "Script and settings": "config_file module dry_run print help help_all",
    "Processes": "num_processes device gpu_ids max_restarts timeout log_dir",
    "Several hosts": "num_machines machine_rank main_process_ip",
    "Sharding and memory": "strategy shard_size quantize activation_checkpointing cpu_offload "
    "offload_activations cp_size compile",
    "Training": "mode gradient_accumulation_steps async_save",
}
"""The flags that most jobs need, which the short help page lists."""


def help_text(*, is_short: bool = False) -> str:
    """Return the help page of `fullshard launch` with all flags, or with those that most jobs need."""
    lines = [
        "Usage: fullshard launch [FLAGS] SCRIPT.py [ARGUMENTS]",
        "       fullshard launch [FLAGS] -m MODULE [ARGUMENTS]",
        "       fullshard launch [FLAGS] --no_python PROGRAM [ARGUMENTS]",
        "",
        "Start a script in several processes, on this host or on several.",
        "Flags are written with - or _ alike. A flag wins over the environment, and that",
        "over a file.",
    ]
    options = {option.name: option for option in OPTIONS}
    paths = {path.partition(".")[2]: path for path in SETTINGS}
    groups = {"": options} | {g: list(names) for g, names in groupby(paths, lambda name: paths[name].partition(".")[0])}
    for title, names in ({t: n.split() for t, n in _COMMON.items()} if is_short else groups).items():
        lines += ["", *([f"{title.capitalize()}:"] * bool(title))]
        for name in names:
            if (option := options.get(name)) is not None:
                short = f"-{option.short}, " if option.short else ""
                lines += _entry(f"{short}--{name} {option.metavar}", option.help)
                continue
            flags = [key.name for key in FLAGS.keys if key.target == paths[name]]
            flags.sort(key=lambda flag: flag != name)
            letters = [f"-{letter}" for letter, flag in SHORT.items() if flag in flags]
            spelled = [*letters, *(f"--{flag}" for flag in flags[: 1 if is_short else None])]
            if len(words := words_of(SETTINGS[paths[name]])) > 1:
                spelled[len(letters)] += f" {'|'.join(words)}"
            lines += _entry(", ".join(spelled), SETTINGS[paths[name]].description or "")
    others = [f"--{key.name}" for key in FLAGS.keys if not key.target and key.status is not Status.REFUSED]
    if not is_short:
        lines += ["", "Accepted, and explained when used:", *textwrap.wrap(" ".join(others), _WIDTH, **_INDENT)]
    return "\n".join(lines) + "\n"


_INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}


_WIDTH, _COLUMN = 80, 24
"""The width of the page and the column at which the description of a flag begins."""


def _entry(flags: str, text: str) -> list[str]:
    text = " ".join(text.replace("`", "").split())
    means = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    *heads, head = textwrap.wrap(flags, _WIDTH, **_INDENT)
    if len(head) > _COLUMN - 2:
        heads, head = [*heads, head], ""
    return [*heads, f"{head:<{_COLUMN}}{means[0]}", *(f"{'':{_COLUMN}}{part}" for part in means[1:])]
