"""Fine-tuning on chats with TRL's SFTTrainer: nothing in it is about sharding.

    fullshard launch --num_processes 2 examples/sft.py

`fullshard sft` does this without a script: docs/sft.md.
"""

import argparse

import small
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="out/sft")
args = parser.parse_args()

trainer = SFTTrainer(
    model=small.model(),  # yours: "Qwen/Qwen3-0.6B", or a directory
    train_dataset=small.chats(),  # yours: load_dataset(...), with a column `messages`
    args=SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_length=64,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
trainer.save_model()  # whole, for from_pretrained
