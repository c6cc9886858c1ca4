"""Auto reshard: keep as many units unsharded between forward and backward as fit in memory.

A unit that stays unsharded does not need another all-gather in backward. The units that run last in forward are chosen,
because backward needs them first, so they occupy memory for the shortest time. The budget is measured at the beginning
of the third step, when the optimizer state and the activations have been allocated.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fullshard.comm.device import counts_memory
from fullshard.core.errors import ConfigError
from fullshard.core.schedule import SPENT, count_kept
from fullshard.core.sizes import format_nbytes
from fullshard.engine.lookup import require_unit, require_units
from fullshard.engine.schedule import Schedule

STEPS_BEFORE_MEASURING = 2
"""Memory is measured after this many steps. Optimizer state is created at the end of the first step, so the second step
is the first one that runs with all of it."""


def keep_unsharded(
    model: nn.Module, *, budget_nbytes: int | None, ranks_on_host: int, say: Callable[[str], None]
) -> None:
    """Keep as many units unsharded as fit in memory.

    The call is a collective. If memory is measured, a second collective follows at the beginning of the third step.

    Args:
        model: the root of a sharded model.
        budget_nbytes: bytes of memory to use on this rank, or None to measure it.
        ranks_on_host: number of ranks that share this host's memory.
        say: callback that receives a description of the kept units on every rank, once they are chosen.

    Raises:
        LifecycleError: The model is not sharded.
        ConfigError: Memory cannot be measured here.
    """
    units = require_units(model)
    schedule = units[-1].schedule
    if budget_nbytes is not None or not any(unit.freed_nbytes for unit in units[:-1]):
        say(_keep(schedule, budget_nbytes, "the budget that was given"))
        return
    measure = functools.partial(headroom_nbytes, units[-1].mesh.device, ranks_on_host=ranks_on_host)
    measure()  # fail now, if at all

    def decide(steps: int) -> None:
        if steps == STEPS_BEFORE_MEASURING:
            schedule.after_step = None
            why = f"{SPENT:.0%} of what was free after {steps} steps, on the rank with the least"
            say(_keep(schedule, round(SPENT * measure()), why))

    schedule.after_step = decide
    say(f"auto reshard: will be decided after {STEPS_BEFORE_MEASURING} steps, based on the free memory")


def keep_head(head: nn.Module) -> None:
    """Keep the unit of `head` unsharded after forward, because backward needs it first. The head must be a unit."""
    require_unit(head).reshards_after_forward = False


def _keep(schedule: Schedule, budget_nbytes: int | None, why: str) -> str:
    """Keep the last units of forward unsharded, within the smallest budget of any rank. Return a description."""
    root = schedule.units[-1]
    inner = [unit for unit in schedule.units if unit.reshards_after_forward]  # the others are always kept
    free = [unit for unit in inner if not unit.freed_nbytes]
    if len(free) == len(inner):
        budget_nbytes, why = None, "freeing them would release no memory: ranks share it, or this rank owns all of it"
    else:
        budget_nbytes = min(root.mesh.all_gather_object(budget_nbytes))
    costly = [unit for unit in schedule.units_by_backward() if unit in inner and unit not in free]
    costly = costly[: 0 if budget_nbytes is None else count_kept([unit.freed_nbytes for unit in costly], budget_nbytes)]
    for unit in inner:
        unit.reshards_after_forward = unit not in free and unit not in costly
    cost = "which costs nothing"
    if budget_nbytes is not None:
        cost = f"{format_nbytes(sum(unit.freed_nbytes for unit in costly))} of {format_nbytes(budget_nbytes)}"
    kept = f"{len(free) + len(costly)} of {len(inner)} units stay unsharded between forward and backward"
    return f"auto reshard: {kept}, {cost} ({why})"


def headroom_nbytes(device: torch.device, *, ranks_on_host: int) -> int:
    """Return how many bytes this rank could allocate in addition to its peak usage so far."""
    if device.type != "cpu":
        if not counts_memory(device.type):
            raise ConfigError(
                f"auto reshard: the device type {device.type} does not report its free memory",
                hint="set reshard_after_forward to true or false, or set a budget with unsharded_memory_gib",
            )
        free, _ = torch.accelerator.get_memory_info(device)
        idle = torch.accelerator.memory_reserved(device) - torch.accelerator.max_memory_allocated(device)
        return max(0, free + idle)
    try:
        available = available_host_memory()
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise ConfigError(
            f"auto reshard: this system does not report its free memory ({error})",
            hint="set a budget with unsharded_memory_gib",
        ) from None
    ups_and_downs = entry_nbytes(status, "VmHWM") - entry_nbytes(status, "VmRSS")
    return max(0, available // ranks_on_host - ups_and_downs)


def available_host_memory() -> int:
    """Return how many bytes of host memory this process can still allocate under the limits of its control groups."""
    return min([entry_nbytes(Path("/proc/meminfo").read_text(), "MemAvailable"), *_available_in_group()])


def entry_nbytes(text: str, name: str) -> int:
    """Return the number of bytes in the entry `name` of a meminfo text, such as `MemAvailable:   1024 kB`."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError(f"no {name}")
    return int(found[1]) * 1024


def _available_in_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return how many bytes, including cached files, are left under the limit of each enclosing cgroup v2."""
    path = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    group = root / path.strip("/")
    left = []
    for level in (group, *group.parents):
        limit = level / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            cache = re.search(r"^inactive_file (\d+)", (level / "memory.stat").read_text(), re.MULTILINE)
            used = int((level / "memory.current").read_text())
            left.append(max(0, int(text) - used + (int(cache[1]) if cache else 0)))
        if level == root:
            break
    return left
