"""Replacements that make torch's own tools use complete gradients of a sharded model, or else raise an error."""

from fullshard.features.torch_tools.install import clip_grad_norm_, clip_grad_value_, install

__all__ = ["clip_grad_norm_", "clip_grad_value_", "install"]
