"""Weights that bitsandbytes has quantised are sharded with their scales."""

from fullshard.features.quantized_weights.kind import QuantizedWeight
from fullshard.features.quantized_weights.scales import (
    dequantised,
    expose_scales,
    is_exact,
    is_to_be_quantised,
    outline,
    quantise,
    whole_shape,
)

__all__ = [
    "QuantizedWeight",
    "dequantised",
    "expose_scales",
    "is_exact",
    "is_to_be_quantised",
    "outline",
    "quantise",
    "whole_shape",
]
