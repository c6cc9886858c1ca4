"""The `fullshard doctor` command, which reports on the environment, diagnoses problems, and can start trial ranks."""

import json
import os
import sys
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer

from fullshard.cli.options import Json
from fullshard.core.errors import ConfigError, filled, plural

UNHEALTHY = 1
"""The exit code if there is a problem."""


def doctor(
    run: Annotated[bool, typer.Option("--run", help="Start ranks that check communication.")] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", min=1, help="Number of ranks. Default: one per device, or 2 without devices."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device that the ranks compute on.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, max=1e9, help="Seconds that a rank waits for the others.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Diagnose problems with this machine.

    Prints an environment report that can be pasted into an issue. The exit code is 1 if there is a problem.

    With --run, it also starts ranks that measure their links, test the collectives and compare a sharded step with DDP.
    For several hosts, run `fullshard launch [FLAGS] -m fullshard doctor --run` on each.
    """
    if nproc is not None and not run:
        raise ConfigError("-n sets the number of ranks that --run starts, but --run is not set", hint="add --run")
    from fullshard.comm import device as devices
    from fullshard.config.hardware import DetectedDevice, detect_hardware
    from fullshard.launch import cuda
    from fullshard.launch.doctor import examine, judge, try_ranks
    from fullshard.launch.links import recommend
    from fullshard.launch.report import make_report

    if run and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        try_ranks(1, device, timeout)  # rank 0 reports
        return
    hardware = detect_hardware()
    if hardware.failure is None and not any(each.memory_nbytes for each in hardware.accelerators):
        try:  # without nvidia-smi, torch may still find them
            hardware = replace(
                hardware, accelerators=tuple(DetectedDevice(*each) for each in cuda.seen()) or hardware.accelerators
            )
        except Exception as error:  # some of torch's CUDA errors are not RuntimeErrors
            hardware = replace(hardware, failure=str(error).partition("\n")[0])
    report = make_report(hardware, os.environ)
    kind = device if device != "auto" else devices.accelerator()
    count = nproc or (devices.count(kind) if kind is not None else 0) or 2
    findings = examine(hardware, os.environ, report, count, device)
    if not as_json:
        for section, lines in report.items():
            _print(section, lines)
    trial, strategies = None, dict[str, str]()
    if run:
        sys.stdout.flush()
        trial = try_ranks(count, device, timeout)
        findings += judge(trial, findings)
        strategies = recommend(trial.ranks, trial.links)
        if not as_json:
            count = trial.facts.get("world size", count)
            _print(f"trial of {plural(count, 'rank')}", trial.facts | trial.checks)
            _print("what these links allow (full training, 4 micro-batches of 2 x 2,048 tokens)", strategies)
    healthy = not any(finding.is_wrong for finding in findings)
    if as_json:
        content = {"report": report, "trial": asdict(trial) if trial else None, "healthy": healthy}
        content["strategies"] = strategies
        print(json.dumps({**content, "findings": [asdict(finding) for finding in findings]}, indent=2))
        raise typer.Exit(0 if healthy else UNHEALTHY)
    for finding in findings:
        print(
            filled(f"{'WRONG' if finding.is_wrong else 'note'}: {finding.text}"),
            filled(f"  hint: {finding.hint}"),
            sep="\n",
        )
    if healthy:
        print("no problems found" if run else "no problems found without --run")
    raise typer.Exit(0 if healthy else UNHEALTHY)


def _print(title: str, lines: dict[str, Any]) -> None:
    if lines:
        print(f"{title}:")
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        print(f"  {name.ljust(width)}  {value}")
