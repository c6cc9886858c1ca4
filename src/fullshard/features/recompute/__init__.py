"""Module forwards that recompute their activations in backward, or are compiled."""

from fullshard.features.recompute.forwards import checkpoint_modules, compile_modules

__all__ = ["checkpoint_modules", "compile_modules"]
