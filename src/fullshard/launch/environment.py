"""The rank of this process, read from the variables that torchrun and fullshard's own launcher set."""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from fullshard.comm import device as devices
from fullshard.comm.mesh import TIMEOUT_SECONDS, join_process_group
from fullshard.comm.waiting import PROGRESS, waiting_for_all
from fullshard.config.switches import ELASTIC, timeout_of_environment
from fullshard.core.errors import ConfigError, plural
from fullshard.core.threads import stop_at_exit
from fullshard.launch.device import kind_of, object_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The rank and world size of this process, and whether a launcher started it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes files for the job."""
        return self.rank == 0


def read_rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read the variables of a rank, or raise `ConfigError`. Without them, the job has one process."""
    environ = os.environ if environ is None else environ
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return RankEnvironment()
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    if environ is os.environ:
        local_world_size = _LAUNCHED.setdefault((rank, world_size, environ.get("LOCAL_RANK")), local_world_size)
    local_rank = _number(environ, "LOCAL_RANK", default=rank % max(1, local_world_size))
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise ConfigError(
            f"the environment variables are inconsistent: RANK={rank}, WORLD_SIZE={world_size}, "
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}"
        )
    return RankEnvironment(rank, world_size, local_rank, local_world_size, launched=True)


_LAUNCHED: dict[tuple[int, int, str | None], int] = {}
"""LOCAL_WORLD_SIZE of this process at the first reading. vLLM on a CPU overwrites it with the size of its own group."""


def is_started_again() -> bool:
    """Return whether the launcher (torchrun or fullshard's own) has restarted this job's processes."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def may_be_started_again() -> bool:
    """Return whether the launcher restarts the processes if one of them fails, or if a host joins or leaves."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or bool(ELASTIC.read())


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be a whole number, got {text!r}",
            hint="start the job with `torchrun` or `fullshard`, or unset RANK and WORLD_SIZE to run one process",
        ) from None


def rank_device(environment: RankEnvironment, kind: str = "auto") -> torch.device:
    """Return the device that this rank computes on, and make it current if it is an accelerator.

    `kind` takes the same values as the argument of `kind_of`.

    Raises:
        ConfigError: the kind is unknown, or this host has fewer devices of that kind than ranks.
    """
    kind = kind_of(kind)
    if kind == "cpu":
        return torch.device("cpu")
    count = devices.count(kind)
    if environment.local_rank >= count:
        raise ConfigError(
            f"local rank {environment.local_rank} has no {kind.upper()} device: this host has {count}",
            hint=f"start {plural(count, 'process')} per host, or use --device cpu" if count else "use --device cpu",
        )
    return devices.select(kind, environment.local_rank)


def init_process_group_from_environment(
    device: torch.device | None = None, *, timeout_seconds: float | None = None
) -> RankEnvironment:
    """Join the job's process group.

    Do nothing on a second call, or in a single process that was not started by a launcher.

    Args:
        device: the device that this rank computes on, `rank_device(...)` by default. For an accelerator, the group uses
            its own backend (NCCL for CUDA), and Gloo for tensors in host memory. For a CPU, the group uses Gloo.
        timeout_seconds: how long a rank waits for the others. If None, the value comes from `FULLSHARD_TIMEOUT` or the
            launcher's `--timeout`; if neither is set, it is `TIMEOUT_SECONDS`.

    Returns:
        The rank and world size of this process.

    Raises:
        ConfigError: for the reasons listed for `read_rank_environment` and `rank_device`, or because the value of
            `FULLSHARD_TIMEOUT` is not a number of seconds.
    """
    environment = read_rank_environment()
    if not environment.launched or dist.is_initialized():
        return environment
    device = device or rank_device(environment)
    PROGRESS.limit = timeout_seconds
    timeout_seconds = timeout_seconds or timeout_of_environment() or TIMEOUT_SECONDS
    join_process_group(
        backend=devices.backends_of(device.type),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    stop_at_exit()  # a script may leave the group open under another launcher
    return environment


def run_on_main(environment: RankEnvironment, function: Callable[[], T]) -> T:
    """Call `function` on rank 0. Every rank returns its result or raises its exception. All ranks must call this."""
    if environment.world_size == 1:
        return function()
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    raised: Exception | None = None
    if environment.is_main:
        try:
            outcome = [(function(), None)]
        except Exception as error:
            raised = error
            outcome = [(None, _picklable(error))]
    with waiting_for_all("sharing a result of rank 0"):
        dist.broadcast_object_list(outcome, src=0, device=object_device())
    result, received = outcome[0]
    if (failure := raised or received) is not None:
        raise failure
    return cast("T", result)


def _picklable(error: Exception) -> Exception:
    """Return the error if another process can unpickle it, or otherwise a `RuntimeError` with the same text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes of a moment ago
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
