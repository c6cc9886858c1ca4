"""Describe the forms in which frozen weights are stored and sent as codes and scales, without importing torch."""

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError

CPU_PIECE_NUMEL = 2**20
"""The number of elements that a CPU encodes or decodes at a time, a multiple of every atom."""

DEVICE_PIECE_NUMEL = 2**24
"""The number of elements that an accelerator encodes or decodes at a time, with several kernels per piece."""


def ranks_at_once(shard_numel: int, ranks: int, *, is_cpu: bool) -> int:
    """Return how many ranks' intervals to decode together. Small intervals would take longer if decoded separately."""
    return min(ranks, max(1, (2**14 if is_cpu else 2**22) // max(1, shard_numel)))


class Part(NamedTuple):
    """One of the flat tensors that form a stored weight. Each item represents `elements` elements of the weight."""

    name: str
    dtype: str
    elements: int

    def numel(self, elements: int) -> int:
        """Return the number of items for `elements` elements of a weight, rounded up."""
        return -(-elements // self.elements)


@dataclass(frozen=True)
class StoredForm:
    """A form in which weights are stored. The parts of a weight are adjacent in memory, in the order of `parts`."""

    name: str
    # The codes, the scales, and, if the scales are stored as codes too, the parts from which they are decoded.
    parts: tuple[Part, ...]

    @cached_property
    def atom(self) -> int:
        """Return the number of elements that must stay on the same rank, so that no item of any part is divided."""
        return max(part.elements for part in self.parts)

    @property
    def block(self) -> int:
        """Return the number of elements that share a scale."""
        return self.parts[1].elements

    def nbytes(self, elements: int) -> int:
        """Return the number of bytes in which `elements` elements are stored."""
        return sum(part.numel(elements) * itemsize(part.dtype) for part in self.parts)


_GROUP = 256
"""The number of first-level scales that share a second-level scale."""


def _four_bits(name: str, block: int) -> tuple[StoredForm, StoredForm]:
    codes = Part("codes", "uint8", 2)
    plain = StoredForm(name, (codes, Part("scales", "float32", block)))
    # Other libraries have one offset per weight. Here each group has an offset, so that it is self-contained.
    groups = (Part(part, "float32", block * _GROUP) for part in ("scales_of_scales", "offsets"))
    return plain, StoredForm(f"{name}-double", (codes, Part("scales", "uint8", block), *groups))


FORMS: dict[str, StoredForm] = {
    form.name: form
    for form in (
        *_four_bits("nf4", 64),
        *_four_bits("fp4", 64),
        # The smallest of the usual block sizes for which scales take less than 2 % of the size of the codes.
        StoredForm("int8", (Part("codes", "uint8", 1), Part("scales", "float32", 256))),
        # The Open Compute Project's microscaling format, which gpt-oss uses for its experts.
        StoredForm("mxfp4", (Part("codes", "uint8", 2), Part("scales", "uint8", 32))),
        # DeepSeek-V3 has one scale per 128 x 128 elements; here each row of such a block has a copy.
        StoredForm("fp8", (Part("codes", "float8_e4m3fn", 1), Part("scales", "float32", 128))),
    )
}
"""All forms, by name."""


def form_of(name: str) -> StoredForm:
    """Return the form with this name. Raise `ConfigError` if the name is unknown."""
    if name not in FORMS:
        near = difflib.get_close_matches(name, FORMS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown storage form {name!r}", hint=f"{hint}Use one of {', '.join(FORMS)}")
    return FORMS[name]
