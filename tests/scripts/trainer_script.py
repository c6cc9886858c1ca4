"""A Trainer script as people have it: not a word about fullshard."""

import argparse
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class MyTrainer(Trainer):
    def log(self, logs, *args, **kwargs):
        if self.is_world_process_zero() and "loss" in logs:
            print("LOSS", logs["loss"], flush=True)
        super().log(logs, *args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--generate", type=int, default=0, help="tokens, at the end")
    own, rest = parser.parse_known_args()
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **SMALL))
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, 97, (12,), generator=generator) for _ in range(own.samples)]
    trainer = MyTrainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    checkpoint = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)
    if own.generate:
        first = rows[0][None, :4].to(trainer.model.device)
        print("DEVICE", first.device)
        print("TOKENS", *trainer.model.generate(first, max_new_tokens=own.generate, do_sample=False)[0, 4:].tolist())
    held = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    # In one piece: another rank's line may come in between where a stream is not buffered.
    sys.stdout.write(f"PARAMETERS {trainer.is_fsdp_enabled} {sum(part.numel() for part in held)}\n")
    sys.stdout.flush()
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


if __name__ == "__main__":
    main()
