"""Gradients of several backwards, reduced at once."""

from fullshard.features.accumulation.contexts import AccumulationMethods, no_sync, with_sync

__all__ = ["AccumulationMethods", "no_sync", "with_sync"]
