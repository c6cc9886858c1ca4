"""Reinforcement learning: TRL's GRPOTrainer, then the weights handed to an inference engine, name by name.

    fullshard launch --num_processes 2 examples/grpo.py

The model learns to answer with digits. The engine is another copy of the model on rank 0 here.
"""

import argparse

import small
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import fullshard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/grpo")
args = parser.parse_args()


def digits(completions: list[str], **_: object) -> list[float]:
    """The share of a completion's characters that are digits."""
    return [sum(letter in "0123456789" for letter in text) / max(1, len(text)) for text in completions]


name = small.model()  # yours: "Qwen/Qwen3-0.6B", or a directory
trainer = GRPOTrainer(
    model=name,
    reward_funcs=digits,
    train_dataset=small.prompts(),  # yours: load_dataset(...), with a column `prompt`
    args=GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()

# vLLM's and SGLang's `load_weights` take the same pairs.
engine = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
engine.load_state_dict(dict(fullshard.stream_weights(trainer.model, rank0_only=True)), strict=False)
if trainer.is_world_process_zero():
    tokenizer = AutoTokenizer.from_pretrained(name)
    asked = tokenizer("3+4=", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        answer = engine.generate(**asked, max_new_tokens=8, do_sample=False)
    print("the engine says:", tokenizer.decode(answer[0], skip_special_tokens=True))
