"""Formats and calculates sizes. GiB = 2**30 bytes and GB = 10**9 bytes; fullshard always prints GiB with its unit."""

import math
import re

from fullshard.core.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

LONG_NBYTES = 2**25
"""The size from which glibc maps a tensor at each allocation (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c). The kernel then
clears its pages, which costs more than it saves."""

SUM_BLOCK_NBYTES = 512 * KIB
"""The bytes that a CPU sums at a time, few enough to stay in the cache until they are divided and checked."""


def sum_blocks(terms: int, *, is_cast: bool) -> int:
    """Return how many memory blocks a sum needs: one per tree level, plus one for casts, or 0 for two uncast terms."""
    return (terms - 1).bit_length() + is_cast if is_cast or terms > 2 else 0


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes in the largest binary unit that keeps the value at or above 1, as in `1.50 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def format_count(count: float) -> str:
    """Format a count of parameters or tokens, as in `124.4 M`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:g}"


def parse_count(text: str) -> float | None:
    """Parse text such as `124.4 M`, `7B`, or `15e9`. Return None for any other text or if the number is too large."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()]
    return count if math.isfinite(count) else None


PACKED_BLOCK_NUMEL = 256
"""The number of elements that share a scale when they are sent as int8."""


def packed_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a message: elements and, if `itemsize` is 1, scales, each padded to a multiple of 16."""
    scales = 4 * -(-numel // PACKED_BLOCK_NUMEL) if itemsize == 1 else 0
    return round_up(itemsize * numel, 16) + round_up(scales, 16)


def all_reduce_nbytes(nbytes: int, ranks: int) -> int:
    """Return the number of bytes that each rank sends in an all-reduce of `nbytes` bytes over `ranks` ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def parse_size(size: int | str) -> int:
    """Convert a number of bytes, or text such as `5GB` (10**9) or `5GiB` (2**30), or raise `ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B)\s*", str(size), re.IGNORECASE)
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else int(size) if str(size).isdigit() else 0
    if nbytes < 1:
        raise ConfigError(
            f"the size {size!r} cannot be parsed", hint="use a number of bytes, or text such as 5GB or 500MiB"
        )
    return nbytes
