"""Published figures of 2025 and 2026, and one table of 2024-11: what `test_plan_published.py` compares besides.

They were written down before any of them was predicted, and nothing was changed to fit one of them. Sources, by
repository and commit:

    torchtitan    pytorch/torchtitan b5bcd76c, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 3; their H100
                  are of 96 GB and 2.4 TB/s, held to 500 W))
    torchtune     pytorch/torchtune bd2a0fc7, README.md, "Optimization flags": one A100, Llama 3.2 3B in bfloat16, 2 x
                  4096 packed tokens, each line with what those above it have; what is said of memory is what was
                  active, so the allocator's share is left out. Its lines are the engine's own plans: one rank is
                  nothing but its tensors. 8-bit states that step in backward are not planned, so that line is missing
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
_COMPILED = {**_TITAN, "compile": True}

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

_IN_PLACE = "torchtune's loss: each chunk's gradient takes its logits' place, 2 bytes per logit (2.0 GiB less), not 4"


def _tune(name: str, job: dict[str, Any], gib: float, speed: float, reason: str = "") -> Recent:
    return Recent(f"torchtune 3B, 1 x A100, {name}", "Llama-3.2-3B", "1xA100", job, speed, gib, reason=reason)


ROWS = [
    Recent("torchtitan 8B, 128 x H100", "Llama-3.1-8B", "128xH100", _TITAN, 5605, 67.0, _FSDP2),
    Recent("torchtitan 8B, 128 x H100, compiled", "Llama-3.1-8B", "128xH100", _COMPILED, 6514, 62.0, _FSDP2),
    _tune("packed", _TUNE[0], 60.0, 7075),
    _tune("compiled", _TUNE[1], 51.0, 8998),
    _tune("loss in chunks", _TUNE[2], 42.9, 9174),
    _tune("checkpointing", _TUNE[3], 24.9, 7210),
    _tune("step in backward", _TUNE[4], 23.1, 7309),
    _tune("activations on the host", _TUNE[5], 21.8, 7301),
    _tune("LoRA", {**_ADAPTERS, "method": "lora"}, 8.5, 8210, _IN_PLACE),
    _tune("QLoRA", {**_ADAPTERS, "method": "qlora"}, 4.6, 8035, _IN_PLACE),
]  # fmt: skip
