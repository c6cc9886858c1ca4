"""Measure matrix products, memory and collectives on this machine, for the planner.

The measurements run in one process per device, as in training. Each process runs
`python -m fullshard.api.calibration FILE`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.comm.device import current
from fullshard.comm.mesh import Mesh, init_mesh
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.core.paths import local_path
from fullshard.launch.device import memory_limit, name_of, synchronize
from fullshard.launch.local import launch_local
from fullshard.launch.scratch import scratch_directory
from fullshard.launch.worker import run_worker
from fullshard.plan.hardware import Device, read_calibration, write_calibration

SECONDS = 0.4
"""The duration of each measurement."""


def calibrate(path: Path) -> Device:
    """Measure this machine with one process per device (two on a CPU), and write the figures to a `.json` file."""
    path = local_path(path)
    device = current()
    nproc = 2 if device.type == "cpu" else torch.accelerator.device_count()
    with scratch_directory("fullshard-calibration-") as directory:
        measured = directory / "device.json"
        code = launch_local("fullshard.api.calibration", [str(measured)], nproc=nproc)
        if code:
            raise CommunicationError(
                f"calibration failed: its processes ended with exit code {code}", hint="see their output above"
            )
        found = read_calibration(measured)
    write_calibration(found, path)
    return found


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Run `work` and return the seconds until the device has finished it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Return the `amount` that `work` processes per second, as the median of several runs after a warm-up."""
    work()
    times: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(times) < 3:
        times.append(_timed(work, device))
    return amount / sorted(times)[len(times) // 2]


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of training a linear layer: three matrix products, two of them with a transposed operand."""
    side = 1024 if device.type == "cpu" else 8192
    data, weight, gradient = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    return _rate(lambda: (data @ weight.t(), gradient @ weight, gradient.t() @ data), 6 * side**3, device)


def _memory_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of an elementwise operation on tensors that are too large for any cache."""
    nbytes = 2**26 if device.type == "cpu" else 2**30
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.zeros_like(source)
    return _rate(lambda: target.add_(source), 3 * nbytes, device)  # two read, one written


def _link(mesh: Mesh) -> float:
    """Return the bytes per second that one process sends. With shared memory, only a reduce-scatter takes time."""
    if mesh.shard_size == 1:
        return _memory_bandwidth(mesh.device)
    nbytes = 2**24 if mesh.device.type == "cpu" else 2**30  # about one unit; even large units on a CPU have a few MiB
    numel = nbytes // 4 // mesh.shard_size * mesh.shard_size
    buffer = mesh.gather.full_buffer(numel, torch.float32, mesh.device, holds_main=True)
    main = torch.zeros(numel // mesh.shard_size, device=mesh.device) if buffer.main is None else buffer.main

    def gather() -> None:
        buffer.gather(main, tag=0).wait()
        buffer.free()

    def reduce() -> None:
        mesh.reduce.reduce_scatter(mesh.reduce.staging(numel, torch.float32, mesh.device), tag=0).wait()

    reducing = _seconds(reduce, mesh.device)
    gathering = reducing if buffer.main is not None else _seconds(gather, mesh.device)
    return 2 * main.nbytes * (mesh.shard_size - 1) / (reducing + gathering)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds that `work` takes after a warm-up, over the same number of rounds on all ranks."""
    times = []
    for _ in range(8):
        if dist.is_initialized():
            dist.barrier()
        times.append(_timed(work, device))
    return sorted(times[1:])[len(times) // 2]


def measure() -> Device:
    """Run all measurements as one rank of the calibration job. Each rank returns the figures that it measured."""
    mesh = init_mesh()
    is_cpu = mesh.device.type == "cpu"
    if (memory := memory_limit(mesh.device, mesh.world_size)) is None:
        raise ConfigError("calibration failed: this system does not report its total memory")
    flops, flops_fp32 = _flops(torch.bfloat16, mesh.device), _flops(torch.float32, mesh.device)
    link = _link(mesh)
    return Device(
        "CPU" if is_cpu else name_of(mesh.device),
        memory,
        flops,
        flops_fp32,
        _memory_bandwidth(mesh.device),
        link,
        link,
        mesh.world_size,
        "measured by fullshard plan --calibrate",
        # On a CPU, everything except matrix products is counted separately, by bytes.
        efficiency=1.0 if is_cpu else 0.8,
        link_efficiency=1.0,
        framework=0 if is_cpu else 3 * 2**29,
    )


def _main() -> None:
    device = measure()
    if int(os.environ.get("RANK", "0")) == 0:
        write_calibration(device, Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(_main)
