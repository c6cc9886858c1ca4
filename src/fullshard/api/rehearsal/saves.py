"""Saves and loads of a rehearsal. What rank 0 would tell the other ranks about one is what this rank would tell them.

So the id of a save, a plan and a manifest exist at every rank, as if this rank led the others. What only rank 0 holds,
such as full weights, does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.checkpoint import collect
from fullshard.checkpoint.ranks import Ranks
from fullshard.core.imports import Replaced
from fullshard.launch import environment


def replacements() -> dict[Replaced, Callable[..., Any]]:
    """Return what replaces functions of this package's checkpoints and torch's, so that they end at every rank."""
    gather = Replaced.of(Ranks, "gather")
    return {
        **{place: _as_leader(place) for place in (Replaced.of(Ranks, n) for n in ("broadcast", "broadcast_bytes"))},
        gather: lambda ranks, value: gather.torchs(ranks, value) or [value] * ranks.world_size,
        Replaced.of(Ranks, "on_rank_0"): Ranks.together,
        Replaced.of(environment, "run_on_main"): lambda _, function: function(),
        Replaced.of(collect, "structure_problems"): lambda manifest: [],  # other ranks' parts are copies of this one's
        torch_private.parts_checked: _find_no_overlap,
        torch_private.ranks_of_a_save: _lead,
    }


def _as_leader(place: Replaced) -> Callable[..., Any]:
    """Wrap a method of `Ranks`, so that this rank sends what rank 0 would send."""

    @functools.wraps(place.torchs)
    def send(ranks: Ranks, *given: Any) -> Any:
        own, ranks.rank = ranks.rank, 0
        try:
            return place.torchs(ranks, *given)
        finally:
            ranks.rank = own

    return send


def _lead(ranks: Any, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
    """Make this rank the one that plans torch's save, and that tells the others."""
    own = dist.get_rank(group) if use_dist else coordinator_rank
    torch_private.ranks_of_a_save.torchs(ranks, group, use_dist, own)


def _find_no_overlap(*given: Any) -> Any:
    found = torch_private.parts_checked.torchs(*given)
    return [] if isinstance(found, list) else True
