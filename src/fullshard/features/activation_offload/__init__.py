"""What autograd saves in forward waits for backward in host memory."""

from fullshard.features.activation_offload.extension import ActivationOffload

__all__ = ["ActivationOffload"]
