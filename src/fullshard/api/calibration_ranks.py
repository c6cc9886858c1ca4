"""Measure this machine for the planner: products, memory, collectives, and the least cost of operations and units.

The program of the measuring processes: `python -m fullshard.api.calibration_ranks FILE`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.mesh import Mesh, init_mesh
from fullshard.config.hardware import usable_memory_nbytes
from fullshard.core.errors import ConfigError
from fullshard.features import shard_model
from fullshard.launch import cuda
from fullshard.launch.device import name_of, synchronize
from fullshard.launch.worker import run_worker
from fullshard.plan.hardware import Device, write_calibration

SECONDS = 0.4
"""The duration of each measurement."""

_SIDE = {"cpu": 1024, "other": 8192}
_NBYTES = {"cpu": 2**26, "other": 2**30}
_LINK_NBYTES = {"cpu": 2**24, "other": 2**30}
"""About a unit: the larger of a CPU's models have some MiB."""


def _on(device: torch.device, sizes: Mapping[str, int]) -> int:
    """Return the size for a device."""
    return sizes.get(device.type, sizes["other"])


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has done the work."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Return the `amount` per second that `work` gets through: the median of several runs, after a warm-up."""
    work()
    times: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(times) < 3:
        times.append(_timed(work, device))
    return amount / sorted(times)[len(times) // 2]


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP per second of a trained linear layer: three products, two of them across an operand's rows."""
    side = _on(device, _SIDE)
    data, weight, gradient = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    return _rate(lambda: (data @ weight.t(), gradient @ weight, gradient.t() @ data), 6 * side**3, device)


def _memory_bandwidth(device: torch.device) -> float:
    """Measure an elementwise operation that no cache holds, in the process's own memory: bytes per second."""
    nbytes = _on(device, _NBYTES)
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.zeros_like(source)
    return _rate(lambda: target.add_(source), 3 * nbytes, device)  # two read, one written


def _fresh_bandwidth(device: torch.device) -> float:
    """Measure writing to memory that the process gets anew, page fault by page fault: bytes per second."""
    nbytes = _on(device, _NBYTES)
    return _rate(lambda: torch.empty(nbytes // 4, device=device).fill_(1), nbytes, device)


def _op_seconds(device: torch.device) -> float:
    """Return the seconds of an operation on eight numbers, with its gradient function."""
    tensor = torch.zeros(8, device=device, requires_grad=True)
    return 1 / _rate(lambda: tensor * 2, 1, device)


def _function_seconds(device: torch.device) -> float:
    """Return the seconds per element of an activation that computes an exponential, on data that the cache holds."""
    tensor = torch.zeros(2**16, device=device)
    return 1 / _rate(lambda: nn.functional.silu(tensor), tensor.numel(), device)


def _links(mesh: Mesh) -> tuple[float, float]:
    """Return the bytes per second one process sends in an all-gather or a reduce-scatter, and in an all-reduce.

    A fixed number of rounds: all ranks must agree on it. Where ranks share memory, an all-gather takes no time of its
    own, and the first figure is that of a reduce-scatter.
    """
    if mesh.shard_size == 1:
        return (_memory_bandwidth(mesh.device),) * 2
    numel = _on(mesh.device, _LINK_NBYTES) // 4 // mesh.shard_size * mesh.shard_size
    buffer = mesh.gather.full_buffer(numel, torch.float32, mesh.device, holds_main=True)
    main = torch.zeros(numel // mesh.shard_size, device=mesh.device) if buffer.main is None else buffer.main
    full = torch.zeros(numel, device=mesh.device)
    sent = main.nbytes * (mesh.shard_size - 1)

    def gather() -> None:
        buffer.gather(main, tag=0).wait()
        buffer.free()

    def reduce() -> None:
        mesh.reduce.reduce_scatter(mesh.reduce.staging(numel, torch.float32, mesh.device), tag=0).wait()

    def all_reduce() -> None:
        dist.all_reduce(full)

    reducing = _seconds(reduce, mesh.device)
    gathering = reducing if buffer.main is not None else _seconds(gather, mesh.device)
    return 2 * sent / (reducing + gathering), 2 * sent / _seconds(all_reduce, mesh.device)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of work that all ranks begin together: the median of a few rounds, the first left out."""
    times = []
    for _ in range(8):
        if dist.is_initialized():
            dist.barrier()
        times.append(_timed(work, device))
    return sorted(times[1:])[len(times) // 2]


def _unit_seconds(mesh: Mesh) -> float:
    """Return the seconds that sharding adds to a unit's forward and backward with next to nothing to do or send."""
    count, width = 16, 8

    def build() -> nn.Sequential:
        layers = (nn.Linear(width, width, bias=False) for _ in range(count))
        return nn.Sequential(*layers, nn.Tanh()).to(mesh.device)

    plain, sharded = build(), build()
    shard_model(sharded, unit_modules=list(sharded.children())[:count], mesh=mesh)
    data = torch.zeros(1, width, device=mesh.device)

    def step(model: nn.Module) -> Callable[[], None]:
        return lambda: model(data).sum().backward()

    for _ in range(3):  # the first forward compares the ranks, the second begins to gather ahead
        step(sharded)()
    return max(0.0, _seconds(step(sharded), mesh.device) - _seconds(step(plain), mesh.device)) / count


def _device_memory(device: torch.device, per_host: int) -> int:
    if device.type == "cuda":
        return cuda.memory_nbytes(device)
    nbytes = usable_memory_nbytes()
    if nbytes is None:
        raise ConfigError("calibration: this system does not say how much memory it has")
    return nbytes // per_host


def measure() -> Device:
    """Measure with all ranks of this job; every rank gets its own figures."""
    mesh = init_mesh()
    is_cpu = mesh.device.type == "cpu"
    flops, flops_fp32 = _flops(torch.bfloat16, mesh.device), _flops(torch.float32, mesh.device)
    link, replicate_link = _links(mesh)
    return Device(
        "CPU" if is_cpu else name_of(mesh.device),
        _device_memory(mesh.device, mesh.world_size),
        flops,
        flops_fp32,
        _memory_bandwidth(mesh.device),
        link,
        link,
        mesh.world_size,
        "measured by fullshard plan --calibrate",
        # On a CPU everything but products is counted apart, by its bytes and its number of operations.
        efficiency=1.0 if is_cpu else 0.8,
        link_efficiency=1.0,
        framework=0 if is_cpu else 3 * 2**29,
        fresh_bandwidth=_fresh_bandwidth(mesh.device) if is_cpu else 0.0,
        replicate_link=replicate_link,
        op_seconds=_op_seconds(mesh.device) if is_cpu else 0.0,
        function_seconds=_function_seconds(mesh.device) if is_cpu else 0.0,
        unit_seconds=_unit_seconds(mesh) if is_cpu else 0.0,
    )


def _main() -> None:
    device = measure()
    if int(os.environ.get("RANK", "0")) == 0:
        write_calibration(device, Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(_main)
