"""The `fullshard rehearse` command, which runs a script as one rank of many on the device at hand."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fullshard.cli.options import DeviceName, file_word
from fullshard.cli.sft import RECIPE, split_words
from fullshard.config.switches import TAKE
from fullshard.core.errors import ConfigError, plural

DOES_NOT_FIT = 1
"""Exit code when the script runs but needs more memory than the device of `--as` has."""

_STAGE = "import signal; signal.signal(2, signal.SIG_DFL); from fullshard.api.rehearsal.stage import main; main()"
"""The program that runs the script. The command itself answers Ctrl-C (SIGINT, 2)."""

_FREES_FROM = "MALLOC_MMAP_THRESHOLD_"
"""The C library returns freed memory to the system from this size in bytes on. By default, it keeps up to 32 MiB."""

_OF_THE_JOB = ("launch.num_processes", "launch.num_machines", "launch.machine_rank", "launch.main_process_ip")


def rehearse(
    *,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="As for launch, or sft ..., or a recipe")],
    devices: Annotated[str, DeviceName("--as", help="Number and kind of devices of the job: 64xH100")],
    rank: Annotated[int, typer.Option(min=0, help="The rank that runs")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the script after this many steps", show_default="when it ends")
    ] = None,
    links: Annotated[
        str | None, DeviceName(help="free, or a device whose links carry the messages", show_default="those of --as")
    ] = None,
    compare: Annotated[Literal["torch"] | None, typer.Option(help="Run it on torch's engine, too")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw FILE.svg, .png or .pdf", parser=file_word)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. The script then prints to stderr")] = False,
) -> None:
    """Run your script as one rank of a large job, to measure it.

    It runs unchanged, on the device at hand. The other ranks do not exist. Every other rank counts as a copy of this
    one, and collectives take the time that the links would take. Losses and checkpoints mean nothing. The command
    measures the time of a step, the communication that computation does not hide, and the peak of memory in each phase.

    The exit code is 1 if the job would not fit into its devices' memory, 2 without a step, or that of a failed script.
    """
    from fullshard.launch.scratch import scratch_directory
    from fullshard.observe.plots import rehearsal_chart, require_plots
    from fullshard.plan.hardware import check_rank, find_device, parse_cluster

    cluster = parse_cluster(devices)
    check_rank(rank, cluster.count)
    if links not in (None, "free"):
        find_device(links)
    if plot is not None:
        require_plots()
        if plot.suffix not in (".svg", ".png", ".pdf"):
            raise ConfigError(f"--plot {plot}: expected a name that ends in .svg, .png or .pdf")
    options: dict[str, Any] = {"devices": devices, "rank": rank, "steps": steps, "links": links, "engine": None}
    with scratch_directory("fullshard-rehearsal-") as scratch:
        program, variables = _job(command, scratch, for_cpus=cluster.device.is_cpu)
        options["answer"] = str(scratch / "answer.json")
        variables |= {} if compare is None else {TAKE.name: "fully_shard"}
        found = {"as": str(cluster), "rank": rank, **_run(options, program, variables, prints=not as_json)}
        if compare is not None:
            theirs = {**variables, TAKE.name: ""}
            found[compare] = _run(options | {"engine": compare}, program, theirs, prints=not as_json)
    lines = (textwrap.fill(line, 80, subsequent_indent="  ") for text in _lines(found) for line in text.splitlines())
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    if plot is not None:
        rehearsal_chart(found, plot)
    if not found["steps"]:
        hint = "a step is a call of `step()` of a torch optimizer"
        raise ConfigError("the script has taken no step, so the rehearsal cannot tell whether it fits", hint=hint)
    if not found["fits"]:
        raise typer.Exit(DOES_NOT_FIT)


def _run(options: dict[str, Any], program: list[str], variables: dict[str, str], *, prints: bool) -> dict[str, Any]:
    """Run the script, and return the measurements. The script's exit code becomes that of the command if it fails."""
    stage = [sys.executable, "-c", _STAGE, json.dumps(options), *program]
    done = subprocess.run(stage, env={**os.environ, **variables}, stdout=None if prints else 2)
    found = json.loads(file.read_text()) if (file := Path(options["answer"])).is_file() else {"unknown": {}}
    if done.returncode:
        sys.stderr.write(f"fullshard: nothing was measured, because the script failed\n{_asked(found)}")
        raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    return dict(found)


