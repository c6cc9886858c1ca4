"""From a Hugging Face `config.json` to shapes: one function per way of building a model, one row per `model_type`.

Counts are exact: names, shapes and order are those of Transformers' own modules, and the tests compare them on the meta
device. If a `model_type` is not in the table, Transformers builds it, if it knows it (`plan/counted`). Any other one is
planned as a plain Llama, with a note, if the file has all of Llama's fields; otherwise it is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.plan.activations import KEPT_BY_ACTIVATION
from fullshard.plan.counted import counted, is_known_to_transformers
from fullshard.plan.mixtures import ESTIMATED, MIXTURES
from fullshard.plan.shapes import Block, ModelShape, Norm, ParameterShape, UnitShape
from fullshard.plan.weights import (
    Fields,
    Weights,
    attention_weights,
    attention_window,
    decoder_of,
    embedding_weights,
    expert_weights,
    gated_weights,
    head_norm_weights,
    linear_weights,
    model_of,
    norm_weights,
)

MOST_LAYERS = 1000
"""Most layers. More count as a mistake, such as a number of parameters with three extra zeros. 1000 take seconds."""

_LLAMA_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Differences of a decoder of Llama's kind from Llama. Names of norms come in definition order.

    A window limits attention in all layers but every `window_period`th; 1: in all, 0: in none.
    """

    qkv_bias: bool = False
    bias_flag: str = ""
    head_norms: bool = False
    whole_head_norms: bool = False
    fused: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    experts: str = ""
    tied: bool = False
    norm: Norm = "rms"
    activation: str = "silu"
    caps_scores: bool = False
    window_period: int = 0


def _llama_like(fields: Fields, kind: _Decoder) -> ModelShape:
    hidden, (heads, kv_heads, head_dim) = fields.number("hidden_size"), fields.heads()
    bias = fields.flag(kind.bias_flag, False) if kind.bias_flag else False
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        attention = _attention(f"{prefix}.self_attn", kind, hidden, heads, kv_heads, head_dim, bias=bias)
        feed_forward, block = _feed_forward(fields, kind, f"{prefix}.mlp", index)
        norms = [p for norm in kind.norms for p in norm_weights(f"{prefix}.{norm}", hidden)]
        layer = dataclasses.replace(
            block,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            activation=fields.text("hidden_activation", "hidden_act", default=kind.activation),
            window=attention_window(fields, index, period=kind.window_period),
            norms=len(kind.norms),
            norm=kind.norm,
            head_norms=kind.head_norms or kind.whole_head_norms,
            sliced_values=kind.fused,
            capped_scores=kind.caps_scores and fields.values.get("attn_logit_softcapping", 50.0) is not None,
            dropout=kind.fused and fields.is_dropped("resid_pdrop"),
            attention_dropout=fields.is_dropped("attention_dropout"),
        )
        units.append(UnitShape(prefix, (*attention, *feed_forward, *norms), layer))
    capped = kind.caps_scores and fields.values.get("final_logit_softcapping", 30.0) is not None
    return decoder_of(fields, units, tied=kind.tied, capped_logits=capped)


def _attention(
    prefix: str, kind: _Decoder, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool
) -> Weights:
    queries, keys = heads * head_dim, kv_heads * head_dim
    if kind.fused:
        return [
            *linear_weights(f"{prefix}.o_proj", queries, hidden),
            *linear_weights(f"{prefix}.qkv_proj", hidden, queries + 2 * keys),
        ]
    weights = attention_weights(prefix, hidden, queries, keys, bias=bias or kind.qkv_bias, output_bias=bias)
    if kind.head_norms:
        weights += head_norm_weights(prefix, head_dim, head_dim)
    if kind.whole_head_norms:
        weights += head_norm_weights(prefix, queries, keys)
    return weights


