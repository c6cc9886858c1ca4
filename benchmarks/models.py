"""The model and the data that every engine is given alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.catalog import SHAPES
from benchmarks.record import Job

VOCABULARY = 50257
# A few batches in turn: the loss then falls within a dozen steps, so a wrong gradient shows in the last loss. Fresh
# random tokens at every step would keep the loss at log(vocabulary) whatever the optimizer does.
NUM_BATCHES = 4


def build_model(job: Job) -> nn.Module:
    """The row's model in fp32 on the job's device, the same weights for every engine and rank."""
    shape = SHAPES[job.row.model]
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(job.seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(job.device).train()


def build_batches(job: Job, rank: int) -> list[Tensor]:
    """The rank's token batches, each of shape (sequences, tokens); step i takes batch i modulo their number."""
    generator = torch.Generator().manual_seed(job.seed + 1 + rank)
    size = (job.row.sequences, job.row.tokens)
    return [torch.randint(VOCABULARY, size, generator=generator).to(job.device) for _ in range(NUM_BATCHES)]
