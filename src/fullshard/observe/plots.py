"""Draw the charts of a report with matplotlib, without a display."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from fullshard.core.errors import MissingExtraError

_LOOK = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
"""Names may contain any sign, so none is read as mathematics."""
_MOST_POINTS = 1000


class Line(NamedTuple):
    """Holds one line of a chart: its points and its colour number."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = "-"


def require_plots() -> None:
    """Raise `MissingExtraError` if charts cannot be drawn, so that a long training run does not fail at its end."""
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="plots", purpose="drawing charts for a report")


def line_chart(unit: str, lines: Sequence[Line]) -> str:
    """Draw a line chart over steps, and return it as the value for the `src` attribute of an image.

    If a line has very many points, neighbouring points are averaged.
    """
    matplotlib = importlib.import_module("matplotlib")
    buffer = io.BytesIO()
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that a font lacks
        # The object interface selects no display and leaves nothing registered.
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5, 2.4), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            every = -(-len(line.x) // _MOST_POINTS)
            parts = [line.y[start : start + every] for start in range(0, len(line.y), every)]
            y = [sum(part) / len(part) for part in parts]
            # The leading space is needed because matplotlib hides names that begin with an underscore.
            label = "".join(sign if sign.isprintable() else "?" for sign in f" {line.label[:60]}")
            style = "o" if len(y) == 1 else line.style
            axes.plot(line.x[::every], y, style, label=label, linewidth=1.3, color=f"C{line.color % 10}")
        axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(visible=True, alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=8)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
