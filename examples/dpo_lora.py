"""Preferences: TRL's DPOTrainer, which trains LoRA adapters. The reference model is the policy without its adapters.

    fullshard launch --num_processes 2 examples/dpo_lora.py

What is saved are the adapters; `fullshard merge BASE out/dpo MERGED` puts them into the base.
"""

import argparse

import small
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="out/dpo")
args = parser.parse_args()

trainer = DPOTrainer(
    model=small.model(),  # yours: "Qwen/Qwen3-0.6B", or a directory
    train_dataset=small.preferences(),  # yours: load_dataset(...), with `prompt`, `chosen` and `rejected`
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=DPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        beta=0.1,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
trainer.save_model()
