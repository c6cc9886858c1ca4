"""Shard weights that bitsandbytes has quantized, together with their scales."""

from fullshard.features.quantized_weights.scales import QuantizedWeight

__all__ = ["QuantizedWeight"]