def _job(words: list[str], scratch: Path, *, for_cpus: bool) -> tuple[list[str], dict[str, str]]:
    """Return what `fullshard launch` would run for a command line, and the variables that it would set."""
    from fullshard.cli.launch import read_sources, worker_variables
    from fullshard.config.flags import parse
    from fullshard.launch.plan import make_plan, script_exists

    line = parse(words)
    if line.kind == "script" and (line.target == "fullshard" or Path(line.target or "").suffix in (".yaml", ".yml")):
        line = parse(_of_a_command(words, line.target, line.arguments, scratch))
    script_exists(line)
    if line.kind == "program":
        raise ConfigError("only a Python script or module can be rehearsed", hint="remove --no_python")
    readings = [
        dataclasses.replace(reading, settings=[s for s in reading.settings if s.path not in _OF_THE_JOB])
        for reading in read_sources(line, os.environ)
    ]
    plan = make_plan(line, readings, os.environ)
    if plan.device not in ("cpu", "cuda"):
        raise ConfigError(f"a rehearsal runs on an NVIDIA GPU or a CPU, got {plan.device}", hint="use --cpu")
    variables = {**plan.variables, **worker_variables(plan, scratch)}
    if plan.device == "cpu" and not for_cpus:  # the process then holds what a device would: tensors, not freed memory
        variables[_FREES_FROM] = os.environ.get(_FREES_FROM, str(2**17))
    return list(plan.command[2:]), variables


