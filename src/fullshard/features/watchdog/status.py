"""Status messages in the job's store, with which ranks that make no progress tell the others where they are."""

import json
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist

from fullshard.comm import torch_private

PROCESS, STATUS = "fullshard/process/{}", "fullshard/status/{}"
"""Keys in the store by rank, for its identity and for its status once that has not changed for a while."""
_NAMED = 3
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"

Status = dict[str, Any]
"""A rank's message: `what`, `step`, `is_waiting`, `here` (lines, innermost first), `busy`, `beat`, and, if any, the
torch `collective` that a script has called and the `worker` of a data loader that it waits for. `group`: number and
digest of the ranks it waits with. `has_ended`: its process is ending."""


def read_statuses(own: int) -> dict[int, Status]:
    """Return the status of every rank except this one. The status is empty if a rank has not written one."""
    others = [rank for rank in range(dist.get_world_size()) if rank != own]
    return dict(zip(others, read([STATUS.format(rank) for rank in others]), strict=True))


def read(keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values under these keys. The keys stay in the store, so that other ranks can read them, too."""
    store = torch_private.default_store()
    if not keys or store.check(list(keys)):
        there = list(keys)  # the usual case: two messages for any number of ranks
    else:
        there = [key for key in keys if store.check([key])]
    found = dict(zip(there, store.multi_get(there) if there else [], strict=True))
    return [json.loads(found[key]) if key in found else {} for key in keys]


def collective(frame: FrameType | None) -> str:
    """Return the name of the torch collective that runs in `frame`, or an empty string if none does."""
    code = None if frame is None else frame.f_code
    is_one = code is not None and code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_")
    return code.co_name if code is not None and is_one else ""


def waits(status: Status) -> bool:
    """Return whether a rank is alive and is waiting for other ranks."""
    return bool(status["is_alive"] and (status.get("is_waiting") or status.get("collective")))


def parted(statuses: dict[int, Status]) -> str:
    """Return an error message if all ranks are waiting, but in different places, or else an empty string."""
    places: dict[tuple[str, int], list[int]] = {}
    for rank, status in sorted(statuses.items()):
        what = status.get("what") if status.get("is_waiting") else status.get("collective")
        if not what:
            return ""
        places.setdefault((what, status["step"]), []).append(rank)
    told = "; ".join(described(ranks[0], statuses[ranks[0]]) for ranks in list(places.values())[:_NAMED])
    alone = [ranks[0] for ranks in places.values() if len(ranks) == 1 < len(statuses) - 1]
    if len(alone) == 1:  # first, because texts are cut at the end
        told = f"rank {alone[0]} is alone, the others are together: {told}"
    return f"ranks are out of step: {told}" if len(places) > 1 else ""


def met(statuses: dict[int, Status]) -> str:
    """Return an error message if all ranks are alive and waiting, or else an empty string."""
    if not all(status["is_alive"] and status.get("is_waiting") for status in statuses.values()):
        return ""
    told = "; ".join(described(rank, status) for rank, status in sorted(statuses.items())[:_NAMED])
    return f"ranks are out of step: all ranks wait in one place after different units, or the network is down: {told}"


def ended() -> str:
    """Return a description of the ranks that have ended and what they did last, or an empty string if none have."""
    gone = {rank: status for rank, status in read_statuses(dist.get_rank()).items() if status.get("has_ended")}
    return named(gone) if gone else ""


def missing(statuses: dict[int, Status]) -> dict[int, Status]:
    """Return the statuses of the ranks that are not waiting, by rank."""
    return {rank: status for rank, status in statuses.items() if not status.get("is_waiting")}


def named(statuses: dict[int, Status]) -> str:
    """Return a description of the ranks that are not waiting, or of all ranks if all of them wait."""
    if not statuses:
        return "the rank is unknown because the job's store does not answer"
    late = missing(statuses) or statuses
    lines = [described(rank, status) for rank, status in list(late.items())[:_NAMED]]
    return "; ".join(lines) + (f"; and {len(late) - _NAMED} more" if len(late) > _NAMED else "")


def described(rank: int, status: Status) -> str:
    """Return a description of a rank: its process, and what it is doing or did last."""
    store, key = torch_private.default_store(), PROCESS.format(rank)
    name = f"rank {rank}" + (f" ({store.get(key).decode()})" if store.check([key]) else "")
    if "what" not in status:
        return f"{name} gives no sign of life, or continues elsewhere"
    step = f" (step {status['step']})" if status["step"] else ""
    last = f"it did {status['what'] or 'nothing yet'}{step}"
    if status.get("has_ended"):
        return f"{name} has ended; {last} last"
    where = ", called from ".join(status["here"])
    if status["is_waiting"]:
        return f"{name} waits in {status['what']}{step}" + (f", at {where}" if where else "")
    if not status["is_alive"]:
        return f"{name} no longer gives a sign of life; {last}"
    does = f"waits in torch's {status['collective']}" if status["collective"] else "is running"
    does = f"waits for {status['worker']} of its data loader" if status.get("worker") else does
    since = f"; its last wait was in step {status['step']}" if status["step"] else ""
    return f"{name} {status['busy'] or does}, at {where or 'an unknown place'}{since}"


def are_busy(statuses: dict[int, Status]) -> bool:
    """Return whether all of these ranks are doing work that may take long. Return False if there are none."""
    return bool(statuses) and all(status.get("busy") and status["is_alive"] for status in statuses.values())
