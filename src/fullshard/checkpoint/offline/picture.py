"""A picture in text of which rank owns what: one line per part of the model, one letter per share of its elements."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from fullshard.checkpoint.format import TensorRecord
from fullshard.checkpoint.verify import pieces_of

_DIGITS = string.digits + string.ascii_lowercase + string.ascii_uppercase
_MAX_ROWS = 40
_WIDTH = 48
"""Letters of a line."""


def ownership(records: Mapping[str, TensorRecord]) -> list[tuple[str, str]]:
    """Return the lines of the picture: a part of the model, and the owners along its elements.

    Args:
        records: with pieces. Rank 10 is `a`, rank 36 is `A`; above 61 ranks repeat.
    """
    groups: dict[str, list[TensorRecord]] = {}
    for name, record in records.items():
        groups.setdefault(_part(name), []).append(record)
    if len(groups) > _MAX_ROWS:  # repeated layers look alike
        kept, every = list(groups), -(-len(groups) // _MAX_ROWS)
        groups = {part: groups[part] for part in kept[::every]}
    return [(part, _line(members)) for part, members in groups.items() if any(r.numel for r in members)]


def rank_letter(rank: int) -> str:
    """Return the letter of a rank in the picture."""
    return _DIGITS[rank % len(_DIGITS)]


def _part(name: str) -> str:
    """Return the layer of a tensor, or its module where there are no numbered layers."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name.rpartition(".")[0] or name


def _line(members: list[TensorRecord]) -> str:
    total = sum(record.numel for record in members)
    edges: list[tuple[int, int]] = []  # (end, rank), in the order of the elements
    start = 0
    for record in members:
        edges += [(start + piece.interval.stop, piece.rank) for piece in pieces_of(record)]
        start += record.numel
    letters, at = [], 0
    for column in range(_WIDTH):
        middle = (2 * column + 1) * total // (2 * _WIDTH)
        while edges[at][0] <= middle:
            at += 1
        letters.append(rank_letter(edges[at][1]))
    return "".join(letters)
