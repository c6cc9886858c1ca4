"""The `fullshard rehearse` command, which runs a script as one rank of many on the device at hand."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.core.errors import ConfigError

DOES_NOT_FIT = 1
"""Exit code when the script runs but needs more memory than the device of `--as` has."""

_OF_THE_JOB = ("launch.num_processes", "launch.num_machines", "launch.machine_rank", "launch.main_process_ip")


def rehearse(
    *,
    command: Annotated[list[str], typer.Argument(metavar="-- SCRIPT.py [ARGUMENTS]", help="As for fullshard launch")],
    devices: Annotated[str, typer.Option("--as", help="Number and kind of devices of the job: 64xH100")],
    rank: Annotated[int, typer.Option(min=0, help="The rank that runs")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the script after this many steps", show_default="when it ends")
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(help="free, or a device whose links carry the messages", show_default="those of --as"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. The script then prints to stderr")] = False,
) -> None:
    """Run your script as one rank of a large job, to measure it.

    It runs unchanged, on the device at hand. The other ranks do not exist. Every other rank counts as a copy of this
    one, and collectives take the time that the links would take. Losses and checkpoints mean nothing. The command
    measures the time of a step, the communication that computation does not hide, and the peak of memory in each phase.

    The exit code is 1 if the job would not fit into the memory of its devices, or that of the script if it fails.
    """
    from fullshard.launch.scratch import scratch_directory
    from fullshard.plan.hardware import check_rank, find_device, parse_cluster

    cluster = parse_cluster(devices)
    check_rank(rank, cluster.count)
    if links not in (None, "free"):
        find_device(links)
    with scratch_directory("fullshard-rehearsal-") as scratch:
        answer = scratch / "answer.json"
        options = {"devices": devices, "rank": rank, "steps": steps, "links": links, "answer": str(answer)}
        program, variables = _job(command, scratch)
        stage = [sys.executable, "-m", "fullshard.api.rehearsal.stage", json.dumps(options), *program]
        done = subprocess.run(stage, env={**os.environ, **variables}, stdout=2 if as_json else None)
        if done.returncode:
            asked = _asked(json.loads(answer.read_text())) if answer.is_file() else ""
            sys.stderr.write(f"fullshard: nothing was measured, because the script failed\n{asked}")
            raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
        found = {"as": str(cluster), "rank": rank, **json.loads(answer.read_text())}
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
    if not found["fits"]:
        raise typer.Exit(DOES_NOT_FIT)


def _job(words: list[str], scratch: Path) -> tuple[list[str], dict[str, str]]:
    """Return what `fullshard launch` would run for a command line, and the variables that it would set."""
    from fullshard.cli.launch import read_sources, worker_variables
    from fullshard.config.flags import parse
    from fullshard.launch.plan import make_plan, script_exists

    line = parse(words)
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
    return list(plan.command[2:]), {**plan.variables, **worker_variables(plan, scratch)}


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the answer in words."""
    from fullshard.core.sizes import format_nbytes

    def span(seconds: float | None) -> str:
        if seconds is None:
            return "not measured"
        return f"{seconds:.1f} s" if seconds >= 10 else f"{1000 * seconds:.1f} ms"

    tokens = found["tokens_per_second"]
    said = "" if found["planned"] is None else f" (plan: {format_nbytes(found['planned'])})"
    where = "the GPU at hand" if found["is_on_gpu"] else "this CPU; memory is what the process has grown by"
    lines = [
        f"rank {found['rank']} of {found['as']}, rehearsed for {found['steps']} steps on {where}",
        f"step: {span(found['step_seconds'])}, of which {span(found['exposed_seconds'])} wait for communication"
        + (f"; {tokens:,.0f} tokens/s on this rank" if tokens else ""),
    ]
    if found["data_seconds"] is not None:
        lines.append(f"data: {span(found['data_seconds'])} per step wait for the DataLoader, on average")
    for kind, made in found["saves"].items():
        if count := made["count"]:
            later = made["background_seconds"] / count
            behind = f" and {span(later)} in the background" if later else ""
            size = format_nbytes(made["nbytes"] // count)
            lines.append(f"saves by {kind}: {count} of {size}, {span(made['seconds'] / count)} each{behind}")
    for phase, peak in found["phases"].items():
        reserved = f", {format_nbytes(peak['reserved'])} reserved" if found["is_on_gpu"] else ""
        planned = ""
        if peak["planned"] is not None:
            more = peak["allocated"] - peak["planned"]
            planned = f", plan {format_nbytes(peak['planned'])}, {'+' if more >= 0 else '-'}{format_nbytes(abs(more))}"
        lines.append(f"{phase}: {format_nbytes(peak['allocated'])} at the peak{planned}{reserved}")
    if found["unplanned"]:
        lines.append(f"no plan beside it: {found['unplanned']}")
    lines.append(
        f"{'fits' if found['fits'] else 'does not fit'}: needs {format_nbytes(found['needed'])} with what the runtime "
        f"takes{said}, and a device has {format_nbytes(found['memory'])}"
    )
    return [
        *lines,
        f"{_asked(found)}every other rank counted as a copy of this one: losses and checkpoints mean nothing",
    ]


def _asked(found: dict[str, Any]) -> str:
    """Return a line with the values of other ranks that the script has asked for, or nothing if it has not."""
    asked = ", ".join(f"{what} ({count}x)" for what, count in found["unknown"].items())
    hint = (
        "" if "steps" in found else "hint: if the script cannot go on without them, rehearse the rank that has them\n"
    )
    said = textwrap.fill(f"asked for values that only other ranks know, and kept what was there: {asked}", 80)
    return asked and f"{said}\n{hint}"
