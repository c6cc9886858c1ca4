"""The host's processors, memory, and accelerators, detected without torch because importing it takes seconds."""

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
    """An accelerator. `capability` is its CUDA compute capability, such as 8.0. Unreported values are None."""

    name: str
    memory_nbytes: int | None = None
    capability: float | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """The resources of the host that this process may use. `failure` says why accelerators could not be detected."""

    cpu_count: int
    memory_nbytes: int | None
    accelerators: tuple[DetectedDevice, ...] = ()
    failure: str | None = None


def detect_hardware() -> Hardware:
    """Detect this host's hardware without torch. Accelerators are listed by nvidia-smi; its errors go to `failure`."""
    accelerators, failure = _accelerators()
    return Hardware(usable_cpu_count(), usable_memory_nbytes(), accelerators, failure)


def usable_cpu_count() -> int:
    """Return the number of processors that this process may use. A container may have fewer than the host."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_nbytes() -> int | None:
    """Return the host's memory in bytes, or the container's limit if lower. None if the system does not report it."""
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


def _accelerators() -> tuple[tuple[DetectedDevice, ...], str | None]:
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
    said = os.environ.get("CUDA_VISIBLE_DEVICES")  # indices, or the starts of UUIDs
    wanted = None if said is None else [item.strip() for item in said.split(",") if item.strip()]
    rows = ([cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4)
    found = tuple(
        DetectedDevice(
            name,
            int(memory) * MIB if memory.isdigit() else None,
            float(capability) if capability.replace(".", "", 1).isdigit() else None,
        )
        for index, uuid, name, memory, capability in rows
        if wanted is None or index in wanted or any(uuid.startswith(item) for item in wanted if item.startswith("GPU"))
    )
    return found, None
