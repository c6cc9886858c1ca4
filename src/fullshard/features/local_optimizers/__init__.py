"""Optimizers of bitsandbytes and torchao, which update plain tensors and may keep their state in 4 or 8 bits."""

from fullshard.features.local_optimizers.adapters import TORCHAO_BITS, TORCHAO_SIGNED, Bitsandbytes, Torchao, is_of
from fullshard.features.local_optimizers.coded import decode, encode
from fullshard.features.local_optimizers.lent import local_parameter

__all__ = [
    "TORCHAO_BITS",
    "TORCHAO_SIGNED",
    "Bitsandbytes",
    "Torchao",
    "decode",
    "encode",
    "is_of",
    "local_parameter",
]
