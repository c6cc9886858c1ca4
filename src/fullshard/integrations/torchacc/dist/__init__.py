"""`torchacc.dist`: which rank this is, and waiting for the others."""

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
    "Mesh": "torch.distributed.device_mesh.DeviceMesh is what fullshard.fully_shard takes",
    "init_nccl_context": "not needed: communicators are made when the model is sharded",
    "BACKEND_NAME": "there is one engine, without a backend of its own",
    "EAGER_BACKEND_NAME": "there is one engine, without a backend of its own",
}


if not TYPE_CHECKING:  # a type checker would take it as leave to use any name

    def __getattr__(name: str) -> NoReturn:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"fullshard.torchacc.dist has no {name!r}{reason}")


def world_size() -> int:
    """Return the number of ranks of the job."""
    return read_rank_environment().world_size


def rank() -> int:
    """Return this rank."""
    return read_rank_environment().rank


def local_rank() -> int:
    """Return this rank's number on its host."""
    return read_rank_environment().local_rank


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is the first rank of its host (`local`), or of the whole job."""
    return (local_rank() if local else rank()) == 0


def init_process_group(config: Any = None) -> None:
    """Join the job. Not needed: the first call that communicates does it. `config` may be given as TorchAcc has it."""
    joined()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait until every rank is here.

    Args:
        tag: name of the place; the same on every rank.
        payload: a message to the others; those of all ranks are returned, in rank order.
        replicas: the ranks that take part; none means all, which is what is supported.

    Raises:
        CommunicationError: a rank waits at another place.
        ConfigError: only some ranks are to take part.
    """
    environment = joined().environment
    if replicas and sorted(replicas) != list(range(environment.world_size)):
        raise ConfigError(
            f"rendezvous({tag!r}) of ranks {list(replicas)} of {environment.world_size} is not supported",
            hint="leave replicas out: all ranks wait",
        )
    met = all_gather_object((tag, payload))
    for other, (their_tag, _) in enumerate(met):
        if their_tag != tag:
            raise CommunicationError(
                f"rank {environment.rank} waits at {tag!r} and rank {other} at {their_tag!r}",
                hint="every rank calls rendezvous in the same order",
            )
    return [message for _, message in met]
