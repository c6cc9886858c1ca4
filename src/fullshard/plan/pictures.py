"""Pictures of a plan: memory over a step by category; memory and speed over one setting's values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.events import EventKind
from fullshard.core.files import whole_file
from fullshard.core.imports import import_extra
from fullshard.core.sizes import GIB, MIB
from fullshard.plan.evaluate import Plan
from fullshard.plan.hardware import Device
from fullshard.plan.memory import CATEGORIES, Moment

_FORMATS = (".png", ".svg", ".pdf")

_MOST_STEPS = 600
"""Most moments in a picture. Of more, it has the fullest of each stretch, or neighbouring bars make a moire."""


def draw(plan: Plan, path: Path) -> None:
    """Write memory over a step into one file.

    Raises:
        ConfigError: a file name that does not end in `.png`, `.svg` or `.pdf`.
        MissingExtraError: matplotlib is not installed.
    """
    title = f"{plan.model.name} on {plan.cluster}: memory of one rank over one step"
    words = f"{plan.memory.needed / GIB:.1f} GiB with what the allocator cannot use"
    draw_moments({words: plan.memory.timeline}, path, title=title, device=plan.cluster.device)


def draw_sweep(plan: Plan, text: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a rank's needs and its speed, over the values of one setting.

    Args:
        plan: the run whose setting is changed.
        text: what was asked for.
        rows: of `plan.alternatives.as_rows`.
        path: as for `draw`.

    Raises:
        ConfigError: as for `draw`.
        MissingExtraError: as for `draw`.
    """
    labels, places = [row["what"] for row in rows], range(len(rows))
    with saved_figure(path, (9, 4.5)) as figure:
        axes = figure.subplots()
        memory = [row["needed"] / GIB for row in rows]
        bars = axes.bar(places, memory, width=0.55, color="tab:blue", alpha=0.75, label="memory of a rank")
        for bar, row in zip(bars, rows, strict=True):
            if row["needed"] > row["available"]:
                bar.set(color="tab:red", alpha=0.6)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
        limit = max(row["available"] for row in rows) / GIB
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"memory of {rows[0]['kind']}")
        axes.set_xticks(places, labels)
        name, job = text.partition("=")[0].strip(), plan.job
        where = f"{plan.cluster.device.name}: each rank keeps its batch" if name == "devices" else str(plan.cluster)
        others = f"{job.strategy}, {job.micro_batch} x {job.seq_len} tokens, checkpointing {job.checkpointing}"
        axes.set_title(f"{plan.model.name} on {where}\nbesides {name}: {others}")
        axes.set_xlabel(name)
        axes.set_ylabel("GiB (red: too much)")
        axes.set_ylim(0, 1.15 * max(limit, *memory))
        other = axes.twinx()
        speeds = [row["tokens_per_second"] / row["devices"] for row in rows]
        other.plot(places, speeds, color="tab:orange", marker="o", label="speed")
        other.set_ylabel("tokens per second and device")
        other.set_ylim(0, 1.15 * max(speeds))
        _legend_below(axes, other)


def check_picture(path: Path) -> None:
    """Refuse a file name that does not end in `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigError: it does not.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: cannot draw into this kind of file", hint=f"use one of {', '.join(_FORMATS)}")


@contextlib.contextmanager
def saved_figure(path: Path, size: tuple[float, float], *, purpose: str = "drawing a plan") -> Iterator[Any]:
    """Yield Matplotlib's figure of `size` inches to draw in, then write it.

    Raises:
        ConfigError: as for `draw`.
        MissingExtraError: as for `draw`.
    """
    check_picture(path)
    matplotlib = import_extra("matplotlib", extra="plots", purpose=purpose)
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format=path.suffix[1:].lower())


def _legend_below(axes: Any, other: Any = None) -> None:
    """Put the legend under the axis, where there are no data."""
    pairs = [part.get_legend_handles_labels() for part in (axes, other) if part is not None]
    handles, labels = ([entry for pair in pairs for entry in pair[index]] for index in (0, 1))
    axes.legend(handles, labels, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _shown(timeline: Sequence[Moment]) -> list[int]:
    """Return the moments to draw: all, or the fullest of each stretch."""
    stretch = -(-len(timeline) // _MOST_STEPS)
    totals = [moment.total for moment in timeline]
    return [
        max(range(first, min(first + stretch, len(timeline))), key=totals.__getitem__)
        for first in range(0, len(timeline), stretch)
    ]


def _stack(axes: Any, whole: Sequence[Moment], unit: int) -> tuple[int, float]:
    """Stack memory by category over the events of a step; return the position of the fullest moment."""
    places = _shown(whole)
    timeline = [whole[place] for place in places]
    names = dict.fromkeys((*CATEGORIES, *(name for moment in whole for name in moment.nbytes)))
    used = [name for name in names if any(moment.nbytes.get(name) for moment in timeline)]
    # A category has one colour in all panels; those that the planner lacks are mostly activations.
    colors = [f"C{CATEGORIES.index(name if name in CATEGORIES else 'activations') % 10}" for name in used]
    series = [[moment.nbytes.get(name, 0) / unit for moment in timeline] for name in used]
    axes.stackplot(places, series, labels=used, colors=colors, step="post", linewidth=0)
    totals = [moment.total / unit for moment in timeline]
    peak = max(range(len(totals)), key=totals.__getitem__)
    axes.plot(places[peak], totals[peak], marker="v", color="black", markersize=5)
    for index, moment in enumerate(whole):
        is_turn = moment.event.kind is EventKind.FORWARD_END and moment.event.unit == ""
        if is_turn or moment.event.kind is EventKind.OPTIMIZER_STEP:
            axes.axvline(index, color="grey", linewidth=0.8)
    return places[peak], totals[peak]


def draw_moments(
    panels: Mapping[str, Sequence[Moment]], path: Path, *, title: str, device: Device | None = None
) -> None:
    """Write memory by category over the events of a step, one panel below the other on one scale.

    Args:
        panels: what they are called, and the moments.
        path: as for `draw`.
        title: of all.
        device: whose memory is drawn as a limit.

    Raises:
        ConfigError: as for `draw`.
        MissingExtraError: as for `draw`.
    """
    most = max(moment.total for moments in panels.values() for moment in moments)
    most = max(most, device.memory) if device is not None else most
    unit, word = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    with saved_figure(path, (10, 4 * len(panels))) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (name, moments) in zip(every, panels.items(), strict=True):
            highest = _stack(axes, moments, unit)
            side = "left" if highest[0] < len(moments) / 2 else "right"
            axes.annotate(f" peak {highest[1]:.1f} {word} ", highest, va="bottom", ha=side, fontsize=8)
            if device is not None:
                axes.axhline(device.memory / unit, color="black", linestyle="--", label=device.name)
            axes.set_ylim(0, 1.15 * most / unit)
            axes.set_title(name)
            axes.set_ylabel(word)
            _legend_below(axes)
        every[-1].set_xlabel("events of the step (grey: end of forward, optimizer step)")
        figure.suptitle(title)
