"""The host's processors, memory and accelerators. The system is asked, because importing torch takes seconds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.sizes import MIB

_QUERY_SECONDS = 20
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")
_DEVICES = Path("/dev")
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
        """Return whether bfloat16 is as fast as float16 there: from compute capability 8.0 on."""
        return self.capability is None or self.capability >= 8.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One host.

    Attributes:
        cpu_count: processors this process may run on.
        memory_nbytes: memory it may use; None if the system does not say.
        accelerators: NVIDIA's and AMD's devices that are visible to it; other makers' are not listed.
        failure: the reason, in words, why accelerators could not be counted; None if they could.
    """

    cpu_count: int
    memory_nbytes: int | None
    accelerators: tuple[DetectedDevice, ...] = ()
    failure: str | None = None


def detect_hardware() -> Hardware:
    """Detect this host's hardware, in well under a second if no driver is slow. Raise nothing."""
    accelerators, failure = _accelerators()
    return Hardware(usable_cpu_count(), usable_memory_nbytes(), accelerators, failure)


def usable_cpu_count() -> int:
    """Return how many processors this process may use; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_nbytes() -> int | None:
    """Return the host's memory, or a container's lower limit; None if the system does not say."""
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


_Row = tuple[str, ...]
"""A device's index, UUID, name, MiB of memory and compute capability; nothing where that is unknown."""


def _accelerators() -> tuple[tuple[DetectedDevice, ...], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:  # in a container, say; the drivers' own lists have no memory in them
        listed = (
            *_visible(_listed_by_nvidia(), "CUDA_VISIBLE_DEVICES"),
            *_visible(_listed_by_amd(), "HIP_VISIBLE_DEVICES"),
        )
        return listed, None
    command = [program, "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi did not answer: {error}"
    if done.returncode:
        return (), f"nvidia-smi failed: {(done.stderr or done.stdout).strip().splitlines()[-1:] or done.returncode}"
    lines = (line for line in done.stdout.splitlines() if line.count(",") == 4)
    rows = (tuple(cell.strip() for cell in line.split(",")) for line in lines)
    return _visible(rows, "CUDA_VISIBLE_DEVICES"), None


def _visible(rows: Iterable[_Row], variable: str) -> tuple[DetectedDevice, ...]:
    """Return the devices that an environment variable leaves: by index, or by the start of a UUID."""
    said = os.environ.get(variable)
    wanted = None if said is None else [item.strip() for item in said.split(",") if item.strip()]
    return tuple(
        DetectedDevice(name, int(memory) * MIB if memory.isdigit() else None, _number(capability))
        for index, uuid, name, memory, capability in rows
        if wanted is None or index in wanted or any(uuid.startswith(item) for item in wanted if item.startswith("GPU"))
    )


def _listed_by_nvidia() -> Iterator[_Row]:
    """Yield the devices that NVIDIA's driver lists: a container sees the host's list, but only some of the devices."""
    found = (dict(re.findall(r"^(.+?):\s*(.+?)\s*$", text, re.MULTILINE)) for text in _texts(_NVIDIA, "information"))
    given = (said for said in found if (_DEVICES / f"nvidia{said.get('Device Minor')}").exists())
    for index, said in enumerate(given):
        yield str(index), said.get("GPU UUID", ""), said.get("Model", "NVIDIA GPU"), "", ""


def _listed_by_amd() -> Iterator[_Row]:
    """Yield the devices that AMD's driver lists: processors are among the nodes, some with built-in graphics."""
    if not (_DEVICES / "kfd").exists():
        return
    nodes = (dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)) for text in _texts(_AMD, "properties"))
    gpus = [node for node in nodes if node.get("simd_count", "0") != "0" and node.get("cpu_cores_count", "0") == "0"]
    for index, _ in enumerate(gpus):
        yield str(index), "", "AMD GPU", "", ""


def _texts(folder: Path, name: str) -> Iterator[str]:
    for path in sorted(folder.glob(f"*/{name}")):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
