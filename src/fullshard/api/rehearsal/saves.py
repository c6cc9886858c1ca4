"""Saves and loads of a rehearsal. What rank 0 would tell the other ranks about one is what this rank would tell them.

So the id of a save, a plan and a manifest exist at every rank, as if this rank led the others. What only rank 0 holds,
such as full weights, does not.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from fullshard.api import torch_private
from fullshard.checkpoint import collect, save
from fullshard.checkpoint.format import Manifest
from fullshard.checkpoint.ranks import Ranks
from fullshard.core.imports import Replaced
from fullshard.launch import environment

done: dict[str, dict[str, Any]] = {}
"""The number of saves, their seconds in the main thread and in others, and the bytes written, by who has saved."""

_here = threading.local()


def replacements() -> dict[Replaced, Callable[..., Any]]:
    """Return what replaces functions of this package's checkpoints and torch's, so that they end at every rank."""
    gather = Replaced.of(Ranks, "gather")
    return {
        **{place: _as_leader(place) for place in (Replaced.of(Ranks, n) for n in ("broadcast", "broadcast_bytes"))},
        gather: lambda ranks, value: gather.torchs(ranks, value) or [value] * ranks.world_size,
        Replaced.of(Ranks, "on_rank_0"): Ranks.together,
        Replaced.of(environment, "run_on_main"): lambda _, function: function(),
        Replaced.of(collect, "structure_problems"): lambda manifest: [],  # other ranks' parts are copies of this one's
        Replaced.of(Manifest, "file_name"): _file_here(Replaced.of(Manifest, "file_name")),
        **_timed(),
        torch_private.copies_divided: _divide,
        torch_private.parts_checked: _find_no_overlap,
        torch_private.ranks_of_a_save: _lead,
    }


def _file_here(place: Replaced) -> Callable[..., str]:
    """Wrap a method of `Manifest`, so that a rehearsed checkpoint gives this rank's file in place of a missing one."""

    @functools.wraps(place.torchs)
    def find(manifest: Manifest, kind: str, rank: int) -> str:
        name: str = place.torchs(manifest, kind, rank)
        return name if name in manifest.files else next((n for n in manifest.files if n.startswith(f"{kind}-")), name)

    return find


def _timed() -> dict[Replaced, Callable[..., Any]]:
    """Return what replaces the functions that save. The flag says which of them is called once per save."""
    ours, torchs = "fullshard", "torch.distributed.checkpoint"
    places = [
        (ours, Replaced.of(save, "prepare_save"), False),
        (ours, Replaced.of(save, "prepare_parts"), False),
        (ours, Replaced.of(save.Pending, "complete"), True),
        (torchs, Replaced.of(state_dict_saver, "async_save"), False),
        (torchs, Replaced.of(state_dict_saver, "save"), True),
        ("torch.save", Replaced.of(torch, "save"), True),
    ]
    return {place: _time(kind, place, is_all) for kind, place, is_all in places}


def _time(kind: str, place: Replaced, is_all: bool) -> Callable[..., Any]:
    """Wrap a function that saves. Add its time, and the bytes that the process writes during it, to `done`."""

    @functools.wraps(place.torchs)
    def run(*given: Any, **named: Any) -> Any:
        if getattr(_here, "is_saving", False):
            return place.torchs(*given, **named)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the work before it is not the save's
        begin, before, _here.is_saving = time.perf_counter(), _written(), True
        try:
            return place.torchs(*given, **named)
        finally:
            _here.is_saving = False
            in_main = threading.current_thread() is threading.main_thread()
            row = done.setdefault(kind, {"count": 0, "seconds": 0.0, "background_seconds": 0.0, "nbytes": 0})
            row["count"] += is_all
            row["seconds" if in_main else "background_seconds"] += time.perf_counter() - begin
            row["nbytes"] += _written() - before

    return run


def _written() -> int:
    """Return how many bytes this process has written to files."""
    return int(psutil.Process().io_counters().write_chars)


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


def _divide(plans: list[Any], *given: Any, **named: Any) -> list[Any]:
    """Divide what several ranks hold among them. Parts of a tensor are copies here, but differ between real ranks."""
    items, divide = plans[0].items, torch_private.copies_divided.torchs
    holders = [_holders(item, len(plans)) for item in items]
    kept: list[list[Any]] = [[] for _ in plans]
    for count in dict.fromkeys(holders):
        shared = [item for item, own in zip(items, holders, strict=True) if own == count]
        divided = divide([dataclasses.replace(plan, items=shared) for plan in plans[:count]], *given, **named)
        for rank, own in enumerate(kept):
            own += divided[rank * count // len(plans)].items
    return [dataclasses.replace(plan, items=own) for plan, own in zip(plans, kept, strict=True)]


def _holders(item: Any, ranks: int) -> int:
    """Return how many of the ranks hold what an item of a plan saves."""
    if (data := item.tensor_data) is None or data.chunk is None or not data.size.numel():
        return ranks
    part, whole = int(data.chunk.sizes.numel()), int(data.size.numel())
    return min(ranks, max(1, round(ranks * part / whole)))


def _find_no_overlap(*given: Any) -> Any:
    found = torch_private.parts_checked.torchs(*given)
    return [] if isinstance(found, list) else True
