"""Weights that bitsandbytes has quantised are sharded with their scales."""

from fullshard.features.quantized_weights.kind import QuantizedWeight

__all__ = ["QuantizedWeight"]