def _feed_forward(fields: Fields, kind: _Decoder, prefix: str, index: int) -> tuple[Weights, Block]:
    """Return the weights, and a block without its attention, which the caller fills in."""
    hidden = fields.number("hidden_size")
    bias = fields.flag("mlp_bias", False)
    step = fields.number("decoder_sparse_step", default=1)
    if not kind.experts or index in fields.items("mlp_only_layers") or (index + 1) % step:
        width = fields.number("intermediate_size")
        if kind.fused:
            weights = linear_weights(f"{prefix}.gate_up_proj", hidden, 2 * width) + linear_weights(
                f"{prefix}.down_proj", width, hidden
            )
        else:
            weights = gated_weights(prefix, hidden, width, bias=bias)
        return weights, Block(hidden, 1, 1, 1, width, fused_gate=kind.fused)
    experts = fields.number("num_local_experts", "num_experts")
    width = fields.number("moe_intermediate_size", "intermediate_size")
    stacked = expert_weights(prefix, experts, hidden, width)
    # Not `matrix`: PEFT's "all-linear" reaches modules of class Linear, and the router is a bare parameter.
    router = [ParameterShape(f"{prefix}.gate.weight", (experts, hidden))]
    weights = [*stacked, *router] if kind.experts == "qwen3" else [*router, *stacked]
    shared = fields.number("shared_expert_intermediate_size") if kind.experts == "qwen2" else 0
    if shared:
        weights += gated_weights(f"{prefix}.shared_expert", hidden, shared)
        weights += linear_weights(f"{prefix}.shared_expert_gate", hidden, 1)
    block = Block(hidden, 1, 1, 1, width, fused_gate=True, experts=experts, shared_intermediate=shared)
    return weights, dataclasses.replace(block, experts_per_token=fields.number("num_experts_per_tok"))


def _gpt2(fields: Fields) -> ModelShape:
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    inner, vocab = fields.number("n_inner", default=4 * hidden), fields.number("vocab_size")
    positions = fields.number("n_positions", "n_ctx")
    block = dataclasses.replace(
        Block(hidden, heads, heads, hidden // heads, inner, gated=False, norm="layer", float32_scores=False),
        activation=fields.text("activation_function", default="gelu_new"),
        dropout=fields.is_dropped("resid_pdrop", default=0.1),
        attention_dropout=fields.is_dropped("attn_pdrop", default=0.1),
    )
    units = []
    for index in range(fields.number("n_layer")):
        prefix = f"transformer.h.{index}"
        weights = [
            *norm_weights(f"{prefix}.ln_1", hidden, bias=True),
            *linear_weights(f"{prefix}.attn.c_attn", hidden, 3 * hidden, bias=True, conv1d=True),
            *linear_weights(f"{prefix}.attn.c_proj", hidden, hidden, bias=True, conv1d=True),
            *norm_weights(f"{prefix}.ln_2", hidden, bias=True),
            *linear_weights(f"{prefix}.mlp.c_fc", hidden, inner, bias=True, conv1d=True),
            *linear_weights(f"{prefix}.mlp.c_proj", inner, hidden, bias=True, conv1d=True),
        ]
        units.append(UnitShape(prefix, tuple(weights), block))
    root = [
        *embedding_weights("transformer.wte", vocab, hidden),
        *embedding_weights("transformer.wpe", positions, hidden),
        *norm_weights("transformer.ln_f", hidden, bias=True),
    ]
    return model_of(fields, units, root, hidden, tied=True)


def _decoder(**kind: Any) -> Callable[[Fields], ModelShape]:
    return lambda fields: _llama_like(fields, _Decoder(**kind))


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

_GEMMA: dict[str, Any] = {
    "tied": True,
    "bias_flag": "attention_bias",
    "norm": "rms-float32-weight",
    "activation": "gelu_pytorch_tanh",
}

_OLMO: dict[str, Any] = {
    "norm": "rms-float32-weight",
    "whole_head_norms": True,
    "norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "bias_flag": "attention_bias",
}

FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "llama": _decoder(bias_flag="attention_bias"),
    "mistral": _decoder(window_period=1),
    "qwen2": _decoder(qkv_bias=True),
    "qwen3": _decoder(head_norms=True, bias_flag="attention_bias"),
    "gemma": _decoder(**_GEMMA),
    "gemma2": _decoder(**_GEMMA, norms=_FOUR_NORMS, caps_scores=True, window_period=2),
    "gemma3_text": _decoder(**_GEMMA, norms=_FOUR_NORMS, head_norms=True, window_period=6),
    "olmo2": _decoder(**_OLMO),
    "olmo3": _decoder(**_OLMO, window_period=4),
    "smollm3": _decoder(bias_flag="attention_bias", tied=True),
    "phi3": _decoder(fused=True, window_period=1),
    "mixtral": _decoder(experts="mixtral", window_period=1),
    "qwen2_moe": _decoder(qkv_bias=True, experts="qwen2"),
    "qwen3_moe": _decoder(head_norms=True, experts="qwen3", bias_flag="attention_bias"),
    "gpt2": _gpt2,
    **MIXTURES,
}
"""The reader of a `config.json`, by `model_type`."""


