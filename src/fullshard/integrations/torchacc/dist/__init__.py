"""`torchacc.dist`: the ranks of the job and of this process, and functions with which ranks wait for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fullshard.api.collectives import all_gather_object
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.integrations.torchacc.dist import fsdp
from fullshard.integrations.torchacc.eager import joined, mark_step
from fullshard.launch.environment import read_rank_environment

__all__ = [
    "fsdp",
    "init_process_group",
    "is_master_ordinal",
    "local_rank",
    "mark_step",
    "rank",
    "rendezvous",
    "world_size",
]

_SHARDED = "accelerate(model, loader, config) shards a model in place, without a wrapper"
_ABSENT = {
    **dict.fromkeys(("ParallelModule", "DataParallel", "DistributedParallel"), _SHARDED),
    **dict.fromkeys(("FullyShardedDataParallel", "SpmdFullyShardedDataParallel"), _SHARDED),
    "PipelineParallel": "pipeline parallelism is not supported",
    "tp": "tensor parallelism is not supported",
    "Mesh": "use torch.distributed.device_mesh.DeviceMesh with fullshard.fully_shard",
    "init_nccl_context": "it is not needed, because communicators are created when the model is sharded",
    "BACKEND_NAME": "the engine has no separate backend",
    "EAGER_BACKEND_NAME": "the engine has no separate backend",
}


if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"fullshard.torchacc.dist has no {name!r}{reason}")


def world_size() -> int:
    """Return the number of ranks in the job."""
    return read_rank_environment().world_size


def rank() -> int:
    """Return the global rank of this process."""
    return read_rank_environment().rank


def local_rank() -> int:
    """Return the rank of this process on its host."""
    return read_rank_environment().local_rank


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is the first rank of its host (if `local`) or of the job."""
    return (local_rank() if local else rank()) == 0


def init_process_group(config: Any = None) -> None:
    """Join the job.

    This call is optional, because the first function that communicates also joins the job. `config` is only accepted
    for compatibility with TorchAcc.
    """
    joined()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait until every rank has reached this call.

    Args:
        tag: The name of the rendezvous, which must be the same on every rank.
        payload: A message to the other ranks.
        replicas: The participating ranks. Only all ranks, which is the default, are supported.

    Returns:
        The messages of all ranks, in rank order.

    Raises:
        CommunicationError: If a rank waits with another tag.
        ConfigError: If `replicas` does not contain all ranks.
    """
    environment = joined().environment
    if replicas and sorted(replicas) != list(range(environment.world_size)):
        raise ConfigError(
            f"rendezvous({tag!r}) with ranks {list(replicas)} of {environment.world_size} is not supported",
            hint="omit replicas; all ranks must take part",
        )
    met = all_gather_object((tag, payload))
    for other, (their_tag, _) in enumerate(met):
        if their_tag != tag:
            raise CommunicationError(
                f"rank {environment.rank} is waiting at {tag!r}, but rank {other} is waiting at {their_tag!r}",
                hint="call rendezvous in the same order on every rank",
            )
    return [message for _, message in met]
