"""A report on this environment for bug reports: versions, hardware and variables, without any secrets."""

import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping

from fullshard.config.hardware import Hardware
from fullshard.config.switches import SWITCHES
from fullshard.core.requirements import version_of
from fullshard.core.sizes import format_nbytes

PACKAGES = (
    *("fullshard", "torch", "numpy", "pydantic", "safetensors", "torchdata"),
    *("transformers", "tokenizers", "datasets", "accelerate", "peft", "trl", "bitsandbytes", "flash-attn"),
    *("deepspeed", "torchacc", "torch-xla", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
"""Packages that are listed with their versions, because they affect a run."""

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
    *("TORCHELASTIC_RUN_ID", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"),
    *("NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET"),
    *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST"),
    *(*SWITCHES, "HF_HOME", "HF_HUB_OFFLINE"),
)
"""Variables that the report shows in addition to those of `FAMILIES`."""

FAMILIES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")

Report = dict[str, dict[str, str]]
"""Sections, which map names to values, all as text."""


def make_report(hardware: Hardware, environ: Mapping[str, str]) -> Report:
    """Return the complete report on this host and on the variables in `environ`."""
    report = {
        "system": _system(hardware),
        "accelerators": _accelerators(hardware),
        "torch": _torch(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "variables": {
            name: environ[name] for name in sorted(environ) if name in VARIABLES or name.startswith(FAMILIES)
        },
    }
    return {section: lines for section, lines in report.items() if lines}


def shared_memory_nbytes() -> int | None:
    """Return the size of /dev/shm, through which the processes of a host communicate, or None if it does not exist."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def open_files_limit() -> int | None:
    """Return how many files a process may have open, or None if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _system(hardware: Hardware) -> dict[str, str]:
    memory, shared = hardware.memory_nbytes, shared_memory_nbytes()
    return {
        "os": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "processors": f"{hardware.cpu_count} usable of {os.cpu_count()}",
        "memory": "unknown" if memory is None else format_nbytes(memory),
        "/dev/shm": "none" if shared is None else format_nbytes(shared),
        "open files": str(open_files_limit() or "no limit"),
        "network": ", ".join(name for _, name in socket.if_nameindex()),
    }


def _accelerators(hardware: Hardware) -> dict[str, str]:
    if hardware.failure:
        return {"error": hardware.failure}
    found = {}
    for index, device in enumerate(hardware.accelerators):
        memory = "unknown memory" if device.memory_nbytes is None else format_nbytes(device.memory_nbytes)
        found[str(index)] = f"{device.name}, {memory}, compute capability {device.capability or 'unknown'}"
    return found or {"none": "found"}


def _torch() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    from fullshard.comm import device as devices
    from fullshard.launch import cuda

    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    lines = {
        "built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "processors only",
        "CUDA available": str(cuda.is_available()).lower(),
        "accelerator": f"{kind}, {devices.count(kind)} here" if (kind := devices.accelerator()) else "none",
        "backends": ", ".join(name for name, is_there in backends.items() if is_there),
        "threads": str(torch.get_num_threads()),
    }
    if (version := cuda.nccl_version()) is not None:
        lines["NCCL"] = version
    return lines
