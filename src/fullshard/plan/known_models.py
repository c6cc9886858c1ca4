"""Well-known models by name, with the fields of each published `config.json` that determine its shapes.

The comment above each group of rows gives the organisation and the release date. `test_plan_models.py` checks the
fields against the published number of parameters, `tests/fixtures/published_shapes.csv` and the defaults of
Transformers' classes. For a model that also accepts images, only the text part is listed.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 32000, **more: Any) -> Values:
    """Return the `config.json` fields of a decoder like Llama. Fields in `more` are added or replace others."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> Values:
    return llama(hidden, inner, layers, heads, kv_heads, vocab, model_type="qwen2", tie_word_embeddings=tied)


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Values:
    more = {"model_type": "qwen3", "tie_word_embeddings": tied, "head_dim": 128}
    return llama(hidden, inner, layers, heads, 8, 151936, **more)


def _qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, experts: int) -> Values:
    more = {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": 8, "head_dim": 128}
    return llama(hidden, 8 * inner, layers, heads, kv_heads, 151936, model_type="qwen3_moe", **more)


def _gemma(kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Values:
    more = {"head_dim": 256, "tie_word_embeddings": True, **more}
    return llama(hidden, inner, layers, heads, kv_heads, more.pop("vocab_size", 256000), model_type=kind, **more)


def _gemma3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, window: int = 1024, **more: Any) -> Values:
    values = {"vocab_size": 262208, "sliding_window": window, "sliding_window_pattern": 6, **more}
    return _gemma("gemma3_text", hidden, inner, layers, heads, kv_heads, **values)


def _with_pictures(kind: str, text: Values) -> Values:
    return {"model_type": kind, "text_config": text}


def _gpt2(hidden: int, layers: int, heads: int) -> Values:
    values = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", **values}


def _deepseek(layers: int, heads: int, experts: int, dense: int, vocab: int, kind: str = "deepseek_v3") -> Values:
    return {
        **llama(7168, 18432, layers, heads, heads, vocab, model_type=kind),
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    }


def _glm(hidden: int, inner: int, layers: int, experts: int, expert: int, dense: int, *, normed: bool) -> Values:
    return {
        **llama(hidden, inner, layers, 96, 8, 151552, model_type="glm4_moe", head_dim=128, attention_bias=True),
        "moe_intermediate_size": expert,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense,
        "use_qk_norm": normed,
    }


def _gpt_oss(layers: int, experts: int) -> Values:
    more = {"model_type": "gpt_oss", "head_dim": 64, "attention_bias": True, "sliding_window": 128}
    more |= {"num_local_experts": experts, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
    return llama(2880, 2880, layers, 64, 8, 201088, **more)


def _llama4(experts: int, step: int) -> Values:
    more = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": experts, "num_experts_per_tok": 1}
    text = llama(5120, 8192, 48, 40, 8, 202048, model_type="llama4_text", interleave_moe_layer_step=step, **more)
    return _with_pictures("llama4", text)


_QWEN3_NEXT = {
    **llama(2048, 5120, 48, 16, 2, 151936, model_type="qwen3_next", head_dim=256),
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_EXPERTS_OF_8 = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_MISTRAL = {"model_type": "mistral"}
_LLAMA3 = 128256
_PHI = {"model_type": "phi3"}

MODELS: dict[str, Values] = {
    # meta-llama: 2023-07, 2024-04 (3), 2024-07 (3.1), 2024-09 (3.2), 2024-12 (3.3), 2025-04 (4)
    "Llama-2-7B": llama(4096, 11008, 32, 32, 32),
    "Llama-2-13B": llama(5120, 13824, 40, 40, 40),
    "Llama-2-70B": llama(8192, 28672, 80, 64, 8),
    "CodeLlama-34B": llama(8192, 22016, 48, 64, 8),
    "Llama-3-8B": llama(4096, 14336, 32, 32, 8, _LLAMA3),
    "Llama-3-70B": llama(8192, 28672, 80, 64, 8, _LLAMA3),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8, _LLAMA3),
    "Llama-3.1-70B": llama(8192, 28672, 80, 64, 8, _LLAMA3),
    "Llama-3.1-405B": llama(16384, 53248, 126, 128, 8, _LLAMA3),
    "Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, _LLAMA3, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": llama(3072, 8192, 28, 24, 8, _LLAMA3, head_dim=128, tie_word_embeddings=True),
    "Llama-3.3-70B": llama(8192, 28672, 80, 64, 8, _LLAMA3),
    "Llama-4-Scout-17B-16E": _llama4(16, 1),
    "Llama-4-Maverick-17B-128E": _llama4(128, 2),
    # mistralai: 2023-09 to 2025-03
    "Mistral-7B": {**llama(4096, 14336, 32, 32, 8), **_MISTRAL, "sliding_window": 4096},
    "Mistral-7B-v0.2": {**llama(4096, 14336, 32, 32, 8), **_MISTRAL},
    "Mistral-7B-v0.3": {**llama(4096, 14336, 32, 32, 8, 32768), **_MISTRAL},
    "Mistral-Nemo-12B": {**llama(5120, 14336, 40, 32, 8, 131072), **_MISTRAL, "head_dim": 128},
    "Mistral-Small-24B": {**llama(5120, 32768, 40, 32, 8, 131072), **_MISTRAL, "head_dim": 128},
    "Mistral-Large-123B": {**llama(12288, 28672, 88, 96, 8, 32768), **_MISTRAL, "head_dim": 128},
    "Ministral-8B": {**llama(4096, 12288, 36, 32, 8, 131072), **_MISTRAL, "head_dim": 128},
    "Mixtral-8x7B": {**llama(4096, 14336, 32, 32, 8), **_EXPERTS_OF_8},
    "Mixtral-8x22B": {**llama(6144, 16384, 56, 48, 8, 32768), **_EXPERTS_OF_8},
    # Qwen: 2024-09 (2.5), 2025-04 (3), 2025-07 (Coder), 2025-09 (Next)
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False),
    "Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8, 152064, tied=False),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 4, 768, 128),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 4, 1536, 128),
    "Qwen3-Coder-480B-A35B": _qwen3_moe(6144, 62, 96, 8, 2560, 160),
    "Qwen3-Next-80B-A3B": _QWEN3_NEXT,
    # google: 2024-02, 2024-06 (2), 2025-03 (3), 2025-08 (270m)
    "Gemma-2B": _gemma("gemma", 2048, 16384, 18, 8, 1),
    "Gemma-7B": _gemma("gemma", 3072, 24576, 28, 16, 16),
    "Gemma-2-2B": _gemma("gemma2", 2304, 9216, 26, 8, 4, sliding_window=4096),
    "Gemma-2-9B": _gemma("gemma2", 3584, 14336, 42, 16, 8, sliding_window=4096),
    "Gemma-2-27B": _gemma("gemma2", 4608, 36864, 46, 32, 16, head_dim=128, sliding_window=4096),
    "Gemma-3-270M": _gemma3(640, 2048, 18, 4, 1, 512, vocab_size=262144),
    "Gemma-3-1B": _gemma3(1152, 6912, 26, 4, 1, 512, vocab_size=262144),
    "Gemma-3-4B": _with_pictures("gemma3", _gemma3(2560, 10240, 34, 8, 4)),
    "Gemma-3-12B": _with_pictures("gemma3", _gemma3(3840, 15360, 48, 16, 8)),
    "Gemma-3-27B": _with_pictures("gemma3", _gemma3(5376, 21504, 62, 32, 16, head_dim=128)),
    # deepseek-ai 2024-12, moonshotai 2025-07, zai-org 2025-07, openai 2025-08
    "DeepSeek-V3": _deepseek(61, 128, 256, 3, 129280),
    "Kimi-K2": _deepseek(61, 64, 384, 1, 163840, "kimi_k2"),
    "GLM-4.5": _glm(5120, 12288, 92, 160, 1536, 3, normed=True),
    "GLM-4.5-Air": _glm(4096, 10944, 46, 128, 1408, 1, normed=False),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # microsoft: 2024-04 (3), 2024-12 (4), 2025-02 (4-mini)
    "Phi-3-mini": llama(3072, 8192, 32, 32, 32, 32064, sliding_window=2047, **_PHI),
    "Phi-3-mini-128k": llama(3072, 8192, 32, 32, 32, 32064, **_PHI),
    "Phi-3-medium": llama(5120, 17920, 40, 40, 10, 32064, sliding_window=2047, **_PHI),
    "Phi-3-medium-128k": llama(5120, 17920, 40, 40, 10, 32064, **_PHI),
    "Phi-4": llama(5120, 17920, 40, 40, 10, 100352, **_PHI),
    "Phi-4-mini": llama(3072, 8192, 32, 24, 8, 200064, tie_word_embeddings=True, **_PHI),
    # allenai: 2024-11 to 2025-04 (2), 2025-11 (3)
    "OLMo-2-1B": llama(2048, 8192, 16, 16, 16, 100352, model_type="olmo2"),
    "OLMo-2-7B": llama(4096, 11008, 32, 32, 32, 100352, model_type="olmo2"),
    "OLMo-2-13B": llama(5120, 13824, 40, 40, 40, 100352, model_type="olmo2"),
    "OLMo-2-32B": llama(5120, 27648, 64, 40, 8, 100352, model_type="olmo2"),
    "OLMo-3-7B": llama(4096, 11008, 32, 32, 32, 100278, sliding_window=4096, model_type="olmo3"),
    "OLMo-3-32B": llama(5120, 27648, 64, 40, 8, 100278, sliding_window=4096, model_type="olmo3"),
    # HuggingFaceTB: 2024-11 (2), 2025-07 (3); TinyLlama 2023-12; 01-ai 2023-11
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "SmolLM2-360M": llama(960, 2560, 32, 15, 5, 49152, tie_word_embeddings=True),
    "SmolLM2-1.7B": llama(2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True),
    "SmolLM3-3B": llama(2048, 11008, 36, 16, 4, _LLAMA3, model_type="smollm3", tie_word_embeddings=True),
    "TinyLlama-1.1B": llama(2048, 5632, 22, 32, 4),
    "Yi-34B": llama(7168, 20480, 60, 56, 8, 64000),
    # openai-community 2019
    "DistilGPT2": _gpt2(768, 6, 12),
    "GPT-2": _gpt2(768, 12, 12),
    "GPT-2-medium": _gpt2(1024, 24, 16),
    "GPT-2-large": _gpt2(1280, 36, 20),
    "GPT-2-XL": _gpt2(1600, 48, 25),
    # google 2020 and 2019, openai 2023
    "ViT-large": {
        **{"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
        "intermediate_size": 4096,
    },
    "T5-large": {
        **{"model_type": "t5", "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
        "vocab_size": 32128,
    },
    "Whisper-large-v3": {
        **{"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "vocab_size": 51866},
        **{"encoder_attention_heads": 20, "decoder_attention_heads": 20, "num_mel_bins": 128},
        **{"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
    },
}
"""The fields of each model by its name."""

ALIASES = {
    alias: name
    for name, aliases in {
        "DeepSeek-V3": "DeepSeek-R1 DeepSeek-V3.1",
        "Qwen2.5-1.5B": "DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen2.5-14B": "DeepSeek-R1-Distill-Qwen-14B",
        "Qwen2.5-32B": "DeepSeek-R1-Distill-Qwen-32B",
        "Qwen2.5-7B": "DeepSeek-R1-Distill-Qwen-7B",
        "Llama-3.1-8B": "DeepSeek-R1-Distill-Llama-8B",
        "Llama-3.3-70B": "DeepSeek-R1-Distill-Llama-70B",
        "GLM-4.5": "GLM-4.6",
        "Llama-4-Scout-17B-16E": "Llama-4-Scout",
        "Llama-4-Maverick-17B-128E": "Llama-4-Maverick",
        "Mistral-Large-123B": "Mistral-Large",
        "Mistral-Nemo-12B": "Mistral-Nemo",
        "Mistral-Small-24B": "Mistral-Small Mistral-Small-3 Mistral-Small-3.1 Mistral-Small-3.1-24B "
        "Mistral-Small-3.2-24B",
        "OLMo-3-32B": "OLMo-3.1-32B",
        "Phi-3-mini": "Phi-3-mini-4k",
        "Phi-3-mini-128k": "Phi-3.5-mini",
        "Phi-3-medium": "Phi-3-medium-4k",
        "Phi-4": "Phi-4-reasoning",
        "Qwen3-30B-A3B": "Qwen3-Coder-30B-A3B",
        "SmolLM3-3B": "SmolLM3",
        "ViT-large": "ViT-large-patch16-224",
    }.items()
    for alias in aliases.split()
}
"""Other names for the same shapes: fine-tuned versions, and names without the size."""
