"""QLoRA: LoRA adapters on a model that is quantized to 4 bits while it is read, each rank its own part.

    fullshard launch --num_processes 2 examples/qlora.py

Needs bitsandbytes (`pip install "fullshard[sft,quant]"`), which works on CPUs, too.
"""

import argparse

import small
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import fullshard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="out/qlora")
args = parser.parse_args()

# The adapter names its base model. This one is deleted at the end; yours stays, so that the adapter can be loaded.
name = small.model()  # yours: "Qwen/Qwen3-0.6B", or a directory
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
trainer = SFTTrainer(
    # Transformers' own from_pretrained works as well; it puts the whole model into every rank's memory first.
    model=fullshard.from_pretrained(AutoModelForCausalLM, name, dtype=torch.bfloat16, quantization_config=quantization),
    processing_class=AutoTokenizer.from_pretrained(name),
    train_dataset=small.chats(),  # yours: load_dataset(...), with a column `messages`
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_length=64,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
trainer.save_model()  # the adapters, for PEFT
