"""A script for plain TRL that tunes a model which is sharded as it is loaded.

MODEL OUTPUT SIZES(JSON) STEPS lora|full|dpo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def main(path: str, output: str, given: str, steps: str, how: str) -> None:
    sizes = json.loads(given)
    ways = sizes.get("dp_replicate_size", 1) * sizes.get("fsdp_size", 1)
    options: dict[str, Any] = {"dtype": "float32", **({"distributed_config": sizes} if sizes else {})}
    generator = torch.Generator().manual_seed(3)
    texts = [
        " ".join(f"w{int(i)}" for i in torch.randint(0, 100, (3 + n % 5,), generator=generator)) for n in range(64)
    ]
    config, trainer_class = (DPOConfig, DPOTrainer) if how == "dpo" else (SFTConfig, SFTTrainer)
    arguments = config(
        output, use_cpu=True, bf16=False, max_steps=int(steps), per_device_train_batch_size=4 // ways, seed=5,
        gradient_accumulation_steps=2, learning_rate=1e-2, adam_epsilon=1e-3,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", disable_tqdm=True, report_to=[],
        # Each rank balances its own batch, as with data parallelism alone, so this loss is not that of one process.
        router_aux_loss_coef=0.0, gradient_checkpointing=how == "lora",
        model_init_kwargs=None if how == "lora" else options,
    )  # fmt: skip
    model: Any = path if how != "lora" else AutoModelForCausalLM.from_pretrained(path, **options)
    torch.manual_seed(5)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if how == "lora" else None
    pairs = zip(texts, texts[1:] + texts[:1], strict=True)
    samples = [{"prompt": good, "chosen": f" {good}", "rejected": f" {bad}"} for good, bad in pairs]
    rows = Dataset.from_list(samples if how == "dpo" else [{"text": text} for text in texts])
    trainer = trainer_class(model=model, args=arguments, train_dataset=rows, peft_config=adapter)
    trainer.train()
    trainer.save_model(f"{output}/final")
    if trainer.is_world_process_zero():
        history = [(row["step"], row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        Path(output, "history.json").write_text(json.dumps({"history": history}))


main(*sys.argv[1:])
