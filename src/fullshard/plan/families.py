"""Convert a Hugging Face `config.json` to the shapes of a model.

A table has one row of layer descriptions for each supported `model_type`. Names, shapes and order are exactly those of
Transformers' own modules, which the tests build on the meta device to compare. If a `model_type` is not in the table
but Transformers supports it, Transformers builds the model (`plan/counted`). Any other model is planned as a plain
Llama, with a note, if the file has all of Llama's fields. If it does not, an error is raised.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.core.errors import ConfigError
from fullshard.core.forms import FORMS
from fullshard.plan.activations import KEPT_BY_ACTIVATION
from fullshard.plan.counted import counted, is_known_to_transformers
from fullshard.plan.fields import Fields
from fullshard.plan.shapes import Block, ModelShape, Norm, ParameterShape, UnitShape

MOST_LAYERS = 1000
"""The most layers of a model. More are treated as a mistake, such as three extra zeros. 1000 layers take seconds."""

_LLAMA_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_Weights = list[ParameterShape]
"""The weights of one module, in definition order."""
_Part = tuple[_Weights, dict[str, Any]]
"""The weights of one part of a layer, and the fields of its `Block` that the part determines."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of decoders differs from Llama."""

    # `fused` is Phi-3's single projection; `latent` is DeepSeek-V3's narrow latents; `linear` is Qwen3-Next's gated
    # delta rule in three of four layers and gated attention in the fourth.
    attention: Literal["separate", "fused", "latent", "linear"] = "separate"
    bias: str = ""  # the field that states whether attention's projections have biases
    has_bias: bool = False  # whether these projections have biases if the file does not state it
    has_output_bias: bool = True  # whether `bias` and `has_bias` also apply to the projection of attention's output
    # Whether queries and keys are normalized: in each head (`head`), in all heads together (`whole`), or not at all.
    head_norms: Literal["", "head", "whole"] = ""
    norm_flag: str = ""  # the field that states whether these norms exist
    sinks: bool = False  # whether each attention head has a sink
    mlp: str = "mlp"  # name of the feed-forward part
    # The parts of a mixture of experts, in definition order. If one is `biased_router`, experts have biases.
    mixture: tuple[str, ...] = ()
    # The field that contains an expert's width.
    expert_width: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    float32_router: bool = False  # whether the weights by which the experts' outputs are multiplied are float32
    is_transposed: bool = False  # whether the weights of experts have the shape (experts, inputs, outputs)
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # in definition order
    tied: bool = False  # whether the head shares the embedding's weight if the file does not state it
    norm: Norm = "rms"
    activation: str = "silu"
    caps_scores: bool = False  # whether scores and logits pass through a tanh
    window_period: int = 0  # see `Fields.window`


def _llama_like(fields: Fields, family: Family) -> ModelShape:
    hidden, vocab = fields.number("hidden_size"), fields.number("vocab_size")
    units = []
    for index in range(fields.number("num_hidden_layers")):
        prefix = f"model.layers.{index}"
        attention, seen = _attention(fields, family, prefix, index)
        feed_forward, fed = _feed_forward(fields, family, f"{prefix}.{family.mlp}", index)
        block = Block(
            hidden,
            activation=fields.text("hidden_activation", "hidden_act", default=family.activation),
            norms=len(family.norms),
            norm=family.norm,
            capped_scores=family.caps_scores and fields.values.get("attn_logit_softcapping", 50.0) is not None,
            dropout=family.attention == "fused" and fields.is_dropped("resid_pdrop"),
            attention_dropout=fields.is_dropped("attention_dropout"),
            **seen,
            **fed,
        )
        norms = [weight for name in family.norms for weight in _norm(f"{prefix}.{name}", hidden)]
        units.append(UnitShape(prefix, (*attention, *feed_forward, *norms), block))
    root = [*_table("model.embed_tokens", vocab, hidden), *_norm("model.norm", hidden)]
    capped = family.caps_scores and fields.values.get("final_logit_softcapping", 30.0) is not None
    return _model(fields, units, root, hidden, tied=family.tied, capped_logits=capped)


