"""Mixtures of experts that are not Llamas with another feed-forward part: one function per way of building a layer.

Latent attention (DeepSeek-V3, Kimi-K2), shared experts beside the routed (these, GLM-4.5, Llama 4), experts with biases
(gpt-oss), linear attention in most layers (Qwen3-Next). Parameters are exact. Their saved tensors depend on the way
experts run; if Transformers' own classes do it in their own way, the plan has an estimate (`ESTIMATED`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fullshard.plan.shapes import Block, ModelShape, ParameterShape, UnitShape
from fullshard.plan.weights import (
    Fields,
    Weights,
    attention_weights,
    attention_window,
    decoder_of,
    expert_weights,
    gated_weights,
    head_norm_weights,
    linear_weights,
    norm_weights,
)

Layer = Callable[[Fields, str, int], tuple[Weights, Block]]
"""Of a file, a layer's name and its number: what it holds besides its two norms, which come last, and what it computes.
"""


def _of_layers(layer: Layer) -> Callable[[Fields], ModelShape]:
    """Build a decoder of such layers, each with a norm before attention and one before the feed-forward part."""

    def model(fields: Fields) -> ModelShape:
        units = []
        for index in range(fields.number("num_hidden_layers")):
            prefix = f"model.layers.{index}"
            weights, block = layer(fields, prefix, index)
            for name in ("input", "post_attention"):
                weights += norm_weights(f"{prefix}.{name}_layernorm", block.hidden)
            units.append(UnitShape(prefix, tuple(weights), block))
        return decoder_of(fields, units)

    return model


def _deepseek(fields: Fields, prefix: str, index: int) -> tuple[Weights, Block]:
    """Build DeepSeek-V3: queries, keys and values pass through narrow latents; the first layers are dense."""
    heads = fields.number("num_attention_heads")
    weights = _latent_attention(fields, f"{prefix}.self_attn") + _shared_and_routed(fields, prefix, index)
    latents = fields.number("kv_lora_rank") + (fields.values.get("q_lora_rank") or 0)
    block = _block(fields, index, heads, heads, _query_dim(fields))
    return weights, dataclasses.replace(block, value_dim=fields.number("v_head_dim"), latents=latents)


def _query_dim(fields: Fields) -> int:
    return fields.number("qk_nope_head_dim") + fields.number("qk_rope_head_dim")


def _latent_attention(fields: Fields, prefix: str) -> Weights:
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    rank, values = fields.number("kv_lora_rank"), fields.number("v_head_dim")
    bias, weights = fields.flag("attention_bias", False), []
    if fields.is_set("q_lora_rank"):
        narrow = fields.number("q_lora_rank")
        weights += linear_weights(f"{prefix}.q_a_proj", hidden, narrow, bias=bias)
        weights += norm_weights(f"{prefix}.q_a_layernorm", narrow)
        weights += linear_weights(f"{prefix}.q_b_proj", narrow, heads * _query_dim(fields))
    else:
        weights += linear_weights(f"{prefix}.q_proj", hidden, heads * _query_dim(fields))
    both = rank + fields.number("qk_rope_head_dim")
    weights += linear_weights(f"{prefix}.kv_a_proj_with_mqa", hidden, both, bias=bias)
    weights += norm_weights(f"{prefix}.kv_a_layernorm", rank)
    weights += linear_weights(f"{prefix}.kv_b_proj", rank, heads * (fields.number("qk_nope_head_dim") + values))
    return weights + linear_weights(f"{prefix}.o_proj", heads * values, hidden, bias=bias)


def _glm(fields: Fields, prefix: str, index: int) -> tuple[Weights, Block]:
    """Build GLM-4.5: grouped queries, otherwise as DeepSeek-V3."""
    heads, kv_heads, head_dim = fields.heads()
    at, hidden = f"{prefix}.self_attn", fields.number("hidden_size")
    bias, is_normed = fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    weights = attention_weights(at, hidden, heads * head_dim, kv_heads * head_dim, bias=bias, output_bias=False)
    weights += head_norm_weights(at, head_dim, head_dim) if is_normed else []
    weights += _shared_and_routed(fields, prefix, index)
    block = _block(fields, index, heads, kv_heads, head_dim)
    return weights, dataclasses.replace(block, head_norms=is_normed)


def _gpt_oss(fields: Fields, prefix: str, index: int) -> tuple[Weights, Block]:
    """Build gpt-oss: experts with biases, a sink per head, a window in every second layer."""
    heads, kv_heads, head_dim = fields.heads()
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    experts = fields.number("num_local_experts", "num_experts")
    at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    bias = fields.flag("attention_bias", True)
    weights = [
        ParameterShape(f"{at}.sinks", (heads,)),
        *attention_weights(at, hidden, heads * head_dim, kv_heads * head_dim, bias=bias),
        ParameterShape(f"{mlp}.router.weight", (experts, hidden)),
        ParameterShape(f"{mlp}.router.bias", (experts,)),
        ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, hidden, 2 * width)),
        ParameterShape(f"{mlp}.experts.gate_up_proj_bias", (experts, 2 * width)),
        ParameterShape(f"{mlp}.experts.down_proj", (experts, width, hidden)),
        ParameterShape(f"{mlp}.experts.down_proj_bias", (experts, hidden)),
    ]
    block = _routed(fields, heads, kv_heads, head_dim, width, experts)
    return weights, dataclasses.replace(block, window=attention_window(fields, index, period=2))


def _llama4(fields: Fields, prefix: str, index: int) -> tuple[Weights, Block]:
    """Build Llama 4: a shared expert of the same width, and dense layers between if the file says so."""
    heads, kv_heads, head_dim = fields.heads()
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    experts = fields.number("num_local_experts")
    step, sparse = fields.number("interleave_moe_layer_step", default=1), fields.items("moe_layers")
    mlp, bias = f"{prefix}.feed_forward", fields.flag("attention_bias", False)
    weights = attention_weights(f"{prefix}.self_attn", hidden, heads * head_dim, kv_heads * head_dim, bias=bias)
    if not (index in sparse if fields.is_set("moe_layers") else (index + 1) % step == 0):
        dense = fields.number("intermediate_size_mlp")
        return weights + gated_weights(mlp, hidden, dense), Block(hidden, heads, kv_heads, head_dim, dense)
    weights += [
        ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, hidden, 2 * width)),
        ParameterShape(f"{mlp}.experts.down_proj", (experts, width, hidden)),
        *linear_weights(f"{mlp}.router", hidden, experts),
        *gated_weights(f"{mlp}.shared_expert", hidden, width),
    ]
    return weights, _routed(fields, heads, kv_heads, head_dim, width, experts, shared=width, default=1)


def _qwen3_next(fields: Fields, prefix: str, index: int) -> tuple[Weights, Block]:
    """Build Qwen3-Next: three of four layers have a gated delta rule, the fourth has gated attention."""
    heads, kv_heads, head_dim = fields.heads()
    hidden, width = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    experts, shared = fields.number("num_experts"), fields.number("shared_expert_intermediate_size")
    kinds, period = fields.items("layer_types"), fields.number("full_attention_interval", default=4)
    at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    is_linear = kinds[index] == "linear_attention" if index < len(kinds) else (index + 1) % period != 0
    if is_linear:
        weights = _delta_rule(fields, f"{prefix}.linear_attn")
        heads, kv_heads = fields.number("linear_num_value_heads"), fields.number("linear_num_key_heads")
        head_dim = fields.number("linear_value_head_dim")
    else:
        queries, keys, bias = heads * head_dim, kv_heads * head_dim, fields.flag("attention_bias", False)
        weights = attention_weights(at, hidden, queries, keys, bias=bias, gated=True)
        weights += head_norm_weights(at, head_dim, head_dim)
    weights += [
        ParameterShape(f"{mlp}.gate.weight", (experts, hidden)),
        *expert_weights(mlp, experts, hidden, width),
        *gated_weights(f"{mlp}.shared_expert", hidden, shared),
        *linear_weights(f"{mlp}.shared_expert_gate", hidden, 1),
    ]
    block = _routed(fields, heads, kv_heads, head_dim, width, experts, shared=shared)
    window = _DELTA_CHUNK if is_linear else 0
    return weights, dataclasses.replace(block, norm="rms-float32-weight", head_norms=True, window=window)


_DELTA_CHUNK = 64
"""Tokens of a chunk, inside which the delta rule compares all with all (Transformers' and the kernel's)."""


def _delta_rule(fields: Fields, prefix: str) -> Weights:
    hidden, value_heads = fields.number("hidden_size"), fields.number("linear_num_value_heads")
    keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
    head = fields.number("linear_value_head_dim")
    values = value_heads * head
    return [
        ParameterShape(f"{prefix}.dt_bias", (value_heads,)),
        ParameterShape(f"{prefix}.A_log", (value_heads,)),
        ParameterShape(f"{prefix}.conv1d.weight", (2 * keys + values, 1, fields.number("linear_conv_kernel_dim"))),
        *linear_weights(f"{prefix}.in_proj_qkvz", hidden, 2 * keys + 2 * values),
        *linear_weights(f"{prefix}.in_proj_ba", hidden, 2 * value_heads),
        *norm_weights(f"{prefix}.norm", head),
        *linear_weights(f"{prefix}.out_proj", values, hidden),
    ]


# -- what DeepSeek-V3 and GLM-4.5 have in common -------------------------------------------------------------------


def _is_dense(fields: Fields, index: int) -> bool:
    first = fields.values.get("first_k_dense_replace")
    return index < (first if isinstance(first, int) else 0)


def _shared_and_routed(fields: Fields, prefix: str, index: int) -> Weights:
    hidden, mlp = fields.number("hidden_size"), f"{prefix}.mlp"
    if _is_dense(fields, index):
        return gated_weights(mlp, hidden, fields.number("intermediate_size"))
    experts, width = fields.number("n_routed_experts"), fields.number("moe_intermediate_size")
    return [
        *expert_weights(mlp, experts, hidden, width),
        ParameterShape(f"{mlp}.gate.weight", (experts, hidden)),
        *gated_weights(f"{mlp}.shared_experts", hidden, width * fields.number("n_shared_experts", default=1)),
    ]


def _block(fields: Fields, index: int, heads: int, kv_heads: int, head_dim: int) -> Block:
    if _is_dense(fields, index):
        return Block(fields.number("hidden_size"), heads, kv_heads, head_dim, fields.number("intermediate_size"))
    width, experts = fields.number("moe_intermediate_size"), fields.number("n_routed_experts")
    shared = width * fields.number("n_shared_experts", default=1)
    return _routed(fields, heads, kv_heads, head_dim, width, experts, shared=shared)


def _routed(
    fields: Fields,
    heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    experts: int,
    *,
    shared: int = 0,
    default: int | None = None,
) -> Block:
    """Build a block whose tokens go to some experts, `default` if the file does not say, and to one that all share."""
    block = Block(fields.number("hidden_size"), heads, kv_heads, head_dim, width, fused_gate=True, experts=experts)
    each = fields.number("num_experts_per_tok", "experts_per_token", default=default)
    return dataclasses.replace(block, experts_per_token=each, shared_intermediate=shared)


MIXTURES = {
    "deepseek_v3": _of_layers(_deepseek),
    "glm4_moe": _of_layers(_glm),
    "gpt_oss": _of_layers(_gpt_oss),
    "llama4_text": _of_layers(_llama4),
    "qwen3_next": _of_layers(_qwen3_next),
}
"""By `model_type`."""

ESTIMATED = {
    "gpt_oss": "what its experts keep for backward is an estimate, about a sixth too low for Transformers' own classes",
    "llama4_text": "Transformers' own classes pass every token through every expert; planned for active ones",
    "qwen3_next": "planned for the kernels of flash-linear-attention; Transformers' own fall-back keeps twice as much",
}
"""Families whose activations and speed are an estimate, and why."""
