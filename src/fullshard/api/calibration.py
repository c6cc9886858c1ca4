"""Measures this machine for the planner: matrix products, memory, and an all-gather between its processes.

Also the program of the measuring processes: `python -m fullshard.api.calibration FILE`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.comm.mesh import Mesh, default_device, init_mesh
from fullshard.core.errors import CommunicationError
from fullshard.launch.local import launch_local
from fullshard.launch.worker import run_worker
from fullshard.plan.hardware import Device, read_calibration, write_calibration

SECONDS = 0.4
"""How long each measurement runs."""

_SIDE = {"cpu": 1024, "other": 8192}
_NBYTES = {"cpu": 2**26, "other": 2**30}


def calibrate(path: Path, *, nproc: int | None = None) -> Device:
    """Measure this machine with one process per device (on a CPU: two) and write the figures to `path`.

    Args:
        path: a `.json` file; what is there is replaced.
        nproc: processes to measure with.

    Raises:
        CommunicationError: the measuring processes failed; what they said is on standard error.
    """
    device = default_device()
    if nproc is None:
        nproc = 2 if device.type == "cpu" else torch.accelerator.device_count()
    code = launch_local("fullshard.api.calibration", [str(path.absolute())], nproc=nproc)
    if code:
        raise CommunicationError(
            f"calibration failed: its processes ended with code {code}", hint="see above what they said"
        )
    return read_calibration(path)


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """How much of `amount` per second `work` gets through: the median of several runs, after a warm-up."""
    work()
    times: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(times) < 3:
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return amount / sorted(times)[len(times) // 2]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    side = _SIDE.get(device.type, _SIDE["other"])
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return _rate(lambda: one @ other, 2 * side**3, device)


def _memory_bandwidth(device: torch.device) -> float:
    nbytes = _NBYTES.get(device.type, _NBYTES["other"])
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.zeros_like(source)
    return _rate(lambda: target.copy_(source), 2 * nbytes, device)  # read and written


def _link(mesh: Mesh) -> float:
    """Bytes per second one process sends in an all-gather. A fixed number of rounds: all ranks must agree on it."""
    if mesh.shard_size == 1:
        return _memory_bandwidth(mesh.device)
    full = torch.zeros(_NBYTES.get(mesh.device.type, _NBYTES["other"]) // 4, device=mesh.device)
    sent = full.nbytes // mesh.shard_size * (mesh.shard_size - 1)
    times = []
    for _ in range(8):
        dist.barrier()
        _synchronize(mesh.device)
        start = time.perf_counter()
        mesh.gather.all_gather(full, tag=0).wait()
        _synchronize(mesh.device)
        times.append(time.perf_counter() - start)
    return sent / sorted(times[1:])[len(times) // 2]


def _device_memory(device: torch.device, per_host: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host


def measure() -> Device:
    """Measure with all ranks of this job; every rank gets its own figures."""
    mesh = init_mesh()
    flops, flops_fp32 = _flops(torch.bfloat16, mesh.device), _flops(torch.float32, mesh.device)
    link = _link(mesh)
    kind = "CPU" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    return Device(
        kind,
        _device_memory(mesh.device, mesh.world_size),
        flops,
        flops_fp32,
        _memory_bandwidth(mesh.device),
        link,
        link,
        mesh.world_size,
        "measured by fullshard plan --calibrate",
        # Layers are smaller than the measured products, and more than products.
        efficiency=0.8,
        link_efficiency=1.0,
        framework=0 if mesh.device.type == "cpu" else 3 * 2**29,
    )


def _main() -> None:
    device = measure()
    if int(os.environ.get("RANK", "0")) == 0:
        write_calibration(device, Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(_main)
