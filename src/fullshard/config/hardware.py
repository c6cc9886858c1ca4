"""What this host has: processors, memory, accelerators. The system is asked, because importing torch takes seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.sizes import MIB

_QUERY_SECONDS = 20
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class DetectedDevice:
    """One device.

    Attributes:
        name: as its driver calls it.
        memory_nbytes: its whole memory; None if the driver does not say.
        capability: CUDA's compute capability, for example 8.0; None if unknown.
    """

    name: str
    memory_nbytes: int | None = None
    capability: float | None = None

    @property
    def computes_bfloat16(self) -> bool:
        """Whether bfloat16 is as fast as float16 there: from compute capability 8.0 on."""
        return self.capability is None or self.capability >= 8.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One host.

    Attributes:
        cpu_count: processors this process may run on.
        memory_nbytes: memory it may use; None if the system does not say.
        accelerators: those that are visible to it.
        failure: why accelerators could not be counted, in words; None if they could.
    """

    cpu_count: int
    memory_nbytes: int | None
    accelerators: tuple[DetectedDevice, ...] = ()
    failure: str | None = None


def detect_hardware() -> Hardware:
    """What this host has, in well under a second where no driver is slow. Nothing is raised."""
    accelerators, failure = _nvidia()
    return Hardware(usable_cpu_count(), usable_memory_nbytes(), accelerators, failure)


def usable_cpu_count() -> int:
    """Processors this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_nbytes() -> int | None:
    """Memory of the host, or less where a container is limited; None if the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    for path in map(Path, _CGROUP_LIMITS):
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such limit, or the word `max`
            continue
    return total


def _nvidia() -> tuple[tuple[DetectedDevice, ...], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), None
    command = [program, "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi did not answer: {error}"
    if done.returncode:
        return (), f"nvidia-smi failed: {(done.stderr or done.stdout).strip().splitlines()[-1:] or done.returncode}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [item.strip() for item in visible.split(",") if item.strip()]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]
    return tuple(
        DetectedDevice(name, int(memory) * MIB if memory.isdigit() else None, _number(capability))
        for index, uuid, name, memory, capability in rows
        if wanted is None or index in wanted or any(uuid.startswith(item) for item in wanted if item.startswith("GPU"))
    ), None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
