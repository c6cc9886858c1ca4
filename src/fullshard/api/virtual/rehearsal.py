"""A step of fullshard in virtual time."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fullshard.api.simulation import shard_without_weights, transformers_model
from fullshard.api.virtual.attention import register
from fullshard.api.virtual.device import VirtualDevice
from fullshard.api.virtual.ranks import name_groups, playing
from fullshard.api.virtual.step import TokenBatch, fused_dropout, fused_optimizers, last_step
from fullshard.api.virtual.timeline import Timeline
from fullshard.comm.mesh import init_mesh
from fullshard.core.errors import ConfigError
from fullshard.features import meta_parameters
from fullshard.plan.hardware import Cluster
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job


def time_step(
    values: dict[str, Any], job: Job, cluster: Cluster, *, rank: int = 0, host: HostCosts | None = None
) -> Timeline:
    """Time a step of the engine in virtual time: as one of many ranks, on devices that are not there.

    Args:
        values: the model's `config.json`; a causal language model.
        job: how it is trained: whole models, in bfloat16 or float32, with AdamW, nothing on the host, no packing.
        cluster: the devices.
        rank: which of them to be.
        host: the times that the host takes.

    Raises:
        ConfigError: a job that cannot be timed.
    """
    untimed = {
        "method": job.method != "full",
        "offload": bool(job.on_host) or job.on_host.activations,
        "compile": job.compile,
        "loss": job.loss != "eager",
        "step in backward": job.schedule.steps_in_backward,
        "optimizer": job.optimizer not in ("adamw", "adamw-fused"),
    }
    if refused := [name for name, is_refused in untimed.items() if is_refused]:
        raise ConfigError(
            f"no virtual time with {', '.join(f'{name} = {getattr(job, name, True)}' for name in refused)}",
            hint="leave them out, or ask fullshard plan",
        )
    if not 0 <= rank < cluster.count:
        raise ConfigError(f"rank {rank} of {cluster.count} ranks", hint="ranks count from 0")
    attention = "eager" if job.attention == "eager" else register(job, cluster.device)
    with meta_parameters():
        model = transformers_model({**values, **_positions(values, job)}, attention=attention)().float()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"no virtual time of {type(model).__name__}, which has an encoder and a decoder",
            hint="ask fullshard plan; or leave out --timeline and --plot",
        )
    device = VirtualDevice(cluster, host)
    dropout = contextlib.nullcontext() if cluster.device.is_cpu else fused_dropout()
    with playing(device, rank, cluster.count), fused_optimizers(), dropout:
        shard_size = job.row.shard_size_on(cluster.per_host, job.shard_size)
        mesh = init_mesh(shard_size=job.row.mesh_shape(cluster.count, shard_size)[1], device=torch.device("meta"))
        name_groups(mesh)
        shard_without_weights(model, job, mesh, device.note_event)
        batch = TokenBatch(job.micro_batch, job.seq_len, job.accumulation)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return last_step(device, model, optimizer, batch)


def _positions(values: dict[str, Any], job: Job) -> dict[str, int]:
    """Return the number of positions, at least the tokens in a sequence of the job, under its name in the file."""
    name = "n_positions" if "n_positions" in values else "max_position_embeddings"
    return {name: max(job.seq_len, values.get(name, 0))}
