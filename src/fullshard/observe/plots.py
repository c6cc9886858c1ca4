"""Pictures of a run, drawn without a display."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fullshard.core.errors import MissingExtraError
from fullshard.core.files import whole_file

_PURPOSE = "drawing the loss curve"


def require_plots() -> None:
    """Raises `MissingExtraError` if no picture can be drawn; to be asked before hours of training, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", extra="plots", purpose=_PURPOSE)


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
        unigram_entropy: drawn as a line: what a model that knows only how frequent each token is would reach.
        held_out_loss: drawn as a point at the last step.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_plots()
    # The object interface with the Agg canvas, so that no global back end is chosen and nothing stays registered.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, label="training loss", linewidth=1.2)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, label=f"unigram entropy ({unigram_entropy:.2f})", color="gray", linestyle="--")
    if held_out_loss is not None and steps:
        axes.plot([steps[-1]], [held_out_loss], "o", label=f"held-out loss ({held_out_loss:.2f})", color="C3")
    axes.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training loss")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    with whole_file(path) as temporary:
        canvas.print_png(str(temporary))
