"""Adapters for torch's own tools: they see whole gradients of a sharded model, or refuse."""

from fullshard.features.torch_tools.install import clip_grad_norm_, clip_grad_value_, install

__all__ = ["clip_grad_norm_", "clip_grad_value_", "install"]
