"""Torch operators and DTensor methods for sharded tensors."""

from fullshard.features.dtensor_ops import kernels
from fullshard.features.dtensor_ops.methods import add_methods

__all__ = ["kernels"]

add_methods()
