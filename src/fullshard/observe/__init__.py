"""A run's reports: numbers per step, the file that holds them, profiles, and a page about runs."""

from fullshard.observe.metrics import JsonlSink, StepMetrics, memory_nbytes, read_metrics, reset_memory_peak
from fullshard.observe.plots import require_plots
from fullshard.observe.traces import marked

__all__ = [
    "JsonlSink",
    "StepMetrics",
    "marked",
    "memory_nbytes",
    "read_metrics",
    "require_plots",
    "reset_memory_peak",
]
