"""The ranks' agreement to stop after the same step, because one of them is asked to."""

from fullshard.features.preemption.stop import StopTogether

__all__ = ["StopTogether"]
