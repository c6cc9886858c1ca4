"""The model and the data that every engine is given alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.catalog import SHAPES, Shape
from benchmarks.record import Job

VOCABULARY = 50257
# A few batches in turn: the loss then falls within a dozen steps, so a wrong gradient shows in the last loss. Fresh
# random tokens at every step would keep the loss at log(vocabulary) whatever the optimizer does.
NUM_BATCHES = 4


def build_model(job: Job) -> nn.Module:
    """The row's model, made on the job's device, in fp32 unless the row is bf16 only; the same weights everywhere."""
    torch.manual_seed(job.seed)
    config = _config(SHAPES[job.row.model])
    with torch.device(job.device):  # one thread of a host takes a minute for 3B random numbers
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    dtype = torch.bfloat16 if job.row.dtype == "bf16only" else torch.float32
    model = model.to(job.device, dtype).train()
    if job.compile:
        for block in blocks(model):
            block.compile()
    return model


def _config(shape: Shape) -> PretrainedConfig:
    if shape.family == "Llama":
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            tie_word_embeddings=True,
            use_cache=False,
        )
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks in definition order."""
    return [module for module in model.modules() if isinstance(module, GPT2Block | LlamaDecoderLayer)]


def build_batches(job: Job, rank: int) -> list[Tensor]:
    """The rank's token batches, each of shape (sequences, tokens); step i takes batch i modulo their number."""
    generator = torch.Generator().manual_seed(job.seed + 1 + rank)
    size = (job.row.sequences, job.row.tokens)
    return [torch.randint(VOCABULARY, size, generator=generator).to(job.device) for _ in range(NUM_BATCHES)]
