"""The dtype of each tensor, by role, in both the engine and the planner. This module does not import torch.

| role | dtype |
|---|---|
| main weight (the sharded parameter) | the stored dtype: `main_dtype` |
| compute weight (the unsharded parameter) | `Dtypes.compute` |
| sum of gradients over ranks | `Dtypes.reduce` |
| main gradient, accumulated over micro-batches | the `wider` of the dtypes of the sum and of the main weight |
| unsharded gradient | the dtype of the sum, or of the compute weight if the sum casts its input: `collected` |
| message | the dtype of the role, unless the message is `packed` |
"""

import re
from dataclasses import dataclass

from fullshard.core.errors import ConfigError

_BY_BITS = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex32", "complex64", "complex128"),
)
"""Dtypes whose names contain the number of bits of an element."""

ITEMSIZES = {"bool": 1} | {name: int(re.findall(r"\d+", name)[0]) // 8 for name in _BY_BITS}
"""Bytes of one element of each dtype."""

FLOATING = frozenset(name for name in ITEMSIZES if "float" in name)
"""Dtypes that a precision policy casts. The others are bytes, integers, or complex."""

HALF = ("bfloat16", "float16")
"""Dtypes in which an optimizer's step loses small updates."""

COMPUTE = {"no": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Compute dtype of each precision mode. None means the stored dtype."""

AUTOCAST = ("bf16", "fp16", "fp8")
"""Precision modes in which models run under autocast to the compute dtype."""


def itemsize(dtype: str) -> int:
    """Return the number of bytes of an element."""
    if dtype not in ITEMSIZES:
        raise ConfigError(f"unknown dtype {dtype!r}", hint=f"use one of {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def wider(one: str, other: str) -> str:
    """Return the floating-point dtype that can represent both, as in torch's type promotion."""
    if itemsize(one) == itemsize(other):
        return one if one == other else "float32"  # neither of bfloat16 and float16 can represent the other
    return max(one, other, key=itemsize)


def main_dtype(stored: str, *, trainable: bool, mode: str) -> str:
    """Return the dtype of a main weight. Trainable half-precision weights become float32 unless the mode is `no`."""
    return "float32" if trainable and mode != "no" and stored in HALF else stored


def collected(compute: str, reduce: str, *, widens: bool) -> str:
    """Return the dtype of an unsharded gradient before others are added: `compute` if the reduction casts it."""
    return compute if widens and wider(compute, reduce) == reduce else reduce


def saves(sent_as: str, dtype: str) -> bool:
    """Return whether sending elements of `dtype` as `sent_as` takes fewer bytes."""
    return itemsize(sent_as) < itemsize(dtype)


def packed(sent_as: str | None, dtype: str) -> str | None:
    """Return `sent_as` if `dtype` is a floating-point dtype and `sent_as` takes fewer bytes, or else None."""
    return sent_as if sent_as is not None and dtype in FLOATING and saves(sent_as, dtype) else None


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a run, by role. If a dtype is None, the rules in `compute` and `reduce` determine it.

    `gather_as` and `reduce_as` are the dtypes in which intervals of weights and gradients are sent, if requested.
    """

    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    gather_as: str | None = None
    reduce_as: str | None = None

    @property
    def sent(self) -> dict[str, str]:
        """Return the dtypes to which messages are packed, keyed by their names in error messages."""
        named = {"gather as": self.gather_as, "reduce as": self.reduce_as}
        return {name: value for name, value in named.items() if value is not None}

    def compute(self, stored: str, *, exact: bool = False, statistics: str | None = None) -> str:
        """Return the dtype of an unsharded parameter that is stored as `stored`; `exact` parameters are never cast.

        A parameter that computes with running statistics takes their dtype, because one kernel uses both, and because
        values that are averaged over a complete run lose too much precision in half precision.
        """
        if self.compute_dtype is None or exact or stored not in FLOATING:
            return stored
        return statistics or self.compute_dtype

    def reduce(self, stored: str) -> str:
        """Return the dtype in which gradients are summed: at least float32 by default. Complex dtypes are kept."""
        if stored.startswith("complex"):
            return stored
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        compute = self.compute(stored)
        return "float32" if itemsize(compute) < itemsize("float32") else compute