def _attention(fields: Fields, family: Family, prefix: str, index: int) -> _Part:
    (heads, kv_heads, head_dim), at = fields.heads(), f"{prefix}.self_attn"
    hidden, queries, keys = fields.number("hidden_size"), heads * head_dim, kv_heads * head_dim
    if family.attention == "latent":
        return _latent_attention(fields, at)
    if family.attention == "linear" and _is_linear(fields, index):
        return _delta_rule(fields, f"{prefix}.linear_attn")
    bias = fields.flag(family.bias, family.has_bias) if family.bias else family.has_bias
    weights = [ParameterShape(f"{at}.sinks", (heads,))] if family.sinks else []
    if family.attention == "fused":
        weights += _linear(f"{at}.o_proj", queries, hidden) + _linear(f"{at}.qkv_proj", hidden, queries + 2 * keys)
    else:
        is_gated = family.attention == "linear"  # the projection of queries also computes a gate
        weights += _linear(f"{at}.q_proj", hidden, 2 * queries if is_gated else queries, bias=bias)
        weights += [weight for name in "kv" for weight in _linear(f"{at}.{name}_proj", hidden, keys, bias=bias)]
        weights += _linear(f"{at}.o_proj", queries, hidden, bias=bias and family.has_output_bias)
    is_normed = bool(family.head_norms) and (not family.norm_flag or fields.flag(family.norm_flag, False))
    if is_normed:
        widths = (queries, keys) if family.head_norms == "whole" else (head_dim, head_dim)
        weights += _norm(f"{at}.q_norm", widths[0]) + _norm(f"{at}.k_norm", widths[1])
    return weights, {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_norms": is_normed,
        "sliced_values": family.attention == "fused",
        "window": 0 if family.attention == "linear" else fields.window(index, period=family.window_period),
    }


def _latent_attention(fields: Fields, at: str) -> _Part:
    """Return the weights of DeepSeek-V3's attention, in which queries, keys and values pass through narrow latents."""
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    rank, value_dim = fields.number("kv_lora_rank"), fields.number("v_head_dim")
    plain, rotated = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    bias, narrow = fields.flag("attention_bias", False), 0
    if fields.is_set("q_lora_rank"):
        narrow = fields.number("q_lora_rank")
        weights = _linear(f"{at}.q_a_proj", hidden, narrow, bias=bias) + _norm(f"{at}.q_a_layernorm", narrow)
        weights += _linear(f"{at}.q_b_proj", narrow, heads * (plain + rotated))
    else:
        weights = _linear(f"{at}.q_proj", hidden, heads * (plain + rotated))
    weights += _linear(f"{at}.kv_a_proj_with_mqa", hidden, rank + rotated, bias=bias)
    weights += _norm(f"{at}.kv_a_layernorm", rank) + _linear(f"{at}.kv_b_proj", rank, heads * (plain + value_dim))
    weights += _linear(f"{at}.o_proj", heads * value_dim, hidden, bias=bias)
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": plain + rotated}
    return weights, {**sizes, "value_dim": value_dim, "latents": rank + narrow}


def _is_linear(fields: Fields, index: int) -> bool:
    kinds, period = fields.items("layer_types"), fields.number("full_attention_interval", default=4)
    return kinds[index] == "linear_attention" if index < len(kinds) else (index + 1) % period != 0


_DELTA_CHUNK = 64
"""Tokens per chunk (in Transformers and in the kernel). The delta rule compares all tokens within a chunk."""


