"""What torch does with sharded tensors: its operators, and the methods of its DTensor."""

from fullshard.features.dtensor_ops import kernels
from fullshard.features.dtensor_ops.methods import add_methods

__all__ = ["kernels"]

add_methods()
