"""Activation offloading: the tensors that autograd saves in forward wait for backward in host memory."""

from fullshard.features.activation_offload.extension import ActivationOffload

__all__ = ["ActivationOffload"]
