"""Optimizers of bitsandbytes and torchao, which update plain tensors and can store their state in 4 or 8 bits."""

from fullshard.features.local_optimizers.adapters import Bitsandbytes, Torchao

__all__ = ["Bitsandbytes", "Torchao"]