def _delta_rule(fields: Fields, at: str) -> _Part:
    hidden, heads = fields.number("hidden_size"), fields.number("linear_num_value_heads")
    kv_heads, head_dim = fields.number("linear_num_key_heads"), fields.number("linear_value_head_dim")
    keys, values = kv_heads * fields.number("linear_key_head_dim"), heads * head_dim
    weights = [
        ParameterShape(f"{at}.dt_bias", (heads,)),
        ParameterShape(f"{at}.A_log", (heads,)),
        ParameterShape(f"{at}.conv1d.weight", (2 * keys + values, 1, fields.number("linear_conv_kernel_dim"))),
        *_linear(f"{at}.in_proj_qkvz", hidden, 2 * keys + 2 * values),
        *_linear(f"{at}.in_proj_ba", hidden, 2 * heads),
        *_norm(f"{at}.norm", head_dim),
        *_linear(f"{at}.out_proj", values, hidden),
    ]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return weights, {**sizes, "head_norms": True, "window": _DELTA_CHUNK}


def _feed_forward(fields: Fields, family: Family, at: str, index: int) -> _Part:
    hidden = fields.number("hidden_size")
    if not family.mixture or _is_dense(fields, index):
        width, is_fused = fields.number("intermediate_size_mlp", "intermediate_size"), family.attention == "fused"
        if is_fused:
            weights = _linear(f"{at}.gate_up_proj", hidden, 2 * width) + _linear(f"{at}.down_proj", width, hidden)
        else:
            weights = _gated(at, hidden, width, bias=fields.flag("mlp_bias", False))
        return weights, {"intermediate": width, "fused_gate": is_fused}
    experts = fields.number("num_local_experts", "num_experts", "n_routed_experts")
    width = fields.number(*family.expert_width)
    shared = 0
    if "shared_experts" in family.mixture:
        shared = width * fields.number("n_shared_experts", default=1)
    elif "shared_expert" in family.mixture:
        shared = fields.number("shared_expert_intermediate_size", default=width)
    # A gate is not a `matrix`: it is a bare parameter, but PEFT's "all-linear" selects modules of class Linear.
    of_part = {
        "gate": [ParameterShape(f"{at}.gate.weight", (experts, hidden))],
        "router": _linear(f"{at}.router", hidden, experts),
        "biased_router": [
            ParameterShape(f"{at}.router.weight", (experts, hidden)),
            ParameterShape(f"{at}.router.bias", (experts,)),
        ],
        "experts": _experts(f"{at}.experts", family, experts, hidden, width),
        "shared_expert": _gated(f"{at}.shared_expert", hidden, shared),
        "shared_experts": _gated(f"{at}.shared_experts", hidden, shared),
        "shared_expert_gate": _linear(f"{at}.shared_expert_gate", hidden, 1),
    }
    per_token = fields.number(
        "num_experts_per_tok", "experts_per_token", default=1 if "router" in family.mixture else None
    )
    return [weight for part in family.mixture for weight in of_part[part]], {
        "intermediate": width,
        "fused_gate": True,
        "experts": experts,
        "experts_per_token": per_token,
        "float32_router": family.float32_router,
        "shared_intermediate": shared,
    }


def _experts(at: str, family: Family, experts: int, hidden: int, width: int) -> _Weights:
    weights = []
    for name, inputs, outputs in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)):
        each = (inputs, outputs) if family.is_transposed else (outputs, inputs)
        weights.append(ParameterShape(f"{at}.{name}", (experts, *each)))
        if "biased_router" in family.mixture:
            weights.append(ParameterShape(f"{at}.{name}_bias", (experts, outputs)))
    return weights


def _is_dense(fields: Fields, index: int) -> bool:
    """Return whether a layer of a mixture-of-experts model is a dense layer without experts."""
    sparse = fields.items("moe_layers")
    return (
        index in fields.items("mlp_only_layers")
        or bool((index + 1) % fields.number("decoder_sparse_step", default=1))
        or index < (fields.values.get("first_k_dense_replace") or 0)
        or (
            index not in sparse
            if fields.is_set("moe_layers")
            else bool((index + 1) % fields.number("interleave_moe_layer_step", default=1))
        )
    )


