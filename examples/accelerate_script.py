"""An Accelerate script: accumulation, clipping, a schedule, evaluation. Only the import is another.

fullshard launch --num_processes 2 examples/accelerate_script.py
"""

import argparse

import small
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from fullshard import Accelerator  # was: from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--output", help="write the model to this directory, for from_pretrained")
args = parser.parse_args()

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(small.model())  # yours: "Qwen/Qwen3-0.6B", or a directory
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
train = DataLoader(small.text(pieces=1024, length=64), batch_size=args.batch_size, shuffle=True)
test = DataLoader(small.text(pieces=1152, length=64)[1024:], batch_size=args.batch_size)
# As with Accelerate, a prepared scheduler takes one step per process.
steps = args.epochs * len(train) // accelerator.gradient_accumulation_steps
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)

for epoch in range(args.epochs):
    model.train()
    for number, batch in enumerate(train, start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 1 or number % 20 == 0:
            accelerator.print(f"epoch {epoch}  batch {number}  loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**batch).loss[None]) for batch in test]
    accelerator.print(f"epoch {epoch}  evaluation loss {torch.cat(losses).mean().item():.4f}")

if args.output:
    accelerator.unwrap_model(model).save_pretrained(
        args.output, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
accelerator.end_training()
