"""Training from a notebook with Accelerate's launchers, after checks for errors that would break forked processes."""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import accelerate
import torch
import torch.distributed as dist

from fullshard.core.errors import ConfigError
from fullshard.launch import cuda


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None, **options: Any
) -> None:
    """Run a notebook's function in several processes forked on this host, as ranks of one job.

    Args:
        function: creates the Accelerator, the model and everything else. It may be defined in a cell.
        args: arguments for the function.
        num_processes: number of ranks.
        options: further arguments of Accelerate's function: `mixed_precision`, `use_port`, `max_restarts`, ... On one
            host, a free port is used by default.

    Raises:
        ConfigError: the notebook has used a device or is a rank of a job, so forked processes could not run.
    """
    if num_processes is not None and num_processes > 1:
        _check_can_fork("notebook_launcher")
        function = _forked(function)
        if options.get("num_nodes", 1) == 1:  # Accelerate's default port is the same for all notebooks
            with socket.create_server(("127.0.0.1", 0)) as free:
                options.setdefault("use_port", str(free.getsockname()[1]))
    accelerate.notebook_launcher(function, tuple(args), num_processes, **options)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several processes forked on this host, as ranks of one job on CPUs.

    Args:
        function: creates the Accelerator, the model and everything else.
        args: arguments for the function.
        num_processes: number of ranks.

    Raises:
        ConfigError: this process has used a device or is a rank of a job, so forked processes could not run.
    """
    _check_can_fork("debug_launcher")
    accelerate.debug_launcher(_forked(function), tuple(args), num_processes)


def _check_can_fork(name: str) -> None:
    if cuda.was_used():
        raise ConfigError(
            f"{name}: this notebook has used CUDA, which does not work in processes that are forked afterwards",
            hint="restart the notebook, and use the device only inside the function",
        )
    if dist.is_initialized():
        raise ConfigError(
            f"{name}: this notebook is already a rank of a job (through an Accelerator or init_process_group)",
            hint="restart the notebook, and create the Accelerator only inside the function",
        )


def _forked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:  # torchelastic needs a `__name__`, which a partial lacks
        # The notebook's torch threads do not exist in this process, so waiting for them would hang.
        torch.set_num_threads(1)
        if dist.is_initialized():  # `debug_launcher` creates the group but sets no rank variables
            rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        return function(*args)

    return run
