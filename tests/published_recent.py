"""Published figures of 2025 and 2026, and one table of 2024-11: what `test_plan_published.py` compares besides.

They were written down before any of them was predicted, and nothing was changed to fit one of them. Sources, by
repository and commit:

    torchtitan    pytorch/torchtitan b5bcd76c, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 3; their H100
                  are of 96 GB and 2.4 TB/s, held to 500 W) and llama3-8b_h200_202506_trainy-whitefiber.md, of a version
                  (e7c0cae) that compiles the loss, too; that of 2024-12 (9dec370) does not
    torchtune     pytorch/torchtune bd2a0fc7, README.md, "Optimization flags": one A100, Llama 3.2 3B in bfloat16, 2 x
                  4096 packed tokens, each line with what those above it have; what is said of memory is what was
                  active, so the allocator's share is left out. Its lines are the engine's own plans: one rank is
                  nothing but its tensors. 8-bit states that step in backward are not planned, so that line is missing
    Megatron      NVIDIA-NeMo/Megatron-Bridge 067f987d, docs/performance-summary-archive.md, containers 25.11 and
                  26.04.01; float8 with current scaling, kernels of Transformer Engine; recipes under perf_recipes/llama
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.peers import Peer


@dataclass(frozen=True, eq=False)
class Recent:
    """One published run.

    Attributes:
        speed: tokens per second and device; 0: not published.
        gib: of memory on each device; 0: not published.
        peer: whose memory it is; None: this engine's plan, tensors alone.
        reason: why a prediction is more than 25 % away.
    """

    name: str
    model: str
    devices: str
    job: dict[str, Any]
    speed: float = 0.0
    gib: float = 0.0
    peer: Peer | None = None
    reason: str = ""


_FSDP2 = Peer("fsdp2", dropout=False, logit_nbytes=12)
_TITAN = {"micro_batch": 2, "seq_len": 8192, "checkpointing": "selective"}
_COMPILED, _FLOAT8 = {**_TITAN, "compile": True}, {**_TITAN, "compile": True, "float8": True}
_LATER, _FUSED_LOSS = {**_FLOAT8, "loss": "kernel"}, Peer("fsdp2", dropout=False, logit_nbytes=4)
_LONG = {"micro_batch": 1, "seq_len": 32768, "checkpointing": "full", "compile": True, "float8": True}

_PACKED = {"micro_batch": 2, "seq_len": 4096, "base_dtype": "bfloat16", "precision": "no", "attention": "sdpa"}
_PACKED |= {"reduce_dtype": "bfloat16", "optimizer": "adamw-fused"}
_TUNE = [
    _PACKED,
    compiled := {**_PACKED, "compile": True},
    chunked := {**compiled, "loss": "kernel"},
    checkpointed := {**chunked, "checkpointing": "full"},
    stepping := {**checkpointed, "step_in_backward": True},
    {**stepping, "offload_activations": True},
]
_ADAPTERS = {
    **checkpointed,
    "offload_activations": True,
    "lora_rank": 64,
    "lora_targets": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}

_TE = {"seq_len": 8192, "compile": True, "float8": True, "loss": "kernel", "optimizer": "adamw-fused"}
_TE_8B = {**_TE, "attention": "flash4", "micro_batch": 2, "accumulation": 8, "strategy": "SHARD_OPTIMIZER"}
_TE_70B = {**_TE, "attention": "flash4", "micro_batch": 2, "accumulation": 2}


_POWER = "in these tables a GB300 is 1.2 times as fast as a GB200, with the same figure in its data sheet: more power"
_IN_PLACE = "torchtune's loss: each chunk's gradient takes its logits' place, 2 bytes per logit (2.0 GiB less), not 4"


def _tune(name: str, job: dict[str, Any], gib: float, speed: float, reason: str = "") -> Recent:
    return Recent(f"torchtune 3B, 1 x A100, {name}", "Llama-3.2-3B", "1xA100", job, speed, gib, reason=reason)


ROWS = [
    Recent("torchtitan 8B, 8 x H100, float8", "Llama-3.1-8B", "8xH100", _FLOAT8, 0, 76.8, _FSDP2),
    Recent("torchtitan 8B, 8 x H100, 32768 tokens, float8", "Llama-3.1-8B", "8xH100", _LONG, 3890, 83.9, _FSDP2),
    Recent("torchtitan 8B, 128 x H100", "Llama-3.1-8B", "128xH100", _TITAN, 5605, 67.0, _FSDP2),
    Recent("torchtitan 8B, 128 x H100, compiled", "Llama-3.1-8B", "128xH100", _COMPILED, 6514, 62.0, _FSDP2),
    Recent("torchtitan 8B, 128 x H100, float8", "Llama-3.1-8B", "128xH100", _FLOAT8, 8380, 61.8, _FSDP2),
    Recent("torchtitan 8B, 32 x H200, float8", "Llama-3.1-8B", "32xH200", _LATER, 10938, 47.96, _FUSED_LOSS),
    Recent("torchtitan 8B, 64 x H200, float8", "Llama-3.1-8B", "64xH200", _LATER, 10753, 46.97, _FUSED_LOSS),
    _tune("packed", _TUNE[0], 60.0, 7075),
    _tune("compiled", _TUNE[1], 51.0, 8998),
    _tune("loss in chunks", _TUNE[2], 42.9, 9174),
    _tune("checkpointing", _TUNE[3], 24.9, 7210),
    _tune("step in backward", _TUNE[4], 23.1, 7309),
    _tune("activations on the host", _TUNE[5], 21.8, 7301),
    _tune("LoRA", {**_ADAPTERS, "method": "lora"}, 8.5, 8210, _IN_PLACE),
    _tune("QLoRA", {**_ADAPTERS, "method": "qlora"}, 4.6, 8035, _IN_PLACE),
    Recent("Megatron 8B, 8 x H100", "Llama-3-8B", "8xH100",
           {**_TE, "micro_batch": 1, "accumulation": 16, "attention": "flash3"}, 14451),
    Recent("Megatron 8B, 8 x B200, DDP", "Llama-3-8B", "8xB200", _TE_8B, 30624),
    Recent("Megatron 8B, 8 x GB200, DDP", "Llama-3-8B", "8xGB200", _TE_8B, 31508),
    Recent("Megatron 8B, 8 x GB300, DDP", "Llama-3-8B", "8xGB300", _TE_8B, 37556, reason=_POWER),
    Recent("Megatron 70B, 64 x GB200", "Llama-3-70B", "64xGB200", _TE_70B, 4224),
    Recent("Megatron 70B, 64 x GB300", "Llama-3-70B", "64xGB300", _TE_70B, 5248, reason=_POWER),
]  # fmt: skip
