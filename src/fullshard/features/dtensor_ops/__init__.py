"""Torch operators on sharded tensors."""

from fullshard.features.dtensor_ops import kernels

__all__ = ["kernels"]
