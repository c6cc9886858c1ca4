"""Draw the charts of a report with matplotlib, without a display."""

import base64
import importlib
import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.core.errors import MissingExtraError
from fullshard.core.sizes import GIB

_LOOK = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
"""Names may contain any sign, so none is read as mathematics."""
_MOST_POINTS = 1000


class Line(NamedTuple):
    """Holds one line of a chart, and the steps at dotted vertical lines. Only lines of the style `-` are smoothed."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = "-"
    marks: Sequence[float] = ()


def require_plots() -> None:
    """Raise `MissingExtraError` if charts cannot be drawn, so that a long training run does not fail at its end."""
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="plots", purpose="drawing charts for a report")


def rehearsal_chart(found: Mapping[str, Any], target: Path | None = None) -> str:
    """Draw the peaks of a rehearsal's phases, and a step with its links and without. Return it as `line_chart` does."""
    matplotlib, phases, limit = importlib.import_module("matplotlib"), found["phases"], found["memory"] / GIB
    with matplotlib.rc_context({**_LOOK, "svg.hashsalt": "fullshard"}):
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 2.6), layout="constrained")
        memory, time = figure.subplots(1, 2, width_ratios=(3, 1))
        peaks = [[(peak[kind] or 0) / GIB for peak in phases.values()] for kind in ("allocated", "planned")]
        for label, values, left in zip(("measured", "plan"), peaks, (-0.4, 0), strict=True):
            if any(values):
                memory.bar([place + left for place in range(len(phases))], values, 0.4, align="edge", label=label)
        if limit < 3 * max(map(max, peaks)):  # else it would leave no room for the bars
            memory.axhline(limit, color="C3")
        memory.set(ylabel="GiB", title=f"peak of memory (limit: {limit:.1f} GiB)")
        memory.set_xticks(range(len(phases)), phases)
        figure.legend(fontsize=8, loc="outside right upper")
        if (step := found["step_seconds"]) is not None and (exposed := found["exposed_seconds"]) is not None:
            time.bar(["links", "free links"], [1000 * step, 1000 * (step - exposed)], 0.6, color="C2")
        time.set(ylabel="ms", title="step")
        return _image(figure) if target is None else str(figure.savefig(target))


def _image(figure: Any) -> str:
    figure.savefig(buffer := io.BytesIO(), format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of `values` without its bias to 0, like TensorBoard and Adam."""
    sums = accumulate(((1 - weight) * value for value in values), lambda past, value: weight * past + value)
    return [value / (1 - weight**number) for number, value in enumerate(sums, start=1)]


def line_chart(unit: str, lines: Sequence[Line], weight: float = 0.0) -> str:
    """Return a line chart over steps as the `src` of an image. A `weight` adds smoothed lines."""
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that a font lacks
        # The object interface selects no display and leaves nothing registered.
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(4.4, 2.4), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            every = -(-len(line.x) // _MOST_POINTS)
            parts = [line.y[start : start + every] for start in range(0, len(line.y), every)]
            y = [sum(part) / len(part) for part in parts]
            # The leading space is needed because matplotlib hides names that begin with an underscore.
            label = "".join(sign if sign.isprintable() else "?" for sign in f" {line.label[:60]}")
            style, look = "o" if len(y) == 1 else line.style, {"color": f"C{line.color % 10}", "markersize": 4}
            if weight and style == "-":
                axes.plot(line.x[::every], y, style, linewidth=0.7, alpha=0.35, **look)
                y = smoothed(y, weight)
            axes.plot(line.x[::every], y, style, label=label, linewidth=1.5, **look)
            for mark in line.marks[-100:]:
                axes.axvline(mark, linestyle=":", linewidth=1, color=look["color"] if len(lines) > 1 else "0.4")
        axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(visible=True, alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=8)
        return _image(figure)
