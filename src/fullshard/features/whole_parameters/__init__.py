"""Whole parameters outside of forward and backward."""

from fullshard.features.whole_parameters.contexts import unsharded

__all__ = ["unsharded"]
