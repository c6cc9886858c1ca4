"""What other engines need for the same job: the same activations and logits, their own way of holding parameters.

Used to check the formulas against published figures and to show what differs. Two moments can be the fullest: the
loss's backward (all activations and the logits) and a layer's backward (all inputs of layers, one layer recomputed).

| term | FSDP1 with Transformers and PEFT | FSDP2 (torchtitan) | here |
|---|---|---|---|
| parameters, state | / W | / W | / W |
| scales of 4-bit weights | whole on every rank: plain tensors, not parameters | the same | / W |
| gathered | root and two units | root; two gather buffers and one unit of parameters | root and two units |
| gradients of one unit | compute dtype, and the reduce input | the same | the reduce input |
| root's gradient | compute dtype, reduced when it is complete | the same | the reduce input, from the start |
| LoRA inputs | with dropout, a copy and a mask per target | | PEFT's too; a plan assumes no dropout |
| logits | float32, with a shifted copy (Transformers before 4.45) | one copy | one copy |

Sources: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py (FSDP1), fully_shard/_fsdp_collectives.py (FSDP2),
transformers/models/llama/modeling_llama.py 4.39, peft/tuners/lora/layer.py 0.10, bitsandbytes/functional.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fullshard.core.dtypes import itemsize
from fullshard.plan.activations import layer_activations
from fullshard.plan.evaluate import Plan
from fullshard.plan.experts import slowdown
from fullshard.plan.hardware import DEVICES
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.losses import BACKWARD_LOSS_NBYTES, moved_nbytes
from fullshard.plan.memory import fragments_nbytes
from fullshard.plan.methods import apply_method
from fullshard.plan.shapes import ModelShape, UnitShape

Tool = Literal["allocated", "reserved", "nvidia-smi"]
"""What was measured: tensors; what the allocator holds; all the device holds."""

CONTEXT = 3 * 2**29
"""Bytes that only nvidia-smi sees: the CUDA context with its kernels (0.4 to 0.6 GiB) and NCCL's buffers (about 1 GiB
for the communicators of one job)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How another engine runs a job.

    Attributes:
        engine: `fsdp1` or `fsdp2`.
        tool: what the figure was measured with.
        dropout: whether LoRA inputs are dropped out, so that each target keeps its own copy.
        logit_nbytes: bytes per logit at the worst moment of the loss. Transformers before 4.45: the returned float32
            logits, log-softmax's output, its gradient, and that of its input. torchtitan frees the logits first.
        adapter_dtype: dtype of adapters and their optimizer state.
    """

    engine: Literal["fsdp1", "fsdp2"] = "fsdp1"
    tool: Tool = "reserved"
    dropout: bool = True
    logit_nbytes: int = 4 + BACKWARD_LOSS_NBYTES
    adapter_dtype: str = "float32"


def peer_memory(model: ModelShape, job: Job, peer: Peer, *, ranks: int) -> dict[str, int]:
    """Bytes of one rank at its fullest moment, by term.

    Args:
        model: as published.
        job: as published; the strategy is full sharding.
        peer: the engine and how it was measured.
        ranks: devices.
    """
    if peer.dropout and job.method != "full":
        job = job.model_copy(update={"lora_dropout": 0.1})
    trained = apply_method(model, job)
    persistent = _persistent(trained, job, peer, ranks)
    loss, layer = _loss_moment(trained, job, peer), _layer_moment(trained, job, peer, ranks)
    worst = loss if sum(loss.values()) > sum(layer.values()) else layer
    terms = {**persistent, **_gathered(trained, job, peer), **worst}
    transient = sum(terms.values()) - sum(persistent.values())
    if peer.tool != "allocated":
        terms["allocator"] = fragments_nbytes(transient)
    if peer.tool == "nvidia-smi":
        terms["context"] = CONTEXT
    return {name: nbytes for name, nbytes in terms.items() if nbytes}


def _persistent(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    main = job.main_dtype if job.method == "full" else peer.adapter_dtype
    width = itemsize(main)
    trained = model.trainable_numel
    frozen = sum(p.nbytes for p in model.parameters if not p.trainable and p.role != "scale")
    on_device = 0 if job.offload else 1
    return {
        "frozen parameters": on_device * frozen // ranks,
        "scales": sum(p.nbytes for p in model.parameters if p.role == "scale"),
        "main weights": on_device * trained * width // ranks,
        "optimizer state": round(on_device * trained * job.planned_optimizer.state_nbytes(main) / ranks),
    }


def _unit_nbytes(unit: UnitShape, job: Job) -> int:
    """The unit as it is gathered: floating parameters in the compute dtype, bytes as they are, scales never."""
    compute = itemsize(job.compute_dtype)
    return sum(p.nbytes if p.exact else p.numel * compute for p in unit.parameters if p.role != "scale")


def _gathered(model: ModelShape, job: Job, peer: Peer) -> dict[str, int]:
    unit = max(_unit_nbytes(unit, job) for unit in model.units[:-1])
    return {
        "root unsharded": _unit_nbytes(model.root, job),
        # FSDP2 copies parameters out of its gather buffers, two of which are alive.
        "units unsharded": unit * (3 if peer.engine == "fsdp2" else 2),
    }


def _kept(model: ModelShape, job: Job) -> int:
    return sum(layer_activations(block, job, DEVICES["H100"]).kept for block in model.blocks)


def _loss_moment(model: ModelShape, job: Job, peer: Peer) -> dict[str, int]:
    logits = job.tokens * model.vocab * peer.logit_nbytes if job.loss == "eager" else 0
    return {"activations kept": _kept(model, job), "logits and loss": logits}


def _layer_moment(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    block = model.blocks[0]
    unit = max(model.units[:-1], key=lambda unit: unit.numel)
    layer = layer_activations(block, job, DEVICES["H100"])
    compute = itemsize(job.compute_dtype)
    trained = sum(p.numel for p in unit.parameters if p.trainable)
    width = itemsize(job.main_dtype if job.method == "full" else peer.adapter_dtype)
    packed = max((p.numel for p in unit.parameters if p.exact), default=0)
    on_device = 0 if job.offload else 1
    return {
        "activations kept": _kept(model, job),
        "one layer recomputed": layer.recomputed,
        "temporaries": layer.working,
        "unpacked weight": 2 * packed * compute,
        # Reductions under way: gradients in the compute dtype, and the reduce input in that of the sum.
        "unsharded gradients": trained * (compute + width),
        "gradients": on_device * model.trainable_numel * width // ranks,
    }


def prime_rl_seconds(plan: Plan) -> float:
    """Seconds of a step of prime-rl's reinforcement learning that a plan does not have, as of January 2026 (d8f290ef).

    positions   `get_response_lengths` (trainer/utils.py) looks for the starts of sequences in a loop over positions on
                the device. For each token the host selects a position, starts a comparison, and copies the result, for
                which it waits. Packed sequences replaced it in June (pull request 2723)
    logits      `FusedOutputLinear` (trainer/models/layers/lm_head.py) has chunks of 2,048 words for all tokens, and
                each operation is a kernel: forward moves 54 bytes per logit for log-softmax and entropy, and backward
                58. Each chunk also adds to the gradient of all hidden states
    adapters    there is room for the adapters of four runs, so on Hopper both factors are grouped products
                (trainer/models/layers/lora), as slow as those of experts in a plan
    """
    model, job, device = plan.setting.model, plan.setting.job, plan.cluster.device
    positions = HostCosts().seconds(kernels=2, views=1) * job.tokens
    logits = (54 + 58 + 6 * model.hidden / 2048) * model.vocab * job.tokens
    passes = (logits - moved_nbytes(model, job)) / device.memory_speed
    grouped = 0.0
    if device.name in ("H100", "H200"):
        grouped = sum(_grouped_adapters_flops(unit, job) for unit in model.units) / (device.flops * device.efficiency)
    return job.accumulation * (positions + passes + grouped)


def _grouped_adapters_flops(unit: UnitShape, job: Job) -> float:
    """FLOP that take as long as a layer's grouped products of adapters: each tile has 128 columns and a start.

    Backward repeats forward, multiplies the gradient of the output by both factors, and computes their gradients.
    """
    total = 0.0
    for p in unit.parameters:
        if ".lora_" not in p.name or unit.block is None:
            continue
        rows = job.tokens * (unit.block.experts_per_token if ".experts" in p.name else 1)
        rank, width = job.adapter_rank, p.shape[".lora_A" in p.name]
        into = 2 * rows * 128 * width * slowdown(math.inf, width)  # from the width to the rank
        out = 2 * rows * rank * width * slowdown(math.inf, rank)
        own = 2 * rows * 128 * width
        total += (2 * into + out if ".lora_A" in p.name else 2 * out + into) + own
    return total
