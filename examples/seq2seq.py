"""An encoder and a decoder: T5 learns to write digits backwards, with Transformers' Seq2SeqTrainer.

fullshard launch --num_processes 2 examples/seq2seq.py
"""

import argparse
import random

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="out/seq2seq")
args = parser.parse_args()

set_seed(0)
# yours: model = T5ForConditionalGeneration.from_pretrained("google/flan-t5-base")
model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=16,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
)
digits = [[random.randrange(2, 12) for _ in range(6)] for _ in range(1024)]
rows = [{"input_ids": [*row, 1], "attention_mask": [1] * 7, "labels": [*reversed(row), 1]} for row in digits]

trainer = Seq2SeqTrainer(
    model,
    Seq2SeqTrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        predict_with_generate=True,
        generation_max_length=8,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=rows[:-64],
    eval_dataset=rows[-64:],
    compute_metrics=lambda found: {"digits": float((found.predictions[:, 1:8] == found.label_ids[:, :7]).mean())},
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"evaluation: loss {metrics['eval_loss']:.4f}, digits right {metrics['eval_digits']:.2f}")