_OWN_HEAD = ("audioflamingo3", "llama4", "musicflamingo", "qwen2_audio", "vibevoice_asr", "voxtral")
"""Models of several parts whose text part has the head, and says whether it is tied; else the outer file does."""

_KNOWN_AS = {"kimi_k2": "deepseek_v3"}
"""Models that are published under a name of their own, with the classes of a family."""


def from_config(values: Mapping[str, Any], *, where: str, name: str | None = None) -> tuple[ModelShape, list[str]]:
    """Return the shapes a `config.json` describes, and notes for the user.

    Args:
        values: the parsed file.
        where: what to call it in errors.
        name: what to call the model; default: its `model_type`.

    Raises:
        ConfigError: an unknown `model_type` without Llama's fields, or a field that is missing or wrong.
    """
    kind = _KNOWN_AS.get(str(values.get("model_type")), values.get("model_type"))
    notes = _left_out(values, where)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: no model_type", hint="the file must be the model's whole config.json")
    nested = values.get("text_config")
    if kind not in FAMILIES and isinstance(nested, Mapping) and nested.get("model_type") in FAMILIES:
        notes.append(f"{where}: only the text part ({nested['model_type']}) of {kind} is planned")
        tied = {} if kind in _OWN_HEAD else {n: v for n, v in values.items() if n == "tie_word_embeddings"}
        values, kind = {**nested, **tied}, nested["model_type"]
    if kind not in FAMILIES and is_known_to_transformers(kind):
        notes.append(f"{where}: {kind} as Transformers builds it: parameters are exact, activations an estimate")
        shape = counted(values, where=where)
        if shape.encoder_decoder:
            notes.append(f"{where}: the encoder is planned with as many tokens as the decoder")
        return dataclasses.replace(shape, name=name or kind), notes
    fields = Fields(values, where)
    if kind not in FAMILIES:
        missing = [field for field in _LLAMA_FIELDS if values.get(field) is None]
        close = difflib.get_close_matches(kind, FAMILIES, n=1, cutoff=0.85)  # a typing error, not a relative
        if missing or any(values.get(field) for field in ("num_experts", "num_local_experts", "n_routed_experts")):
            wanted = f" and no {', '.join(missing)}" if missing else " and it is a mixture of experts"
            raise ConfigError(
                f"{where}: model_type {kind!r} is not known{wanted}",
                hint=f"did you mean {close[0]!r}?" if close else f"known are {', '.join(FAMILIES)}",
            )
        notes.append(f"{where}: model_type {kind!r} is not known; planned as a Llama of the same sizes")
        kind = "llama"
    layers = fields.number("num_hidden_layers", "n_layer", default=1)
    if layers > MOST_LAYERS:
        raise ConfigError(f"{where}: a model of {layers} layers", hint=f"at most {MOST_LAYERS} are planned")
    shape = FAMILIES[kind](fields)
    _check_heads_and_experts(shape, where)
    if kind in ESTIMATED:
        notes.append(f"{kind}: {ESTIMATED[kind]}")
    unknown = sorted({block.activation for block in shape.blocks} - KEPT_BY_ACTIVATION.keys())
    notes += [f"{where}: activation {name!r} is not known; planned as one that keeps its input" for name in unknown]
    return dataclasses.replace(shape, name=name or kind), notes


def _left_out(values: Mapping[str, Any], where: str) -> list[str]:
    """Name the fields of a file that a plan does not use."""
    quantized = values.get("quantization_config")
    if not quantized:
        return []
    method = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else quantized
    return [
        f"{where}: quantization_config ({method}) is left out: all weights are planned in --base-dtype; a frozen base "
        "in four bits is --method qlora"
    ]


def _check_heads_and_experts(shape: ModelShape, where: str) -> None:
    """Check that the numbers of a file make layers that can run; the file may be a copy with a slip.

    Raises:
        ConfigError: they do not.
    """
    for block in dict.fromkeys(shape.blocks):
        if not block.head_dim:
            wrong = f"hidden_size {block.hidden} has no room for {block.heads} attention heads"
        elif block.heads % block.kv_heads:
            wrong = f"{block.heads} attention heads cannot share {block.kv_heads} key-value heads equally"
        elif block.experts_per_token > block.experts:
            wrong = f"a token goes to {block.experts_per_token} experts, and there are {block.experts}"
        else:
            continue
        raise ConfigError(f"{where}: {wrong}", hint="no such model can be run; look at the numbers again")
