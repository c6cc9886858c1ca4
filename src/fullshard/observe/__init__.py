"""Report on runs: metrics per step and their file, profiles, and an HTML page."""

from fullshard.observe.metrics import JsonlSink, StepMetrics, memory_nbytes, read_metrics, reset_memory_peak
from fullshard.observe.plots import require_plots
from fullshard.observe.traces import marked

__all__ = ["JsonlSink", "StepMetrics", "marked", "memory_nbytes", "read_metrics", "require_plots", "reset_memory_peak"]
