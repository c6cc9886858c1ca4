"""Stop, and go on with another number of ranks: weights, optimizer, random states and place in the data.

    fullshard launch --num_processes 2 examples/resume.py --steps 30
    fullshard launch --num_processes 1 examples/resume.py --steps 60

No rank ever holds the whole model: each reads what it will own, from the model's files as from a checkpoint. A signal
(SIGTERM, SIGUSR1, Ctrl-C) ends it after a step that all ranks agree on, with a checkpoint.
"""

import argparse

import small
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint import latest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30, help="in all, those before this start included")
parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
parser.add_argument("--output", default="out/resume")
args = parser.parse_args()

accelerator = Accelerator()
model = fullshard.from_pretrained(AutoModelForCausalLM, small.model())  # yours: "Qwen/Qwen3-0.6B", or a directory
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = small.text(pieces=2048, length=64)
loader = DataLoader(data, batch_size=args.batch_size // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, newest = 0, latest_checkpoint(args.output)
if newest is not None:
    accelerator.load_state(newest)
    step = int(newest.name.removeprefix("step-"))
    accelerator.print(f"resumed after step {step}, with world size {accelerator.num_processes}")

ended = step >= args.steps or fullshard.should_stop()  # listens to signals from now on, as loaders' processes do
while not ended:
    for batch in loader:  # after a resume: the samples of this epoch that were not used yet
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 1 or step % 10 == 0:
            accelerator.print(f"step {step}  loss {loss.item():.4f}")
        ended = step >= args.steps or fullshard.should_stop()  # the same answer on every rank
        if ended or step % args.save_every == 0:
            accelerator.save_state(f"{args.output}/step-{step}")
        if ended:
            break
accelerator.end_training()