def _gpt2(fields: Fields) -> ModelShape:
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    inner, vocab = fields.number("n_inner", default=4 * hidden), fields.number("vocab_size")
    block = Block(
        hidden,
        heads,
        heads,
        hidden // heads,
        inner,
        gated=False,
        norm="layer",
        float32_scores=False,
        activation=fields.text("activation_function", default="gelu_new"),
        dropout=fields.is_dropped("resid_pdrop", default=0.1),
        attention_dropout=fields.is_dropped("attn_pdrop", default=0.1),
    )
    units = []
    for index in range(fields.number("n_layer")):
        at = f"transformer.h.{index}"
        weights = _norm(f"{at}.ln_1", hidden, bias=True)
        weights += _linear(f"{at}.attn.c_attn", 3 * hidden, hidden, bias=True, conv1d=True)
        weights += _linear(f"{at}.attn.c_proj", hidden, hidden, bias=True, conv1d=True)
        weights += _norm(f"{at}.ln_2", hidden, bias=True)
        weights += _linear(f"{at}.mlp.c_fc", inner, hidden, bias=True, conv1d=True)
        weights += _linear(f"{at}.mlp.c_proj", hidden, inner, bias=True, conv1d=True)
        units.append(UnitShape(at, tuple(weights), block))
    root = _table("transformer.wte", vocab, hidden)
    root += _table("transformer.wpe", fields.number("n_positions", "n_ctx"), hidden)
    return _model(fields, units, [*root, *_norm("transformer.ln_f", hidden, bias=True)], hidden, tied=True)


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False, conv1d: bool = False) -> _Weights:
    """Return the weights of a linear layer. GPT-2's `Conv1D` has a transposed weight, with `inputs` as its last dim."""
    weights = [ParameterShape(f"{name}.weight", (outputs, inputs), role="matrix")]
    return [*weights, ParameterShape(f"{name}.bias", (inputs if conv1d else outputs,))] if bias else weights


def _norm(name: str, width: int, *, bias: bool = False) -> _Weights:
    return [ParameterShape(f"{name}.{leaf}", (width,)) for leaf in (("weight", "bias") if bias else ("weight",))]


def _table(name: str, rows: int, width: int) -> _Weights:
    return [ParameterShape(f"{name}.weight", (rows, width), role="embedding")]


def _gated(at: str, hidden: int, width: int, *, bias: bool = False) -> _Weights:
    """Return the weights of a feed-forward part that multiplies the outputs of two projections, such as SwiGLU."""
    up = [weight for name in ("gate", "up") for weight in _linear(f"{at}.{name}_proj", hidden, width, bias=bias)]
    return up + _linear(f"{at}.down_proj", width, hidden, bias=bias)


def _model(
    fields: Fields, units: Iterable[UnitShape], root: _Weights, hidden: int, *, tied: bool, capped_logits: bool = False
) -> ModelShape:
    """Build a model from the shapes of its units and of its root, with a head unless it is `tied`."""
    vocab, tied = fields.number("vocab_size"), fields.flag("tie_word_embeddings", tied)
    if not tied:
        root = [*root, ParameterShape("lm_head.weight", (vocab, hidden), role="head")]
    around = UnitShape("", tuple(root))
    return ModelShape("", (*units, around), vocab, hidden, tied, capped_logits=capped_logits)


_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA = Family(tied=True, bias="attention_bias", norm="rms-float32-weight", activation="gelu_pytorch_tanh")
_OLMO = Family(norm="rms-float32-weight", head_norms="whole", norms=_POST_NORMS, bias="attention_bias")
_QWEN3 = Family(head_norms="head", bias="attention_bias")
_QWEN2 = Family(has_bias=True, has_output_bias=False)
_SHARED = ("experts", "gate", "shared_experts")

