"""Pictures of a plan: memory over one step by category; memory and time against the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.events import EventKind
from fullshard.core.imports import import_extra
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.hardware import Cluster
from fullshard.plan.memory import CATEGORIES

FORMATS = (".png", ".svg", ".pdf")


def draw(plan: Plan, path: Path) -> None:
    """Write both pictures into one file.

    Raises:
        ConfigError: a file name that does not end in `.png`, `.svg` or `.pdf`.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: cannot draw into this kind of file", hint=f"use one of {', '.join(FORMATS)}")
    matplotlib = import_extra("matplotlib", extra="plots", purpose="drawing a plan")
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure = Figure(figsize=(9, 8), layout="constrained")
        upper, lower = figure.subplots(2, 1)
        _draw_step(upper, plan)
        _draw_devices(lower, plan)
        figure.savefig(path, dpi=150)


def _draw_step(axes: Any, plan: Plan) -> None:
    timeline = plan.memory.timeline
    used = [name for name in CATEGORIES if any(moment.nbytes.get(name) for moment in timeline)]
    series = [[moment.nbytes.get(name, 0) / GIB for moment in timeline] for name in used]
    axes.stackplot(range(len(timeline)), series, labels=used, step="post")
    axes.axhline(plan.cluster.device.memory / GIB, color="black", linestyle="--", label=plan.cluster.device.name)
    for index, moment in enumerate(timeline):
        is_turn = moment.event.kind is EventKind.FORWARD_END and moment.event.unit == ""
        if is_turn or moment.event.kind is EventKind.OPTIMIZER_STEP:
            axes.axvline(index, color="grey", linewidth=0.8)
    axes.set_title(f"{plan.model.name} on {plan.cluster}: memory of one rank over one step")
    axes.set_xlabel("events of the step (grey: end of forward, optimizer step)")
    axes.set_ylabel("GiB")
    axes.legend(fontsize=8, loc="upper right")


def _draw_devices(axes: Any, plan: Plan) -> None:
    plans = _by_devices(plan)
    counts = [p.cluster.count for p in plans]
    axes.plot(counts, [p.memory.needed / GIB for p in plans], marker="o", label="memory of a rank, GiB")
    axes.axhline(plan.cluster.device.memory / GIB, color="black", linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("devices")
    axes.set_ylabel("GiB")
    other = axes.twinx()
    other.plot(counts, [p.time.total for p in plans], marker="s", color="tab:orange", label="seconds per step")
    other.set_ylabel("seconds per step")
    other.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)
    handles = [*axes.get_lines()[:1], *other.get_lines()]
    axes.legend(handles, [line.get_label() for line in handles], fontsize=8)
    axes.set_title("the same job on more and fewer devices")


def _by_devices(plan: Plan) -> Sequence[Plan]:
    """The same job on a quarter to 16 times the devices, as far as they share hosts and shard groups equally."""
    plans = []
    for power in range(-2, 5):
        count = round(plan.cluster.count * 2.0**power)
        if count < 1 or plan.cluster.count * 2.0**power != count:
            continue
        hosts = max(1, -(-count // plan.cluster.per_host))
        try:
            plans.append(evaluate(plan.model, plan.job, Cluster(plan.cluster.device, count, hosts)))
        except ConfigError:
            continue
    return plans
