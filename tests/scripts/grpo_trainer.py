"""TRL's GRPO of a tiny model on CPUs with vLLM, as `grpo_engine.py` and `grpo_vllm.py` train it."""

from __future__ import annotations

from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def grpo(place: str, *, prompts: int, reward: Any, lora: peft.LoraConfig | None, **options: Any) -> GRPOTrainer:
    """Return the trainer of the model in `place`. `options` are `GRPOConfig`'s."""
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            use_vllm=True,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(prompts)]),
        processing_class=AutoTokenizer.from_pretrained(place),
        peft_config=lora,
    )
