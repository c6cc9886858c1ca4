"""Pictures for a page: SVG that takes the colour of the text around it, so that it suits light and dark alike."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fullshard.observe.plots import require_plots

COLORS = ("#3b7dd8", "#e0702f", "#2f9e62", "#b45fcf", "#c9a227", "#d64a6a", "#4aa8b8", "#8a8f98")
"""Each is told from the others, and from white and black alike."""
_TEXT = "#010203"
"""Stands for the colour of the text while a picture is drawn."""
_MOST_POINTS = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        label: for the legend; empty for none.
        x, y: its points.
        color: its number in `COLORS`.
        dashed: for what was planned and not measured.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    dashed: bool = False


@dataclass(slots=True)
class Chart:
    """Lines over steps.

    Attributes:
        title: what is shown.
        unit: of the values.
        lines: at least one.
    """

    title: str
    unit: str
    lines: list[Line] = field(default_factory=list)

    def svg(self) -> str:
        """The picture."""
        with _figure(self.title, height=2.3) as (figure, written):
            axes = figure.add_subplot()
            for line in self.lines:
                x, y = _thinned(line.x, line.y)
                style = "--" if line.dashed else "-"
                marker = "o" if len(x) == 1 else None
                axes.plot(
                    x, y, style, label=line.label, linewidth=1.4, marker=marker, color=COLORS[line.color % len(COLORS)]
                )
            axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
            axes.set_xlabel("step")
            axes.set_ylabel(self.unit)
            axes.grid(visible=True, alpha=0.2)
            if any(line.label for line in self.lines) and len(self.lines) > 1:
                axes.legend(fontsize=8)
        return written[0]


def owners_svg(title: str, units: Sequence[tuple[str, float]], ranks: int) -> str:
    """Units as bars, each cut into what the ranks own.

    Args:
        title: what is shown.
        units: name and MiB of each.
        ranks: how many share a unit.
    """
    with _figure(title, height=0.7 + 0.28 * len(units)) as (figure, written):
        axes = figure.add_subplot()
        for row, (_, size) in enumerate(units):
            part = size / ranks
            for rank in range(ranks):
                color = COLORS[rank % len(COLORS)]
                axes.barh(row, part, left=rank * part, color=color, height=0.7, linewidth=0)
        axes.set_yticks(range(len(units)), [name for name, _ in units])
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
    return written[0]


def stack_svg(title: str, rows: Sequence[tuple[str, dict[str, float]]], *, limit: tuple[str, float] | None) -> str:
    """Bars that are stacks of categories.

    Args:
        title: what is shown.
        rows: name of each bar, and GiB by category.
        limit: a line across all, with its name.
    """
    categories = list(dict.fromkeys(name for _, sizes in rows for name in sizes))
    with _figure(title, height=1.3 + 0.3 * len(rows)) as (figure, written):
        axes = figure.add_subplot()
        before = [0.0] * len(rows)
        for number, category in enumerate(categories):
            sizes = [sizes.get(category, 0.0) for _, sizes in rows]
            color = COLORS[number % len(COLORS)]
            axes.barh(range(len(rows)), sizes, left=before, label=category, color=color, height=0.7, linewidth=0)
            before = [a + b for a, b in zip(before, sizes, strict=True)]
        if limit is not None:
            axes.axvline(limit[1], color=_TEXT, linestyle="--", linewidth=1, label=limit[0])
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return written[0]


@contextmanager
def _figure(title: str, *, height: float) -> Iterator[tuple[Any, list[str]]]:
    """A figure to draw into; the list has its SVG afterwards."""
    require_plots()
    matplotlib = importlib.import_module("matplotlib")
    salt = re.sub(r"\W+", "-", title)  # names inside pictures of one page must differ
    look = {
        "svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9, "font.family": "sans-serif",
        "text.color": _TEXT, "axes.labelcolor": _TEXT, "axes.edgecolor": _TEXT, "xtick.color": _TEXT,
        "ytick.color": _TEXT, "grid.color": _TEXT, "axes.facecolor": "none", "figure.facecolor": "none",
        "legend.facecolor": "none", "legend.edgecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    written: list[str] = []
    with matplotlib.rc_context(look):
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(4.6, height), layout="constrained")
        yield figure, written
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    text = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{salt}"', text, count=1)
    # Ids of markers and clips are the same in pictures that have the same; each page has many pictures.
    written.append(re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{salt}-", text))


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `_MOST_POINTS` points, each the mean of its neighbours."""
    width = -(-len(x) // _MOST_POINTS)
    if width <= 1:
        return list(x), list(y)
    starts = range(0, len(x), width)
    return [x[start] for start in starts], [sum(part) / len(part) for s in starts if (part := y[s : s + width])]
