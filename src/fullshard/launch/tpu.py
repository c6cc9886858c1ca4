"""Setup of a host with TPUs before its ranks start: torch_tpu has ranks find one another by variables of its own."""

from __future__ import annotations

import os

from fullshard.core.errors import ConfigError


def prepare_host(kind: str, nproc: int, hosts: int = 1, machine_rank: int | None = None) -> int | None:
    """Set what torch_tpu wants before ranks start; do nothing for other kinds of device.

    Ranks are started as new processes and not forked, so this process may look for devices.

    Args:
        kind: what the ranks compute on.
        nproc: ranks of this host.
        hosts: of the job.
        machine_rank: of this host, if it is given.

    Returns:
        The machine rank: on several hosts torch_tpu tells it from where the host is in the slice.

    Raises:
        ConfigError: torch_tpu refuses, or it has another machine rank.
    """
    if kind != "tpu":
        return machine_rank
    import torch

    try:
        torch.get_device_module("tpu").distributed.set_tpu_launch_env(nnodes=hosts, nproc_per_node=nproc)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"torch_tpu cannot start {nproc} processes on each of {hosts} hosts: {error}",
            hint="start one process per TPU of the host; TPU_WORKER_HOSTNAMES names the hosts of a slice",
        ) from error
    found = os.environ.get("NODE_RANK", "")
    if hosts == 1 or not found.isdigit():
        return machine_rank
    if machine_rank not in (None, int(found)):
        raise ConfigError(
            f"machine_rank = {machine_rank}, and by its place in the slice this host is {found} (NODE_RANK)",
            hint="leave --machine_rank out",
        )
    return int(found)
