"""A script with Transformers' Trainer: nothing in it is about sharding.

fullshard launch --num_processes 2 examples/trainer.py
"""

import small
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
parser.set_defaults(output_dir="out/trainer", max_steps=60, learning_rate=3e-3, logging_steps=10, report_to="none")
[args] = parser.parse_args_into_dataclasses()

model = AutoModelForCausalLM.from_pretrained(small.model())  # yours: "Qwen/Qwen3-0.6B", or a directory
trainer = Trainer(model, args, train_dataset=small.text(pieces=2048, length=64))
resume = args.resume_from_checkpoint  # text: true, false, or the path of a checkpoint
trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resume).lower(), resume))
trainer.save_model()  # whole, for from_pretrained
