"""Small models of many Transformers families, made from configurations, with batches to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]

VOCABULARY, LENGTH, BATCH = 61, 10, 2

# Odd where a family allows it, so that nothing divides by the number of ranks.
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Grouped matrix products want rows of a multiple of 16 bytes.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=6, tie_word_embeddings=True))


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**DECODER, head_dim=6, sliding_window=4))


def qwen2_moe() -> Any:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **DECODER, **EXPERTS, shared_expert_intermediate_size=13, decoder_sparse_step=1, output_router_logits=True
        )
    )


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **DECODER | {"intermediate_size": 36}, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True
        )
    )


def mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=20, state_size=5, num_hidden_layers=2, conv_kernel=3, pad_token_id=0
        )
    )


def bert() -> Any:
    config = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**config))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            d_model=24,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            num_mel_bins=7,
            max_source_positions=LENGTH,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            begin_suppress_tokens=None,
        )
    )


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=5))


def clip() -> Any:
    text = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=13))


def _tokens(generator: torch.Generator) -> torch.Tensor:
    # 3 and up: the special tokens must not end a sequence anywhere.
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def unmasked_text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def speech(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(BATCH, 7, 2 * LENGTH, generator=generator),
        "labels": _tokens(generator),
    }


def images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator),
        "labels": torch.randint(5, (BATCH,), generator=generator),
    }


def pairs(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    tokens[:, -1] = 2  # the text's embedding is taken at its end token
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator),
        "return_loss": torch.tensor(True),
    }


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], Batch]]] = {
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "qwen3": (qwen3, text),
    "gemma2": (gemma2, text),
    "qwen2_moe": (qwen2_moe, text),
    "mixtral": (mixtral, text),
    "mamba": (mamba, unmasked_text),
    "bert": (bert, text),
    "t5": (t5, text),
    "whisper": (whisper, speech),
    "vit": (vit, images),
    "clip": (clip, pairs),
}


def build_family(name: str) -> nn.Module:
    """The same weights on every call and rank, in training mode."""
    torch.manual_seed(11)
    model: nn.Module = FAMILIES[name][0]()
    return model.train()


def family_batch(name: str, step: int, rank: int) -> Batch:
    """A batch of its own for each step and rank."""
    return FAMILIES[name][1](torch.Generator().manual_seed(100 * step + rank))
