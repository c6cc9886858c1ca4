"""Messages in the job's store, in which ranks that have not moved for a while tell waiting ranks where they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist

from fullshard.comm import torch_private

PROCESS, WORD = "fullshard/process/{}", "fullshard/place/{}"
"""Keys in the store, by rank: its identity, and its place if that has not changed for a while."""
_NAMED = 3
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"

Word = dict[str, Any]
"""A rank's message: `what`, `step`, `is_waiting`, `here` (functions, the innermost first), `busy`, `beat`, and the
`collective` of torch's that a script has called, which waits for others, too. `is_for_all`: it waits, outside a step,
for every rank of the job; `come_to`: how much it has noted in each track; `has_ended`: its process ends."""


def read_words(own: int) -> dict[int, Word]:
    """Return those of all ranks but this one."""
    others = [rank for rank in range(dist.get_world_size()) if rank != own]
    return dict(zip(others, read([WORD.format(rank) for rank in others]), strict=True))


def read(keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the store's value under each key, and leave it there: without it another reader would wait."""
    store = torch_private.default_store()
    if not keys or store.check(list(keys)):
        there = list(keys)  # as nearly always: two messages, however many ranks there are
    else:
        there = [key for key in keys if store.check([key])]
    found = dict(zip(there, store.multi_get(there) if there else [], strict=True))
    return [json.loads(found[key]) if key in found else {} for key in keys]


def collective(frame: FrameType | None) -> str:
    """Return the torch function of the innermost frame, if it sends or receives."""
    code = None if frame is None else frame.f_code
    is_one = code is not None and code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_")
    return code.co_name if code is not None and is_one else ""


def waits(word: Word) -> bool:
    """Return whether a rank is seen to wait for others."""
    return bool(word["is_alive"] and (word.get("is_waiting") or word.get("collective")))


def parted(words: dict[int, Word]) -> str:
    """Return which ranks wait for each other for ever: one in a step, one for all ranks before it begins that step."""
    are_waiting = all(word.get("is_waiting") or word.get("collective") for word in words.values())
    for before, word in words.items() if are_waiting else ():
        come = word["come_to"] if word["is_for_all"] else {}
        for rank, other in words.items():
            further = [name for name, count in come.items() if 0 <= count < other["come_to"].get(name, 0)]
            if further and not other["is_for_all"]:
                return f"ranks are out of step: {described(before, word)}; {described(rank, other)}"
    return ""


def ended() -> str:
    """Return which ranks have ended, and how far they had come."""
    gone = {rank: word for rank, word in read_words(dist.get_rank()).items() if word.get("has_ended")}
    return named(gone) if gone else ""


def missing(words: dict[int, Word]) -> dict[int, Word]:
    """Return those of ranks that do not wait."""
    return {rank: word for rank, word in words.items() if not word.get("is_waiting")}


def named(words: dict[int, Word]) -> str:
    """Name the ranks that are waited for, and what they do: those that do not wait, else all."""
    if not words:
        return "which one cannot be said, for the job's store does not answer"
    late = missing(words) or words
    lines = [described(rank, word) for rank, word in list(late.items())[:_NAMED]]
    return "; ".join(lines) + (f"; and {len(late) - _NAMED} more" if len(late) > _NAMED else "")


def described(rank: int, word: Word) -> str:
    """Describe a rank: its identity, and what it does."""
    store, key = torch_private.default_store(), PROCESS.format(rank)
    name = f"rank {rank}" + (f" ({store.get(key).decode()})" if store.check([key]) else "")
    if "what" not in word:
        return f"{name} gives no sign of life, or goes on elsewhere"
    step = f" (step {word['step']})" if word["step"] else ""
    if word.get("has_ended"):
        return f"{name} has ended; it did {word['what'] or 'nothing yet'}{step} last"
    if word["is_waiting"]:
        return f"{name} waits in {word['what']}{step}"
    if not word["is_alive"]:
        return f"{name} gives no sign of life any more; it did {word['what'] or 'nothing yet'}{step}"
    where = ", called from ".join(word["here"]) or "an unknown place"
    does = f"waits in torch's {word['collective']}" if word["collective"] else "is running"
    return f"{name} {word['busy'] or does}, at {where}; it did {word['what'] or 'nothing yet'}{step} before"


def are_busy(words: dict[int, Word]) -> bool:
    """Return whether there are any, and all of them do work that may take long."""
    return bool(words) and all(word.get("busy") and word["is_alive"] for word in words.values())
