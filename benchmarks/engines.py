"""One function per engine: turn the model into a training step, the way that engine's users would.

All engines get the same model, batches, seed and AdamW flags, compute in the row's dtype, and keep main weights,
gradient reduction and optimizer state in fp32, unless the row is bf16 only. Each wraps by transformer block where it
has a notion of wrapping, and keeps its own defaults otherwise.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook and takes no strings.
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import blocks
from benchmarks.record import Job

TrainStep = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Engine:
    """How to run one engine.

    Args:
        build: makes the training step, which takes a batch of token ids and returns this rank's loss.
        package: imported before memory is counted, so that an engine's code does not count as its training memory.
        environment: variables the engine's workers need, set before the package is imported.
    """

    build: Callable[[nn.Module, Job], TrainStep]
    package: str = "torch"
    environment: Mapping[str, str] = field(default_factory=dict)


def adamw(parameters: Iterable[Tensor], job: Job) -> torch.optim.AdamW:
    """The optimizer of every engine: torch's fused AdamW with one set of flags."""
    return torch.optim.AdamW(parameters, lr=job.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


class MainWeights:
    """AdamW on fp32 main weights of a bf16 model: what mixed precision means where an engine brings none of its own."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._compute: list[Tensor] = list(model.parameters())
        self._main: list[Tensor] = [nn.Parameter(weight.detach().clone()) for weight in self._compute]
        gradients = [torch.zeros_like(weight) for weight in self._main]
        for weight, gradient in zip(self._main, gradients, strict=True):
            weight.grad = gradient
        self.gradient_of: dict[Tensor, Tensor] = dict(zip(self._compute, gradients, strict=True))
        model.to(torch.bfloat16)
        self._optimizer = adamw(self._main, job)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Casts the model's gradients into the main gradients."""
        for weight in self._compute:
            if weight.grad is not None:
                self.gradient_of[weight].copy_(weight.grad)

    @torch.no_grad()
    def step(self) -> None:
        """Updates the main weights and casts them into the model."""
        self._optimizer.step()
        torch._foreach_copy_(self._compute, self._main)


def reduce_in_fp32(main_weights: MainWeights, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: average a bf16 bucket in fp32 into the main gradients, as the sharding engines do."""
    buffer = bucket.buffer()
    reduced = buffer.float().div_(dist.get_world_size())
    offsets = [gradient.storage_offset() - buffer.storage_offset() for gradient in bucket.gradients()]

    def scatter(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        flat = future.value()[0]
        for weight, offset in zip(bucket.parameters(), offsets, strict=True):
            main_weights.gradient_of[weight].copy_(flat[offset : offset + weight.numel()].view_as(weight))
        return buffer

    work = dist.all_reduce(reduced, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(scatter)
    return averaged


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainStep:
    """Forward, backward, update: the same lines for every engine that needs no others."""

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_bare(model: nn.Module, job: Job) -> TrainStep:
    """One process, no communication: the limit for the others."""
    if job.row.dtype != "bf16":
        return plain_step(model, adamw(model.parameters(), job))
    main_weights = MainWeights(model, job)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        main_weights.collect_gradients()
        main_weights.step()
        model.zero_grad()
        return loss.detach()

    return step


def build_ddp(model: nn.Module, job: Job) -> TrainStep:
    """Torch's DistributedDataParallel."""
    if job.row.dtype != "bf16":
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return plain_step(replica, adamw(replica.parameters(), job))
    main_weights = MainWeights(model, job)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replica.register_comm_hook(main_weights, reduce_in_fp32)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = replica(input_ids=batch, labels=batch).loss
        loss.backward()
        main_weights.step()
        replica.zero_grad()
        return loss.detach()

    return step


def build_fsdp1(model: nn.Module, job: Job) -> TrainStep:
    """Torch's FullyShardedDataParallel, wrapped by block."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks(model)}),
        mixed_precision=precision if job.row.dtype == "bf16" else None,
        device_id=torch.device(job.device),
        use_orig_params=True,
    )
    return plain_step(sharded, adamw(sharded.parameters(), job))


def build_fsdp2(model: nn.Module, job: Job) -> TrainStep:
    """Torch's fully_shard on each block, then on the root."""
    return _fsdp2(model, job, (dist.get_world_size(),))


def build_fsdp2_hybrid(model: nn.Module, job: Job) -> TrainStep:
    """The same, sharded inside each host only."""
    return _fsdp2(model, job, _hosts_and_ranks())


def build_fsdp2_offload(model: nn.Module, job: Job) -> TrainStep:
    """The same; shards, gradients and optimizer state are in host memory."""
    offload = CPUOffloadPolicy(pin_memory=job.device != "cpu")
    return _fsdp2(model, job, (dist.get_world_size(),), offload_policy=offload)


def _hosts_and_ranks() -> tuple[int, int]:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() // local, local


def _fsdp2(model: nn.Module, job: Job, shape: tuple[int, ...], **options: Any) -> TrainStep:
    mesh = init_device_mesh(job.device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy()
    if job.row.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return plain_step(model, adamw(model.parameters(), job))


def build_fullshard(model: nn.Module, job: Job) -> TrainStep:
    """Fullshard's fully_shard, called as torch's is."""
    return plain_step(*_fullshard(model, job))


def build_fullshard_packed(model: nn.Module, job: Job) -> TrainStep:
    """The same; weights are sent as int8, gradients as bf16."""
    return plain_step(*_fullshard(model, job, sent={"gather_as": torch.int8, "reduce_as": torch.bfloat16}))


def build_fullshard_hybrid(model: nn.Module, job: Job) -> TrainStep:
    """The same, sharded inside each host only."""
    return plain_step(*_fullshard(model, job, mesh=init_device_mesh(job.device, _hosts_and_ranks())))


def build_fullshard_offload(model: nn.Module, job: Job) -> TrainStep:
    """The same; shards, gradients and optimizer state are in host memory."""
    policy = importlib.import_module("fullshard").CPUOffloadPolicy()
    return plain_step(*_fullshard(model, job, offload_policy=policy))


def build_fullshard_in_backward(model: nn.Module, job: Job) -> TrainStep:
    """The same; the optimizer steps in backward."""
    model, optimizer = _fullshard(model, job)
    importlib.import_module("fullshard").step_in_backward(optimizer)
    return plain_step(model, optimizer)


def _fullshard(
    model: nn.Module, job: Job, *, sent: Mapping[str, torch.dtype] | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    fullshard = importlib.import_module("fullshard")
    dtypes = dict(sent or {})
    if job.row.dtype == "bf16":
        dtypes |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = fullshard.MixedPrecisionPolicy(**dtypes)
    for module in [*blocks(model), model]:
        fullshard.fully_shard(module, mp_policy=policy, **options)
    return model, adamw(model.parameters(), job)


def build_accelerate(model: nn.Module, job: Job) -> TrainStep:
    """Accelerate's own loop over FSDP2, wrapped by transformer block.

    Accelerate leaves FSDP out on CPUs, so it is told here that FSDP is on. All that follows is its own.
    """
    accelerate = importlib.import_module("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = accelerate.Accelerator(
        cpu=job.device == "cpu", mixed_precision="bf16" if job.row.dtype == "bf16" else "no", fsdp_plugin=plugin
    )
    state = accelerator.state
    state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
    prepared, optimizer = accelerator.prepare(model, adamw(model.parameters(), job))

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = prepared(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_deepspeed(model: nn.Module, job: Job) -> TrainStep:
    """DeepSpeed ZeRO-3 with torch's AdamW, because its own CPU Adam is for offloading and has other flags."""
    deepspeed = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": job.row.sequences,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default clips to norm 1, which no other engine here does
        "communication_data_type": "fp32",
        "bf16": {"enabled": job.row.dtype != "fp32"},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters(), job), config=config)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


ENGINES = {
    "bare": Engine(build_bare),
    "bares": Engine(build_bare),
    "ddp": Engine(build_ddp),
    "fsdp1": Engine(build_fsdp1),
    "fsdp2": Engine(build_fsdp2),
    "accelerate": Engine(
        build_accelerate, package="accelerate", environment={"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    ),
    "deepspeed": Engine(build_deepspeed, package="deepspeed", environment={"DS_ACCELERATOR": "cpu"}),
    "fullshard": Engine(build_fullshard, package="fullshard"),
    "fullshard-in-backward": Engine(build_fullshard_in_backward, package="fullshard"),
    "fsdp2-offload": Engine(build_fsdp2_offload),
    # On CPUs, which are their own hosts, memory beside stands for it.
    "fullshard-offload": Engine(
        build_fullshard_offload, package="fullshard", environment={"FULLSHARD_OFFLOAD": "rehearse"}
    ),
    # Of `benchmarks.hosts` only:
    "fsdp2-hybrid": Engine(build_fsdp2_hybrid),
    "fullshard-gloo": Engine(build_fullshard, package="fullshard", environment={"FULLSHARD_COMM": "gloo"}),
    "fullshard-hybrid": Engine(build_fullshard_hybrid, package="fullshard"),
    "fullshard-packed": Engine(build_fullshard_packed, package="fullshard"),
}
