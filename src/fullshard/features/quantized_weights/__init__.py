"""Weights that bitsandbytes has quantised are sharded with their scales."""

from fullshard.features.quantized_weights.scales import QuantizedWeight

__all__ = ["QuantizedWeight"]
