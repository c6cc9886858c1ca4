"""Small models, data and Trainer runs for the tests of the Transformers integration; run on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", ACCELERATE_USE_CPU="true")

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from fullshard.checkpoint import full_state_dict
from fullshard.features import ShardedParameter
from tests.differential import EPS, TOLERANCE
from tests.distributed import preload

preload("tests.trainers", "transformers.trainer", "accelerate", "peft")

OFFLINE = {name: os.environ[name] for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU")}
GLOBAL_BATCH = 4
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}


def keep_layout(model: nn.Module) -> nn.Module:
    """Have a model with 4-bit weights compute in eval mode as in training, on every processor.

    Where there are bf16 instructions, bitsandbytes changes the weights to another layout, whose kernel rounds otherwise
    and does not take weights as narrow as those of tests. Sharded models keep the layout by themselves.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def build(family: str = "llama") -> Any:
    """The same weights on every call and every rank."""
    torch.manual_seed(1)
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SMALL))
        case "tied":
            return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
        case "qwen":
            return Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
        case "gemma":
            return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8))
        case "experts":
            return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **EXPERTS, num_experts_per_tok=2))
    raise ValueError(family)


def samples(count: int = 24, *, lengths: tuple[int, ...] = (12,)) -> list[dict[str, torch.Tensor]]:
    """Token sequences, of the given lengths in turn."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, 97, (lengths[i % len(lengths)],), generator=generator) for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator for rows of different lengths."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def arguments(output: str | Path, *, stock: bool = False, **settings: Any) -> Any:
    """Training arguments for a short run: Transformers' own, or those with fullshard's reading of `fsdp`."""
    import transformers

    from fullshard.integrations.transformers import TrainingArguments

    size = dist.get_world_size() if dist.is_initialized() else 1
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // size,
        "per_device_eval_batch_size": GLOBAL_BATCH // size,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": EPS,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "no",
    }
    if not stock:
        defaults |= {"fsdp": "full_shard auto_wrap"}
    return (transformers.TrainingArguments if stock else TrainingArguments)(str(output), **defaults | settings)


def trainer(model: Any, args: Any, *, stock: bool = False, **options: Any) -> Any:
    """A trainer over `samples`, Transformers' own or the sharded one."""
    import transformers

    from fullshard.integrations.transformers import Trainer

    options = {"train_dataset": samples(), "data_collator": pad, **options}
    return (transformers.Trainer if stock else Trainer)(model, args, **options)


def run(output: str, family: str = "llama", stock: bool = False, options: Mapping[str, Any] | None = None) -> Any:
    """Train, and return the losses, gradient norms and final weights (on rank 0)."""
    settings = dict(options or {})
    lengths = settings.pop("lengths", (12,))
    made = trainer(
        build(family),
        arguments(output, stock=stock, **settings),
        stock=stock,
        train_dataset=samples(lengths=lengths),
    )
    made.train()
    return result(made)


def logged(made: Any) -> dict[str, Any]:
    """Losses and gradient norms of the steps, and the operations counted."""
    history = made.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "evals": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "flos": next((entry["total_flos"] for entry in history if "total_flos" in entry), None),
    }


def result(made: Any) -> dict[str, Any]:
    """What a run is judged by."""
    sharded = [p for p in made.model.parameters() if isinstance(p, ShardedParameter)]
    weights = full_state_dict(made.model) if sharded else made.model.state_dict()
    return logged(made) | {
        "weights": {name: value.detach().clone() for name, value in weights.items()},
        "own": sum(p.interval.numel for p in sharded),
        "total": sum(p.numel() for p in sharded),
    }


def close(one: list[float], other: list[float], tolerance: float = TOLERANCE) -> bool:
    """Whether the numbers agree to a relative `tolerance`."""
    return len(one) == len(other) > 0 and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(one, other, strict=True))
