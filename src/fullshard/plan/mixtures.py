"""Mixtures of experts that are not Llamas with another feed-forward part: one function per way of building them.

Latent attention (DeepSeek-V3, Kimi-K2), shared experts beside the routed (these, GLM-4.5, Llama 4), experts with biases
(gpt-oss), linear attention in most layers (Qwen3-Next). Parameters are exact. What their layers keep for backward
depends on how experts are run; where Transformers' own classes have a way of their own it is an estimate (`ESTIMATED`).
"""

from __future__ import annotations

import dataclasses

from fullshard.plan.shapes import Block, ModelShape, ParameterShape, UnitShape
from fullshard.plan.weights import (
    Fields,
    Weights,
    attention_window,
    embedding_weights,
    gated_weights,
    head_weights,
    linear_weights,
    norm_weights,
)


def deepseek(fields: Fields) -> ModelShape:
    """DeepSeek-V3: queries, keys and values pass through narrow latents; the first layers are dense."""
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        weights = [*_latent_attention(fields, f"{prefix}.self_attn"), *_shared_and_routed(fields, prefix, index)]
        weights += _two_norms(prefix, hidden)
        block = dataclasses.replace(
            _block(fields, index, heads, heads, _query_dim(fields)),
            value_dim=fields.number("v_head_dim"),
            latents=fields.number("kv_lora_rank") + (fields.values.get("q_lora_rank") or 0),
        )
        units.append(UnitShape(prefix, tuple(weights), block))
    return _model(fields, units)


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


def glm(fields: Fields) -> ModelShape:
    """GLM-4.5: grouped queries, otherwise as DeepSeek-V3."""
    heads, kv_heads, head_dim = _heads(fields)
    hidden, bias = fields.number("hidden_size"), fields.flag("attention_bias", False)
    is_normed = fields.flag("use_qk_norm", False)
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        weights = _projections(f"{prefix}.self_attn", hidden, heads, kv_heads, head_dim, bias=bias)
        weights += linear_weights(f"{prefix}.self_attn.o_proj", heads * head_dim, hidden)
        weights += _head_norms(f"{prefix}.self_attn", head_dim) if is_normed else []
        weights += _shared_and_routed(fields, prefix, index) + _two_norms(prefix, hidden)
        block = _block(fields, index, heads, kv_heads, head_dim, head_norms=is_normed)
        units.append(UnitShape(prefix, tuple(weights), block))
    return _model(fields, units)


def gpt_oss(fields: Fields) -> ModelShape:
    """gpt-oss: experts with biases, a sink per head, a window in every second layer."""
    heads, kv_heads, head_dim = _heads(fields)
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    experts = fields.number("num_local_experts", "num_experts")
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        bias = fields.flag("attention_bias", True)
        weights = [
            ParameterShape(f"{at}.sinks", (heads,)),
            *_projections(at, hidden, heads, kv_heads, head_dim, bias=bias),
            *linear_weights(f"{at}.o_proj", heads * head_dim, hidden, bias=bias),
            ParameterShape(f"{mlp}.router.weight", (experts, hidden)),
            ParameterShape(f"{mlp}.router.bias", (experts,)),
            ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, hidden, 2 * width)),
            ParameterShape(f"{mlp}.experts.gate_up_proj_bias", (experts, 2 * width)),
            ParameterShape(f"{mlp}.experts.down_proj", (experts, width, hidden)),
            ParameterShape(f"{mlp}.experts.down_proj_bias", (experts, hidden)),
            *_two_norms(prefix, hidden),
        ]
        block = Block(
            hidden,
            heads,
            kv_heads,
            head_dim,
            width,
            fused_gate=True,
            experts=experts,
            experts_per_token=fields.number("num_experts_per_tok", "experts_per_token"),
            window=attention_window(fields, index, period=2),
        )
        units.append(UnitShape(prefix, tuple(weights), block))
    return _model(fields, units)


def llama4(fields: Fields) -> ModelShape:
    """Llama 4: a shared expert of the same width, dense layers between if the file says so."""
    heads, kv_heads, head_dim = _heads(fields)
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    layers, experts = fields.number("num_hidden_layers"), fields.number("num_local_experts")
    step, sparse = fields.number("interleave_moe_layer_step", default=1), fields.items("moe_layers")
    bias = fields.flag("attention_bias", False)
    units = []
    for index in range(layers):
        prefix = f"model.layers.{index}"
        at, mlp = f"{prefix}.self_attn", f"{prefix}.feed_forward"
        weights = _projections(at, hidden, heads, kv_heads, head_dim, bias=bias)
        weights += linear_weights(f"{at}.o_proj", heads * head_dim, hidden, bias=bias)
        if index in sparse if fields.is_set("moe_layers") else (index + 1) % step == 0:
            weights += [
                ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, hidden, 2 * width)),
                ParameterShape(f"{mlp}.experts.down_proj", (experts, width, hidden)),
                *linear_weights(f"{mlp}.router", hidden, experts),
                *gated_weights(f"{mlp}.shared_expert", hidden, width),
            ]
            block = Block(
                hidden,
                heads,
                kv_heads,
                head_dim,
                width,
                fused_gate=True,
                experts=experts,
                experts_per_token=fields.number("num_experts_per_tok", default=1),
                shared_intermediate=width,
            )
        else:
            dense = fields.number("intermediate_size_mlp")
            weights += gated_weights(mlp, hidden, dense)
            block = Block(hidden, heads, kv_heads, head_dim, dense)
        weights += _two_norms(prefix, hidden)
        units.append(UnitShape(prefix, tuple(weights), block))
    return _model(fields, units)