_ROWS = {
    "llama": Family(bias="attention_bias"),
    "mistral": Family(window_period=1),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(_GEMMA, norms=_FOUR_NORMS, caps_scores=True, window_period=2),
    "gemma3_text": dataclasses.replace(_GEMMA, norms=_FOUR_NORMS, head_norms="head", window_period=6),
    "olmo2": _OLMO,
    "olmo3": dataclasses.replace(_OLMO, window_period=4),
    "smollm3": Family(bias="attention_bias", tied=True),
    "phi3": Family(attention="fused", window_period=1),
    "mixtral": Family(mixture=("gate", "experts"), float32_router=True, window_period=1),
    "qwen2_moe": dataclasses.replace(_QWEN2, mixture=("gate", "experts", "shared_expert", "shared_expert_gate")),
    "qwen3_moe": dataclasses.replace(_QWEN3, mixture=("experts", "gate")),
    "deepseek_v3": Family(attention="latent", mixture=_SHARED, float32_router=True),
    "glm4_moe": Family(
        bias="attention_bias",
        has_output_bias=False,
        head_norms="head",
        norm_flag="use_qk_norm",
        mixture=_SHARED,
        float32_router=True,
    ),
    "gpt_oss": Family(
        bias="attention_bias",
        has_bias=True,
        sinks=True,
        mixture=("biased_router", "experts"),
        expert_width=("intermediate_size",),
        is_transposed=True,
        window_period=2,
    ),
    "llama4_text": Family(
        bias="attention_bias",
        mlp="feed_forward",
        mixture=("experts", "router", "shared_expert"),
        expert_width=("intermediate_size",),
        is_transposed=True,
    ),
    "qwen3_next": Family(
        attention="linear",
        bias="attention_bias",
        head_norms="head",
        mixture=("gate", "experts", "shared_expert", "shared_expert_gate"),
        norm="rms-float32-weight",
    ),
}

FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    **{kind: lambda fields, family=family: _llama_like(fields, family) for kind, family in _ROWS.items()},  # type: ignore[misc]
    "gpt2": _gpt2,
}
"""The reader of a `config.json`, by `model_type`."""

ESTIMATED = {
    "gpt_oss": "what its experts keep for backward is an estimate, about a sixth too low for Transformers' own classes",
    "llama4_text": "Transformers' own classes pass every token through every expert; planned for active ones",
    "qwen3_next": "planned for the kernels of flash-linear-attention; Transformers' own fall-back keeps twice as much",
}
"""Families with estimated activations and speed, and the reason for it."""

_PROJECTIONS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj", "gate": "gate.weight"}
_OF_MIXTRAL = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj", "gate": "gate.weight"}
CONVERTED_TARGETS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _OF_MIXTRAL),
    **dict.fromkeys(
        (
            *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
            *("exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe"),
            *("longcat_flash", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
        ),
        _PROJECTIONS,
    ),
}
"""Mixtures whose experts PEFT adapts for the names that projections had in Transformers 4, and the parameters that they
are now (PEFT 0.21, `utils/transformers_weight_conversion.py`)."""

_OWN_HEAD = ("audioflamingo3", "llama4", "musicflamingo", "qwen2_audio", "vibevoice_asr", "voxtral")
"""Models of several parts in which the text part has the head and states whether it is tied. In all other models the
outer file states it."""


def family_of(values: Mapping[str, Any]) -> Any:
    """Return the `model_type` of a `config.json`, or of the family whose class it names (as for Kimi-K2)."""
    kind = values.get("model_type")
    if str(kind) in FAMILIES or is_known_to_transformers(str(kind)):
        return kind
    families = {family.replace("_", "") + "forcausallm": family for family in FAMILIES}
    return families.get("".join(map(str, values.get("architectures") or ())).lower(), kind)


