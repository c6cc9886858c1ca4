"""Gradients that are not finite: an error, or a step that is left out, the same on all ranks."""

from fullshard.features.nonfinite.guard import NonFiniteGuard, OnNonFinite, was_left_out
from fullshard.features.nonfinite.methods import NonFiniteMethods

__all__ = ["NonFiniteGuard", "NonFiniteMethods", "OnNonFinite", "was_left_out"]
