"""What torch"s operators compute with sharded tensors."""

from fullshard.features.dtensor_ops import kernels

__all__ = ["kernels"]