def from_config(values: Mapping[str, Any], *, where: str, name: str | None = None) -> tuple[ModelShape, list[str]]:
    """Return the shapes that the fields of a `config.json` describe, and notes for the user."""
    kind, notes = family_of(values), list[str]()
    method = ""
    if quantized := values.get("quantization_config"):
        method = str(quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else quantized)
        notes.append(
            f"{where}: the files are in {method}, which a frozen base keeps; --base-dtype plans their values"
            if method in FORMS
            else f"{where}: quantization_config ({method}) is ignored, and all weights are planned in --base-dtype; "
            "use --method qlora for a frozen base in 4 bits"
        )
    published_as = method if method in FORMS else ""
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: the file has no model_type", hint="use the model's complete config.json")
    nested = values.get("text_config")
    if kind not in FAMILIES and isinstance(nested, Mapping) and (inner := family_of(nested)) in FAMILIES:
        notes.append(f"{where}: only the text part ({inner}) of {kind} is planned")
        tied = {} if kind in _OWN_HEAD else {n: v for n, v in values.items() if n == "tie_word_embeddings"}
        values, kind = {**nested, **tied}, inner
    beside: dict[str, Any] = {"published_as": published_as}
    beside["converted_targets"] = tuple(CONVERTED_TARGETS.get(kind, {}).items())
    if kind not in FAMILIES and is_known_to_transformers(kind):
        notes.append(
            f"{where}: {kind} as Transformers builds it: parameters are exact, and activations are an estimate"
        )
        shape = counted(values, where=where)
        if shape.encoder_decoder:
            notes.append(f"{where}: the encoder is planned with as many tokens as the decoder")
        return dataclasses.replace(shape, name=name or kind, **beside), notes
    fields, reader = Fields(values, where), FAMILIES.get(kind)
    if reader is None:
        _require_llama(values, kind, where)
        notes.append(f"{where}: model_type {kind!r} is unknown, so it is planned as a Llama of the same sizes")
        reader = FAMILIES["llama"]
    layers = fields.number("num_hidden_layers", "n_layer", default=1)
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"{where}: the model has {layers} layers, but at most {MOST_LAYERS} can be planned",
            hint="check the number of layers in the file",
        )
    shape = reader(fields)
    blocks = dict.fromkeys(shape.blocks)
    for block in blocks:
        _check_heads_and_experts(block, where)
    if kind in ESTIMATED:
        notes.append(f"{kind}: {ESTIMATED[kind]}")
    unknown = sorted({block.activation for block in blocks} - KEPT_BY_ACTIVATION.keys())
    notes += [f"{where}: activation {name!r} is unknown; the plan assumes that it keeps its input" for name in unknown]
    return dataclasses.replace(shape, name=name or kind, **beside), notes


def _require_llama(values: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise `ConfigError` for an unknown family, unless the file has all of Llama's fields and no experts."""
    missing = [field for field in _LLAMA_FIELDS if values.get(field) is None]
    if missing or any(values.get(field) for field in ("num_experts", "num_local_experts", "n_routed_experts")):
        close = difflib.get_close_matches(kind, FAMILIES, n=1, cutoff=0.85)  # catches typos, but not related families
        wanted = f"the file has no {', '.join(missing)}" if missing else "it is a mixture of experts"
        raise ConfigError(
            f"{where}: model_type {kind!r} is unknown, and {wanted}",
            hint=f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(FAMILIES)}",
        )


def _check_heads_and_experts(block: Block, where: str) -> None:
    """Raise `ConfigError` if the numbers of heads or experts in a file do not describe a layer that can run."""
    if not block.head_dim:
        wrong = f"hidden_size {block.hidden} is too small for {block.heads} attention heads"
    elif block.heads % block.kv_heads:
        wrong = f"{block.heads} attention heads cannot be divided evenly among {block.kv_heads} key-value heads"
    elif block.experts_per_token > block.experts:
        wrong = f"a token is routed to {block.experts_per_token} experts, but there are only {block.experts}"
    else:
        return
    raise ConfigError(f"{where}: {wrong}", hint="correct these numbers in the file")
