"""The program that `fullshard plan` runs to determine a model's shapes.

It reads the model's configuration from stdin and writes the shapes to stdout, both as JSON:

    python -m fullshard.api.counting < config.json
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.api.planning import model_shape
from fullshard.plan.counted import written
from fullshard.plan.shapes import Block, ModelShape, UnitShape

_SEQUENCES = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_PARTS = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_CLASSES = ("AutoModelForCausalLM", *_SEQUENCES, *_PARTS, "AutoModelForMaskedLM", "AutoModel")
"""If the configuration names no architecture, the first of these classes that supports its model type is planned."""


def count(values: Mapping[str, Any]) -> ModelShape:
    """Return the shapes of the Transformers model that a configuration describes, without allocating its tensors."""
    import transformers

    config = transformers.AutoConfig.for_model(**as_numbers(values))
    with torch.device("meta"):
        model = _build(transformers, config)
    shape = model_shape(model)
    text = config.get_text_config()
    hidden, vocab = getattr(text, "hidden_size", 0) or 0, getattr(text, "vocab_size", 0) or 0
    has_head = (
        isinstance(model.get_output_embeddings(), nn.Module) if hasattr(model, "get_output_embeddings") else False
    )
    heads = {p.name for p in shape.parameters if p.role == "head"}
    return dataclasses.replace(
        shape,
        name=values["model_type"],
        units=tuple(dataclasses.replace(u, block=u.block or _block(u, text, hidden)) for u in shape.units),
        vocab=vocab if has_head else 0,
        hidden=hidden,
        tied=has_head and not heads,
        encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
    )


def as_numbers(value: Any) -> Any:
    """Decode special floats in a `config.json`, which Transformers writes like `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: as_numbers(item) for key, item in value.items()}
    return [as_numbers(item) for item in value] if isinstance(value, list) else value


def _build(transformers: Any, config: Any) -> Any:
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if named is not None and named.config_class is type(config):
            return named(config)
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    for name in (*_SEQUENCES, *_CLASSES) if is_encoder_decoder else _CLASSES:
        factory = getattr(transformers, name, None)
        if factory is not None and type(config) in factory._model_mapping:
            return factory.from_config(config)
    raise ValueError(f"Transformers has no class for model_type {config.model_type!r}")


def _block(unit: UnitShape, config: Any, hidden: int) -> Block | None:
    """Derive the operations of a unit from common configuration fields. Return None if the unit is not a text layer."""
    config = _of_layer(unit, config)

    def number(*names: str, default: int) -> int:
        values = (getattr(config, name, None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), default)

    names = [parameter.name for parameter in unit.parameters]
    matrices = [p for p in unit.parameters if len(p.shape) > 1 and p.role != "embedding"]
    if not unit.name or not hidden or not any(hidden in p.shape for p in matrices):
        return None
    heads = number("num_attention_heads", "n_head", "num_heads", default=1)
    norms = [p for p in unit.parameters if "norm" in p.name.rpartition(".")[0] or ".ln" in p.name]
    is_mixture = any(".experts." in name for name in names)
    inner = number("intermediate_size", "ffn_dim", "n_inner", "d_ff", default=4 * hidden)
    return Block(
        hidden,
        heads,
        number("num_key_value_heads", default=heads),
        number("head_dim", default=max(1, hidden // heads)),
        number("moe_intermediate_size", default=inner) if is_mixture else inner,
        gated=any("gate" in name.rpartition(".")[0].rpartition(".")[2] for name in names),
        fused_gate=any("gate_up" in name for name in names),
        norms=sum(p.shape == (hidden,) and p.name.endswith("weight") for p in norms),
        norm="layer" if any(p.name.endswith("bias") for p in norms) else "rms",
        experts=number("num_local_experts", "num_experts", "n_routed_experts", default=1) if is_mixture else 0,
        experts_per_token=number("num_experts_per_tok", "moe_topk", "top_k_experts", default=1) if is_mixture else 0,
        window=_window(unit, config),
    )


def _of_layer(unit: UnitShape, config: Any) -> Any:
    """Return the configuration of a unit's layer if layers differ (Gemma 4 has two head sizes), otherwise `config`."""
    index, layers = unit.name.rpartition(".")[2], getattr(config, "num_hidden_layers", 0)
    is_there = hasattr(config, "per_layer_config") and index.isdecimal() and int(index) < layers
    return config.per_layer_config[int(index)] if is_there else config


def _window(unit: UnitShape, config: Any) -> int:
    kinds, index = getattr(config, "layer_types", None) or (), unit.name.rpartition(".")[2]
    is_limited = index.isdecimal() and int(index) < len(kinds) and kinds[int(index)] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if is_limited else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(written(count(json.load(sys.stdin))))
