"""Pictures of runs, drawn by matplotlib without a display."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.core.errors import MissingExtraError
from fullshard.core.files import whole_file

_LOOK = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
"""Names may contain any sign, so none is read as mathematics."""
_MOST_POINTS = 1000

Bar = tuple[str, Mapping[str, float]]
"""Its name, and the sizes of its parts."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its points, and the number of its colour."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = "-"


def require_plots() -> None:
    """Raise `MissingExtraError` if no picture can be drawn; to be asked before hours of training, not after."""
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="plots", purpose="drawing pictures of a run")


def plot_losses(
    path: Path,
    *,
    steps: Sequence[int],
    losses: Sequence[float],
    unigram_entropy: float | None = None,
    held_out_loss: float | None = None,
) -> None:
    """Draw the training loss over the steps into a PNG file, whole or not at all.

    Args:
        path: the file to write.
        steps: optimizer steps, in order.
        losses: loss of each step, nats per token.
        unigram_entropy: drawn as a line: the loss of a model that knows only the frequency of each token.
        held_out_loss: drawn as a point at the last step.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = [Line("training loss", steps, losses)]
    if unigram_entropy is not None and steps:
        words = f"unigram entropy ({unigram_entropy:.2f})"
        lines.append(Line(words, [steps[0], steps[-1]], [unigram_entropy] * 2, 7, "--"))
    if held_out_loss is not None and steps:
        lines.append(Line(f"held-out loss ({held_out_loss:.2f})", [steps[-1]], [held_out_loss], 3, "o"))
    with _drawn(8, 4.5) as (figure, axes), whole_file(path) as temporary:
        axes.set_title("Training loss")
        _draw(axes, "loss (nats per token)", lines)
        figure.savefig(temporary, format="png")


def line_chart(unit: str, lines: Sequence[Line]) -> str:
    """Return a chart of lines over steps as the value of a picture's `src`."""
    with _drawn(5, 2.4) as (figure, axes):
        _draw(axes, unit, lines)
        return _as_data(figure)


def bar_chart(
    unit: str, bars: Sequence[tuple[str, Mapping[str, float]]], limit: tuple[str, float] | None = None
) -> str:
    """Return a stacked bar chart as the value of a picture's `src`.

    Args:
        unit: of the sizes.
        bars: from the top. Parts of one name share a colour; parts named by numbers are not in the legend.
        limit: a line across all bars, with its name.
    """
    parts = list(dict.fromkeys(name for _, sizes in bars for name in sizes))
    with _drawn(5, 1.3 + 0.28 * len(bars)) as (figure, axes):
        before = [0.0] * len(bars)
        for number, part in enumerate(parts):
            sizes = [sizes.get(part, 0.0) for _, sizes in bars]
            label = _word(part) if not part.isdigit() else None
            axes.barh(range(len(bars)), sizes, left=before, label=label, color=f"C{number % 10}", height=0.7)
            before = [a + b for a, b in zip(before, sizes, strict=True)]
        if limit is not None:
            axes.axvline(limit[1], color="black", linestyle="--", linewidth=1, label=limit[0])
        axes.set_yticks(range(len(bars)), [_word(name) for name, _ in bars])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        return _as_data(figure)


def _draw(axes: Any, unit: str, lines: Sequence[Line]) -> None:
    for line in lines:
        every = -(-len(line.x) // _MOST_POINTS) or 1
        y = [sum(part) / len(part) for start in range(0, len(line.y), every) if (part := line.y[start : start + every])]
        style = "o" if len(y) == 1 else line.style
        color = f"C{line.color % 10}"
        axes.plot(line.x[::every], y, style, label=_word(line.label), linewidth=1.3, color=color)
    axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(visible=True, alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=8)


@contextmanager
def _drawn(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Have a figure and its axes; the object interface, so that no display is chosen and nothing stays registered."""
    require_plots()
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of signs that a font does not have
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _as_data(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _word(name: str) -> str:
    """Return a name as a picture can show it. Matplotlib hides those that begin with an underscore."""
    printable = "".join(sign if sign.isprintable() else "?" for sign in name[:60])
    return f" {printable}" if printable.startswith("_") else printable
