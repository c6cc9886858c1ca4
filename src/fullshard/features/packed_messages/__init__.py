"""Weights and gradients sent in fewer bytes than they have."""

from fullshard.features.packed_messages.packings import PACKINGS

__all__ = ["PACKINGS"]
