"""Each tensor's dtype in each role, by name: the engine and the planner both ask here. No torch.

| role | dtype |
|---|---|
| main weight (the sharded parameter) | as it is stored: `main_dtype` |
| compute weight (the unsharded parameter) | `Dtypes.compute` |
| the sum of gradients over ranks | `Dtypes.reduce` |
| main gradient, accumulated over micro-batches | `wider` of the sum's and the main weight's |
| unsharded gradient | that of the sum; where the sum casts what it reads, the compute weight's: `collected` |
| a message | the role's own, unless it is `packed` |
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.core.errors import ConfigError

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element of each dtype."""

FLOATING = frozenset(name for name in ITEMSIZES if "float" in name)
"""Dtypes that a precision policy casts; the others are bytes with a meaning of their own, or complex."""

HALF = ("bfloat16", "float16")
"""Dtypes in which an optimizer's step loses small updates."""

COMPUTE: dict[str, str | None] = {"no": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Compute dtype of each precision mode; None: as stored."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    if dtype not in ITEMSIZES:
        raise ConfigError(f"unknown dtype {dtype!r}", hint=f"use one of {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def wider(one: str, other: str) -> str:
    """Return the floating-point dtype that holds both, as torch promotes them."""
    if itemsize(one) == itemsize(other):
        return one if one == other else "float32"  # bfloat16 and float16: neither holds the other
    return max(one, other, key=itemsize)


def main_dtype(stored: str, *, trainable: bool, mode: str) -> str:
    """Return the main weights' dtype for `stored`: float32 for half precision, in every mode except `no`."""
    return "float32" if trainable and mode != "no" and stored in HALF else stored


def collected(compute: str, reduce: str, *, widens: bool) -> str:
    """Return the dtype in which the unsharded gradient is collected until something is added to it.

    It is the parameter's dtype, in which autograd makes gradients, if the reduction `widens`, that is, casts its input.
    """
    return compute if widens and wider(compute, reduce) == reduce else reduce


def saves(sent_as: str, dtype: str) -> bool:
    """Return whether sending elements of `dtype` as `sent_as` takes fewer bytes."""
    return itemsize(sent_as) < itemsize(dtype)


def packed(sent_as: str | None, dtype: str) -> str | None:
    """Return the dtype that `dtype` is sent as if `sent_as` is asked for; None: as it is, like all non-floats."""
    return sent_as if sent_as is not None and dtype in FLOATING and saves(sent_as, dtype) else None


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a run, by role; None leaves a role to the rule in `compute` and `reduce`.

    `gather_as` and `reduce_as` are what intervals of weights and of gradients are sent as, if that is asked for.
    """

    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    gather_as: str | None = None
    reduce_as: str | None = None

    @property
    def sent(self) -> dict[str, str]:
        """Return the dtypes of what is sent in fewer bytes, by its name in messages."""
        named = {"gather as": self.gather_as, "reduce as": self.reduce_as}
        return {name: value for name, value in named.items() if value is not None}

    def compute(self, stored: str, *, exact: bool = False, statistics: str | None = None) -> str:
        """Return the dtype of an unsharded parameter that is stored as `stored`; `exact` ones are never cast.

        One that computes with running statistics takes their dtype: one kernel takes both, and what is averaged over a
        whole training loses too much in half precision.
        """
        if self.compute_dtype is None or exact or stored not in FLOATING:
            return stored
        return statistics or self.compute_dtype

    def reduce(self, stored: str) -> str:
        """Return the dtype that sums such a parameter's gradients: at least float32 unless told. Complex: as stored."""
        if stored.startswith("complex"):
            return stored
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        compute = self.compute(stored)
        return "float32" if itemsize(compute) < itemsize("float32") else compute
