"""What other engines need for the same job: the same activations and logits, their own way of holding parameters.

Used to check the formulas against published figures and to show what differs. Three moments can be the fullest: the
loss's backward (all activations and the logits), a layer's backward (all inputs of layers, one layer recomputed) and
the optimizer's step.

| term | FSDP1 with Transformers and PEFT | FSDP2 (torchtitan) | here |
|---|---|---|---|
| parameters, state | / W | / W | / W |
| scales of 4-bit weights | whole on every rank: plain tensors, not parameters | the same | / W |
| gathered | root and two units | root; two gather buffers and one unit of parameters | root and two units |
| gradients of one unit | compute dtype, and the reduce input | the same | the reduce input |
| root's gradient | compute dtype, reduced when it is complete | the same | the reduce input, from the start |
| LoRA inputs | with dropout, a copy and a mask per target | | PEFT's too; a plan assumes no dropout |
| logits | float32, if the loop keeps outputs (Transformers before 4.45) | bfloat16 or float32, if kept | if kept |
| experts | | outputs and their weights are multiplied in float32 (torchtitan, prime-rl) | in the router's dtype |

Four more things are in other engines only:

* `whole`: every device has a whole copy of the model, so that nothing is sharded or gathered.
* `k-bit`: the same, after PEFT's `prepare_model_for_kbit_training`, which casts norms, embeddings and head to float32.
  A float32 norm has a float32 output, and bitsandbytes' layers return the dtype of their input, so all activations are
  float32. Autocast makes a copy of the head's weight, which its backward needs.
* KempnerForge stores the loss of each layer's router in the router, and pads experts to the busiest one. The loss keeps
  the graph that backward computed again, as far as the layer's input, until the next step. With its own code on a CPU,
  8 layers of width 256 hold 30 bytes per token and unit of width each after backward, as `_held` counts, and 2 for
  tables of the rotation. In a model of 24 such layers and 8 experts, one expert gets all tokens of some layers from the
  fifth step on; `_padded` assumes all layers.
* Until version 0.43.2 (July 2024), bitsandbytes' 4-bit layers kept their inputs for backward, although they are frozen
  (bitsandbytes pull request 1270).

The loss's peak, measured on a CPU in bytes per logit: 16 with Transformers 4.37.2 and 14 with 4.46.3 if the loop keeps
its outputs, otherwise 12. Trainer keeps none. With 4.46.3, it takes 12 for one sequence, and 14 for several, whose
logits are copied in forward.

Sources: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py (FSDP1), fully_shard/_fsdp_collectives.py (FSDP2),
transformers/models/llama/modeling_llama.py 4.37, peft/tuners/lora/layer.py 0.10, peft/utils/other.py 0.14,
bitsandbytes/functional.py, autograd/_functions.py and nn/modules.py, prime-rl d8f290ef (trainer/models/layers/moe.py
and lora/multi_moe.py, utils/act_offloading.py), KempnerForge 5666d0d1 (model/router.py, moe.py and attention.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from fullshard.core.dtypes import itemsize
from fullshard.plan.activations import LayerActivations, layer_activations
from fullshard.plan.evaluate import Plan
from fullshard.plan.experts import slowdown
from fullshard.plan.hardware import DEVICES
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.losses import BACKWARD_LOSS_NBYTES, cached_nbytes, moved_nbytes
from fullshard.plan.memory import fragments_nbytes
from fullshard.plan.methods import apply_method
from fullshard.plan.shapes import Block, ModelShape, UnitShape

Tool = Literal["allocated", "reserved", "nvidia-smi"]
"""What was measured: tensors; what the allocator holds; all the device holds."""

CONTEXT, NCCL = 2**29, 2**30
"""Bytes that only nvidia-smi sees: the CUDA context with its kernels (0.4 to 0.6 GiB) and NCCL's buffers (about 1 GiB
for the communicators of one job on several devices)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How another engine runs a job.

    Attributes:
        engine: `fsdp1`, `fsdp2`, or one of the engines above.
        tool: what the figure was measured with.
        dropout: whether LoRA inputs are dropped out, so that each target keeps its own copy.
        logit_nbytes: bytes per logit at the worst moment of the loss: log-softmax's output, its gradient and its
            input's, and the logits if the loop keeps its outputs until backward is over. Before version 4.45,
            Transformers returns them in float32. Trainer and torchtitan free them before.
        adapter_dtype: dtype of adapters and their optimizer state.
        spare_adapters: copies of the adapters' weights for other runs, which have neither gradients nor state.
        keeps_inputs: whether 4-bit layers keep their inputs.
    """

    engine: Literal["fsdp1", "fsdp2", "kempner", "whole", "k-bit"] = "fsdp1"
    tool: Tool = "reserved"
    dropout: bool = True
    logit_nbytes: int = 4 + BACKWARD_LOSS_NBYTES
    adapter_dtype: str = "float32"
    spare_adapters: int = 0
    keeps_inputs: bool = False

    @property
    def is_whole(self) -> bool:
        return self.engine in ("whole", "k-bit")


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
    shards = 1 if peer.is_whole else ranks
    persistent = _persistent(trained, job, peer, shards)
    gathered = {} if peer.is_whole else _gathered(trained, job, peer)
    moments: list[dict[str, int]] = [
        {**gathered, **_loss_moment(trained, job, peer, shards)},
        {**gathered, **_layer_moment(trained, job, peer, shards)},
        _step_moment(trained, job, peer, shards),
    ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    terms = {**persistent, **fullest}
    transient = sum(fullest.values())
    if peer.tool == "reserved" and fullest is moments[0]:
        terms["block of logits"] = cached_nbytes(model, job)
        transient = 0
    if peer.tool != "allocated":
        terms["allocator"] = fragments_nbytes(transient, is_alone=ranks == 1)
    if peer.tool == "nvidia-smi":
        terms["context"] = CONTEXT + NCCL * (ranks > 1)
    return {name: nbytes for name, nbytes in terms.items() if nbytes}


def _persistent(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    main = job.main_dtype if job.method == "full" else peer.adapter_dtype
    width = itemsize(main)
    trained = model.trainable_numel
    frozen = sum(p.nbytes for p in model.parameters if not p.trainable and p.role != "scale")
    if peer.engine == "k-bit":
        frozen += sum(4 * p.numel - p.nbytes for p in model.parameters if not p.trainable and not p.exact)
    on_device = 0 if job.offload else 1
    return {
        "frozen parameters": on_device * frozen // ranks,
        "scales": sum(p.nbytes for p in model.parameters if p.role == "scale"),
        "main weights": on_device * trained * width * (1 + peer.spare_adapters) // ranks,
        "optimizer state": 0 if job.on_host.optimizer_state else _state(model, job, main) // ranks,
    }


def _state(model: ModelShape, job: Job, main: str) -> int:
    return round(model.trainable_numel * job.planned_optimizer.state_nbytes(main))


def _unit_nbytes(unit: UnitShape, job: Job, spare: int = 0) -> int:
    """The unit as it is gathered: floating parameters in the compute dtype, bytes as they are, scales never."""
    compute = itemsize(job.compute_dtype)
    counts = ((p, 1 + spare * (".lora_" in p.name)) for p in unit.parameters if p.role != "scale")
    return sum(count * (p.nbytes if p.exact else p.numel * compute) for p, count in counts)


def _gathered(model: ModelShape, job: Job, peer: Peer) -> dict[str, int]:
    unit = max(_unit_nbytes(unit, job, peer.spare_adapters) for unit in model.units[:-1])
    return {
        "root unsharded": _unit_nbytes(model.root, job),
        # FSDP2 copies parameters out of its gather buffers, two of which are alive.
        "units unsharded": unit * (3 if peer.engine in ("fsdp2", "kempner") else 2),
    }


def _layer(block: Block, job: Job, peer: Peer) -> LayerActivations:
    """What a layer keeps, with the inputs of 4-bit layers that nothing else keeps, and in float32 after `k-bit`."""
    if peer.engine == "k-bit":  # attention runs in bfloat16, in a kernel that a CPU has in float32, too
        return layer_activations(block, job.model_copy(update={"precision": "fp32"}), DEVICES["CPU"])
    layer, inputs = layer_activations(block, job, DEVICES["H100"]), 0
    if peer.keeps_inputs and job.method == "qlora":
        read = block.adapters.read_once if block.adapters and not block.adapters.dropout else 0
        widths = 2 * block.hidden + block.active_intermediate
        inputs = max(0, widths - read) * itemsize(job.compute_dtype) * job.tokens
    if peer.engine == "kempner":
        return _padded(block, job)
    if peer.engine == "fsdp2" and block.experts:
        whole, weighting = _mixture(block, job)
        kept = whole if job.checkpointing == "none" else layer.kept
        return dataclasses.replace(layer, kept=kept, recomputed=whole - kept * (kept == whole), working=weighting)
    if job.checkpointing == "none":
        return dataclasses.replace(layer, kept=layer.kept + inputs)
    return dataclasses.replace(layer, recomputed=layer.recomputed + inputs)


def _mixture(block: Block, job: Job) -> tuple[int, int]:
    """What torchtitan's mixture keeps in a layer, and the temporaries when its backward begins.

    Kept are the tokens of all experts, four tensors as wide as the experts, and the outputs in float32. Their product
    with the weights is a float32 tensor, whose gradient is one. Both gradients of the product are, too, before the
    second is summed. These are single operations: the routed layers cannot be compiled whole.
    """
    plain = dataclasses.replace(block, experts=0, experts_per_token=0, intermediate=0, adapters=None)
    width, each = itemsize(job.compute_dtype), block.experts_per_token * block.hidden
    kept = (width + 4) * each + 4 * width * block.experts_per_token * block.intermediate
    kept += 2 * width * block.shared_intermediate
    whole = layer_activations(plain, job.model_copy(update={"checkpointing": "none"}), DEVICES["H100"]).kept
    return whole + kept * job.tokens, 3 * 4 * each * job.tokens


def _held(block: Block, job: Job) -> int:
    """What a layer of KempnerForge keeps after its backward: the graph of its router's loss, down to the layer's input.

    Both norms keep a float32 copy of their input and the product before their weight. Attention keeps queries, keys and
    values of all heads, its output and a copy of that. The projections and the router keep their input.
    """
    queries = block.heads * block.head_dim
    return (2 * 8 * block.hidden + 2 * (2 * block.hidden + 5 * queries)) * job.tokens


def _padded(block: Block, job: Job) -> LayerActivations:
    """Experts of KempnerForge, all padded to the busiest one, which gets every token: inputs and four wide tensors."""
    rows, inputs = job.tokens * block.experts, 2 * block.hidden * job.tokens
    recomputed = rows * (2 * block.hidden + 3 * 2 * block.intermediate)  # the product of gate and up is freed by then
    return LayerActivations(inputs, inputs, recomputed, rows * 3 * 2 * block.intermediate, 0, 0)


def _kept(model: ModelShape, job: Job, peer: Peer) -> int:
    """What all layers keep until their backward. If it is on the host, one layer's is on the device.

    prime-rl copies without a second stream (`use_streams` in utils/act_offloading.py), so it keeps no others.
    """
    kept = [_layer(block, job, peer).kept for block in model.blocks]
    return sum(kept[-1:] if job.offload_activations else kept)


def _loss_moment(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    each = {"eager": BACKWARD_LOSS_NBYTES, "plain": 3 * itemsize(job.compute_dtype)}.get(job.loss, 0)
    return {
        "activations kept": _kept(model, job, peer),
        "the last norm's input": 4 * model.hidden * job.tokens if job.loss == "eager" else 0,
        "logits kept": _kept_logits(model, job, peer),
        "loss": job.tokens * model.vocab * each,
        "head in bfloat16": 2 * model.vocab * model.hidden if peer.engine == "k-bit" else 0,
        # Those of the micro-batches before the last.
        "gradients": _gradients(model, job, peer, ranks) if job.accumulation > 1 else 0,
    }


def _kept_logits(model: ModelShape, job: Job, peer: Peer) -> int:
    """The logits that the loop keeps until backward is over."""
    each = {"eager": peer.logit_nbytes - BACKWARD_LOSS_NBYTES, "plain": itemsize(job.compute_dtype)}.get(job.loss, 0)
    return job.tokens * model.vocab * each


def _gradients(model: ModelShape, job: Job, peer: Peer, ranks: int) -> int:
    if job.offload:
        return 0
    return model.trainable_numel * itemsize(job.main_dtype if job.method == "full" else peer.adapter_dtype) // ranks


def _layer_moment(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    unit = max(model.units[:-1], key=lambda unit: unit.numel)
    layers = [_layer(block, job, peer) for block in dict.fromkeys(model.blocks)]
    layer = max(layers, key=lambda layer: layer.recomputed + layer.working)
    compute = itemsize(job.compute_dtype)
    trained = sum(p.numel for p in unit.parameters if p.trainable)
    summed = itemsize(job.reduce_dtype or (job.main_dtype if job.method == "full" else peer.adapter_dtype))
    packed = max((p.numel for p in unit.parameters if p.exact), default=0)
    # Backward reaches the first layer last: it alone still has its input, and all have their routers' graphs.
    held = sum(_held(block, job) for block in model.blocks) if peer.engine == "kempner" else 0
    return {
        "activations kept": layer.inputs if held else _kept(model, job, peer),
        "held by routers": held,
        "logits kept": _kept_logits(model, job, peer),
        "one layer recomputed": layer.recomputed,
        "temporaries": layer.working,
        "unpacked weight": 2 * packed * compute,
        # Reductions under way: gradients in the compute dtype, and the reduce input in that of the sum.
        "unsharded gradients": trained * (compute + summed),
        "gradients": _gradients(model, job, peer, ranks),
    }


def _step_moment(model: ModelShape, job: Job, peer: Peer, ranks: int) -> dict[str, int]:
    """The optimizer's step, for which state on the host comes back if the weights are on the device."""
    if job.offload:
        return {}
    main = job.main_dtype if job.method == "full" else peer.adapter_dtype
    gradients = _gradients(model, job, peer, ranks)
    return {
        "gradients": gradients,
        "optimizer's temporaries": gradients * job.planned_optimizer.has_temporaries,
        "optimizer state, for the step": _state(model, job, main) // ranks * job.on_host.optimizer_state,
    }


def sequence_parallel_nbytes(plan: Plan) -> int:
    """Bytes of all layers' inputs that a rank does not have if its tensor-parallel group divides the sequences.

    KempnerForge does that between the parts of a layer (distributed/tensor_parallel.py); a plan does not.
    """
    job = plan.setting.job
    inputs = sum(layer_activations(block, job, plan.cluster.device).inputs for block in plan.setting.model.blocks)
    return inputs * (job.tp - 1) // job.tp


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
