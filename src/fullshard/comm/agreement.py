"""Small messages between hosts, to compare what ranks do before a difference is a hang or a wrong number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import Waiting
from fullshard.core.errors import CommunicationError

SAME_MODEL = "build the same model from the same configuration, and load the same weights, on every rank"
"""A hint."""


def all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value`, in the order of the group; None stands for this rank alone. A collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    without = torch_private.without_transforms()  # those have no message's memory
    with Waiting("comparing notes", [group]), without, torch_private.uncounted():
        dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(
    lines: Sequence[str], group: dist.ProcessGroup | None, *, what: str, hint: str = SAME_MODEL
) -> None:
    """Compare `lines` over the ranks of a group, by digest. A collective.

    The error, on every rank, names the first rank that differs from the first one, and the first line that does.
    """
    digests = all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    different = [place for place, other in enumerate(digests) if other != digests[0]]
    if group is None or not different:
        return
    everything = all_gather_object(list(lines), group)
    one, other_one = (dist.get_process_group_ranks(group)[place] for place in (0, different[0]))
    pairs = zip_longest(everything[0], everything[different[0]], fillvalue="(nothing)")
    first, other = next((a, b) for a, b in pairs if a != b)
    raise CommunicationError(
        f"ranks disagree about {what}: rank {one} has [{first}], rank {other_one} has [{other}] ({len(different)} "
        f"of {len(digests)} ranks differ from rank {one})",
        hint=hint,
    )
