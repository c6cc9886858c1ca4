"""Changes to the forward of modules: recomputing activations in backward, and compilation."""

from fullshard.features.recompute.forwards import checkpoint_modules, compile_modules, is_checkpointed

__all__ = ["checkpoint_modules", "compile_modules", "is_checkpointed"]