def _of_a_command(words: list[str], target: str | None, rest: list[str], scratch: Path) -> list[str]:
    """Return what follows `fullshard launch` for a command line with a command of fullshard or with a recipe."""
    flags, rest = words[: len(words) - len(rest) - 1], rest if target == "fullshard" else ["sft", str(target), *rest]
    if rest[:1] != ["sft"]:
        rest = [*rest, *["--output-dir", str(scratch / "output")] * (rest[:1] == ["train"])]
        return [*flags, *(rest[1:] if rest[:1] == ["launch"] else ["-m", "fullshard", *rest])]
    more, rest = split_words(rest[1:], scratch)
    return [*flags, *more, "-m", RECIPE, *rest]


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the answer in words."""
    from fullshard.core.sizes import format_nbytes

    tokens, exposed = found["tokens_per_second"], found["exposed_seconds"]
    kind = found["as"].split(" x ")[1].partition(" in ")[0]
    said = "" if found["planned"] is None else f" (plan: {format_nbytes(found['planned'])})"
    where = "the GPU at hand" if found["is_on_gpu"] else "this CPU; memory is what the process has grown by"
    lines = [
        f"rank {found['rank']} of {found['as']}, rehearsed for {plural(found['steps'], 'step')} on {where}",
        f"step: {_span(found['step_seconds'])}"
        + (f", of which {_span(exposed)} wait for communication" if exposed is not None else "")
        + (f"; {tokens:,.0f} tokens/s on this rank" if tokens else "")
        + (f"; MFU {found['mfu']:.1%}{', with recomputation' * bool(found['unplanned'])}" if found["mfu"] else ""),
    ]
    if not found["is_asked_device"]:
        about = "; there is no plan" * bool(found["unplanned"])
        if found["seconds_by_plan"]:
            about = f"; about {_span(found['seconds_by_plan'])} on {kind} by the plan"
        lines.append(f"times are of the device at hand{about}")
    if exposed is None:
        lines.append("communication: not measured, because that needs links that are not free and 6 steps (better 14)")
    if found["data_seconds"] is not None:
        lines.append(f"data: {_span(found['data_seconds'])} per step wait for the DataLoader, on average")
    waits = found["waits"].items()
    if late := [(noted["late"] / noted["count"], what) for what, noted in waits if "late" in noted]:
        lines.append(f"the host is behind the device in at most {max(late)[0]:.0%} of the waits, in {max(late)[1]}")
    elif waited := max(((noted["host"], what) for what, noted in waits), default=None):
        lines.append(f"waits for messages take at most {_span(waited[0])} per step, in {waited[1]}")
    for kind, made in found["saves"].items():
        if count := made["count"]:
            later = made["background_seconds"] / count
            behind = f" and {_span(later)} in the background" if later else ""
            size = format_nbytes(made["nbytes"] // count)
            lines.append(f"saves by {kind}: {count} of {size}, {_span(made['seconds'] / count)} each{behind}")
    for phase, peak in found["phases"].items():
        reserved = f", {format_nbytes(peak['reserved'])} reserved" if found["is_on_gpu"] else ""
        more = peak["allocated"] - (peak["planned"] or 0)
        by_plan = f", plan {format_nbytes(peak['planned'] or 0)}, {'-+'[more >= 0]}{format_nbytes(abs(more))}"
        told = by_plan * (peak["planned"] is not None) + reserved
        lines.append(f"{phase}: {format_nbytes(peak['allocated'])} at the peak{told}")
    if found["unplanned"]:
        lines.append(f"no plan beside it: {found['unplanned']}")
    whole = "; nothing is sharded by fullshard or fully_shard" * (found["engine"] is None and found["steps"] > 0)
    fits = {True: "fits", False: "does not fit"}.get(found["fits"], "before any step")
    lines.append(
        f"{fits}: needs {format_nbytes(found['needed'])}, with {format_nbytes(found['runtime'])} for the runtime"
        f"{said}, and a device has {format_nbytes(found['memory'])}{whole}"
    )
    return [
        *lines,
        *(_compared(found, found["torch"]) if "torch" in found else ()),
        f"{_asked(found)}every other rank counted as a copy of this one: losses and checkpoints mean nothing",
    ]


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _compared(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a table of two answers."""
    from fullshard.core.sizes import format_nbytes

    lines = [f"{'':16}{'fullshard':>12}{'torch':>12}{'ratio':>8}"]
    for name in ("step_seconds", "exposed_seconds", "peak_allocated", "peak_reserved"):
        pair = ours[name], theirs[name]
        ratio = f"{pair[0] / pair[1]:.3f}" if pair[0] is not None and pair[1] else ""
        show = _span if name.endswith("seconds") else format_nbytes
        lines.append(
            f"{name.removesuffix('_seconds').replace('_', ' '):16}{show(pair[0]):>12}{show(pair[1]):>12}{ratio:>8}"
        )
    for name, answer in (("fullshard", ours), ("torch", theirs)):
        lines.append(f"losses, {name}: " + " ".join(f"{loss:.4f}" for loss in answer["losses"][:8]))
    wrong = ", ".join(name for name, answer in (("fullshard", ours), ("torch", theirs)) if answer["engine"] != name)
    return [*lines, *([f"not comparable: the script does not use the fully_shard of {wrong}"] if wrong else [])]


def _asked(found: dict[str, Any]) -> str:
    """Return a line with the values of other ranks that the script has asked for, or nothing if it has not."""
    asked = ", ".join(f"{what} ({count}x)" for what, count in found["unknown"].items())
    hint = "hint: if the script cannot go on without them, rehearse the rank that has them\n"
    said = textwrap.fill(f"asked for values that only other ranks know, and kept what was there: {asked}", 80)
    return asked and f"{said}\n{hint * ('steps' not in found)}"
