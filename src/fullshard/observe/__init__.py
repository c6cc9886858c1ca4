"""A run's reports: numbers per step, the places they are written to, and plots of them."""

from fullshard.observe.metrics import StepMetrics, memory_nbytes, reset_memory_peak
from fullshard.observe.plots import plot_losses, require_plots
from fullshard.observe.sinks import JsonlSink, read_metrics
from fullshard.observe.traces import add_rows, marked, merge_traces

__all__ = [
    "JsonlSink",
    "StepMetrics",
    "add_rows",
    "marked",
    "memory_nbytes",
    "merge_traces",
    "plot_losses",
    "read_metrics",
    "require_plots",
    "reset_memory_peak",
]