def qwen3_next(fields: Fields) -> ModelShape:
    """Qwen3-Next: three of four layers have a gated delta rule in the place of attention, the fourth a gated one."""
    heads, kv_heads, head_dim = _heads(fields)
    hidden, width = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    experts, shared = fields.number("num_experts"), fields.number("shared_expert_intermediate_size")
    kinds, bias = fields.items("layer_types"), fields.flag("attention_bias", False)
    period = fields.number("full_attention_interval", default=4)
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        is_linear = kinds[index] == "linear_attention" if index < len(kinds) else (index + 1) % period != 0
        if is_linear:
            weights = _delta_rule(fields, f"{prefix}.linear_attn")
        else:
            weights = linear_weights(f"{at}.q_proj", hidden, 2 * heads * head_dim, bias=bias)
            weights += _projections(at, hidden, heads, kv_heads, head_dim, bias=bias)[2 if bias else 1 :]
            weights += linear_weights(f"{at}.o_proj", heads * head_dim, hidden, bias=bias) + _head_norms(at, head_dim)
        weights += [
            ParameterShape(f"{mlp}.gate.weight", (experts, hidden)),
            ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, 2 * width, hidden)),
            ParameterShape(f"{mlp}.experts.down_proj", (experts, hidden, width)),
            *gated_weights(f"{mlp}.shared_expert", hidden, shared),
            *linear_weights(f"{mlp}.shared_expert_gate", hidden, 1),
            *_two_norms(prefix, hidden),
        ]
        value_heads, value_dim = fields.number("linear_num_value_heads"), fields.number("linear_value_head_dim")
        block = Block(
            hidden,
            value_heads if is_linear else heads,
            fields.number("linear_num_key_heads") if is_linear else kv_heads,
            value_dim if is_linear else head_dim,
            width,
            fused_gate=True,
            norm="rms-float32-weight",
            head_norms=True,
            experts=experts,
            experts_per_token=fields.number("num_experts_per_tok"),
            shared_intermediate=shared,
            window=_DELTA_CHUNK if is_linear else 0,
        )
        units.append(UnitShape(prefix, tuple(weights), block))
    return _model(fields, units)


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


# -- what they have in common --------------------------------------------------------------------------------------


def _heads(fields: Fields) -> tuple[int, int, int]:
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("num_key_value_heads", default=heads)
    return heads, kv_heads, fields.number("head_dim", default=fields.number("hidden_size") // heads)


def _projections(prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Weights:
    return [
        *linear_weights(f"{prefix}.q_proj", hidden, heads * head_dim, bias=bias),
        *linear_weights(f"{prefix}.k_proj", hidden, kv_heads * head_dim, bias=bias),
        *linear_weights(f"{prefix}.v_proj", hidden, kv_heads * head_dim, bias=bias),
    ]


def _head_norms(prefix: str, head_dim: int) -> Weights:
    return norm_weights(f"{prefix}.q_norm", head_dim) + norm_weights(f"{prefix}.k_norm", head_dim)


def _two_norms(prefix: str, hidden: int) -> Weights:
    return [w for n in ("input", "post_attention") for w in norm_weights(f"{prefix}.{n}_layernorm", hidden)]


def _is_dense(fields: Fields, index: int) -> bool:
    first = fields.values.get("first_k_dense_replace")
    return index < (first if isinstance(first, int) else 0)


def _shared_and_routed(fields: Fields, prefix: str, index: int) -> Weights:
    hidden, mlp = fields.number("hidden_size"), f"{prefix}.mlp"
    if _is_dense(fields, index):
        return gated_weights(mlp, hidden, fields.number("intermediate_size"))
    experts, width = fields.number("n_routed_experts"), fields.number("moe_intermediate_size")
    return [
        ParameterShape(f"{mlp}.experts.gate_up_proj", (experts, 2 * width, hidden)),
        ParameterShape(f"{mlp}.experts.down_proj", (experts, hidden, width)),
        ParameterShape(f"{mlp}.gate.weight", (experts, hidden)),
        *gated_weights(f"{mlp}.shared_experts", hidden, width * fields.number("n_shared_experts", default=1)),
    ]


def _block(
    fields: Fields,
    index: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    head_norms: bool = False,
) -> Block:
    hidden = fields.number("hidden_size")
    if _is_dense(fields, index):
        width = fields.number("intermediate_size")
        return Block(hidden, heads, kv_heads, head_dim, width, head_norms=head_norms)
    width = fields.number("moe_intermediate_size")
    return Block(
        hidden,
        heads,
        kv_heads,
        head_dim,
        width,
        fused_gate=True,
        head_norms=head_norms,
        experts=fields.number("n_routed_experts"),
        experts_per_token=fields.number("num_experts_per_tok"),
        shared_intermediate=width * fields.number("n_shared_experts", default=1),
    )


def _model(fields: Fields, units: list[UnitShape]) -> ModelShape:
    vocab, hidden = fields.number("vocab_size"), fields.number("hidden_size")
    tied = fields.flag("tie_word_embeddings", False)
    head = [] if tied else head_weights("lm_head", hidden, vocab)
    root = [*embedding_weights("model.embed_tokens", vocab, hidden), *norm_weights("model.norm", hidden), *head]
    return ModelShape("", (*units, UnitShape("", tuple(root))), vocab, hidden, tied)


MIXTURES = {
    "deepseek_v3": deepseek,
    "glm4_moe": glm,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "qwen3_next": qwen3_next,
}
"""By `model_type`."""

ESTIMATED = {
    "gpt_oss": "what its experts keep for backward is an estimate, about a sixth too low for Transformers' own classes",
    "llama4_text": "Transformers' own classes pass every token through every expert; planned for active ones",
    "qwen3_next": "planned for the kernels of flash-linear-attention; Transformers' own fall-back keeps twice as much",
}
"""Families whose activations and speed are an estimate, and why."""
