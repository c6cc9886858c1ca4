"""A picture of a plan: memory over a step by category."""

from __future__ import annotations

from pathlib import Path

from fullshard.core.errors import ConfigError
from fullshard.core.events import EventKind
from fullshard.core.files import whole_file
from fullshard.core.imports import import_extra
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Plan
from fullshard.plan.memory import CATEGORIES

_FORMATS = (".png", ".svg", ".pdf")
_MOST_MOMENTS = 600
"""Most moments in a picture. Of more, it has the fullest of each stretch, or neighbouring bars make a moire."""


def draw(plan: Plan, path: Path) -> None:
    """Write memory over a step into one file."""
    whole, device = plan.memory.timeline, plan.cluster.device
    stretch = -(-len(whole) // _MOST_MOMENTS)
    places = [
        max(range(first, min(first + stretch, len(whole))), key=lambda place: whole[place].total)
        for first in range(0, len(whole), stretch)
    ]
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: cannot draw into this kind of file", hint=f"use one of {', '.join(_FORMATS)}")
    matplotlib = import_extra("matplotlib", extra="plots", purpose="drawing a plan")
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure = Figure(figsize=(10, 4), layout="constrained")
        axes = figure.subplots()
        names = [name for name in CATEGORIES if any(whole[place].nbytes.get(name) for place in places)]
        series = [[whole[place].nbytes.get(name, 0) / GIB for place in places] for name in names]
        axes.stackplot(places, series, labels=names, step="post", linewidth=0)
        peak = max(places, key=lambda place: whole[place].total)
        most, side = whole[peak].total / GIB, "left" if peak < len(whole) / 2 else "right"
        axes.plot(peak, most, marker="v", color="black", markersize=5)
        axes.annotate(f" peak {most:.1f} GiB ", (peak, most), va="bottom", ha=side, fontsize=8)
        for index, (event, _) in enumerate(whole):
            if event.kind is EventKind.OPTIMIZER_STEP or (event.kind is EventKind.FORWARD_END and not event.unit):
                axes.axvline(index, color="grey", linewidth=0.8)
        axes.axhline(device.memory / GIB, color="black", linestyle="--", label=device.name)
        axes.set_ylim(0, 1.15 * max(most, device.memory / GIB))
        axes.set_title(f"{plan.memory.needed / GIB:.1f} GiB with what the allocator cannot use")
        axes.set_ylabel("GiB")
        axes.set_xlabel("events of the step (grey: end of forward, optimizer step)")
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
        figure.suptitle(f"{plan.model.name} on {plan.cluster}: memory of one rank over one step")
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format=path.suffix[1:].lower())
