"""A run's reports: numbers per step, the places they are written to, and plots of them."""

from fullshard.core.files import whole_file, write_text
from fullshard.observe.metrics import RateMeter, StepMetrics, memory_nbytes, reset_memory_peak
from fullshard.observe.plots import plot_losses, require_plots
from fullshard.observe.sinks import ConsoleSink, JsonlSink, MetricsSink, TensorboardSink, TrackerSink, read_metrics
from fullshard.observe.traces import add_rows, marked, merge_traces

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "MetricsSink",
    "RateMeter",
    "StepMetrics",
    "TensorboardSink",
    "TrackerSink",
    "add_rows",
    "marked",
    "memory_nbytes",
    "merge_traces",
    "plot_losses",
    "read_metrics",
    "require_plots",
    "reset_memory_peak",
    "whole_file",
    "write_text",
]
