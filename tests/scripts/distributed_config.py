"""A script for plain Transformers: a model that is sharded as it is loaded, and its Trainer.

MODEL OUTPUT SIZES(JSON) STEPS RESUME
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, DistributedConfig, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(path: str, output: str, sizes: str, steps: str, resume: str) -> None:
    sizes = json.loads(sizes)
    divided = {name: sizes.pop(name) for name in ("cp_size", "sp_size") if name in sizes}
    ways = sizes.get("dp_replicate_size", 1) * sizes.get("fsdp_size", 1) // math.prod(divided.values())
    config = ParallelismConfig(dp_shard_size=ways, **divided) if divided else None
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    arguments = TrainingArguments(
        output_dir=output, use_cpu=True, max_steps=int(steps), per_device_train_batch_size=8 // ways, seed=5,
        learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, save_steps=2, disable_tqdm=True,
        report_to=[], parallelism_config=config,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume == "resume")
    trainer.save_model(f"{output}/final")
    if trainer.is_world_process_zero():
        history = [(row["step"], row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        Path(output, "history.json").write_text(json.dumps({"history": history}))


main(*sys.argv[1:])
