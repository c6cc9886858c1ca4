"""A tiny model of any type that Transformers has, made from its default configuration.

    model_types()                              every type that an auto class knows
    class_names("bert")                        the classes of one type, the base model first
    tiny_config("bert")                        its configuration, shrunk
    build("bert", "BertForMaskedLM")           a model with random weights

Sizes are shrunk by general rules: widths become a 16th, heads and their sizes a 4th each, so that what fits together
in the default configuration still does; layers, experts and vocabularies become few. `EXCEPTIONS` says what a type
needs besides. A type that cannot be built here is in `NOT_BUILT`, with the reason.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCABULARY, POSITIONS, LAYERS, EXPERTS, PATCHES = 99, 64, 2, 4, 4
_WIDTH_FACTOR = 16
_MAX_LAYERS = 8


def _rope(part: str, *sections: int) -> dict[str, Any]:
    """Rotary positions of several axes, for heads as small as they are here."""
    values = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {f"{part}rope_parameters": values}


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "aya_vision": {"vision_config.num_attention_heads": 4},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "bit": {"num_groups": 2},
    "bridgetower": {
        "hidden_size": 64, "vision_config.hidden_size": 64, "text_config.hidden_size": 64, "num_attention_heads": 1,
        "text_config.num_attention_heads": 1, "text_config.intermediate_size": 96, "intermediate_size": 96,
    },
    "chameleon": {"vocabulary_map": {"<image>": 98}, "vq_config.base_channels": 32},
    "emu3": {"vq_config.base_channels": 32, "vocabulary_map": {"<image>": 98}},
    "janus": {"vq_config.base_channels": 32},
    "cohere2_moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                    "intermediate_size": 96},
    "longcat_flash": {"hidden_size": 64, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
                      "moe_topk": 2},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2,
                        "text_config.moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [5, 5, 6]}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"encoder_config.context_size": 32},
    "granite_speech5_encoder": {"context_size": 32},
    "grounding-dino": {"d_model": 32},
    "mm-grounding-dino": {"d_model": 32},
    "hiera": {"decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hunyuan_vl": {"text_config.head_dim": 32},
    "hunyuan_vl_text": {"head_dim": 32},
    "informer": {"prediction_length": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mask2former": {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
    "maskformer": {"fpn_feature_size": 32, "mask_feature_size": 32},
    "oneformer": {"conv_dim": 32, "mask_dim": 32, "hidden_dim": 32},
    "mimi": {"upsample_groups": 32},
    "mimi_decoder": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 32},
    "kyutai_speech_to_text": {"codec_config.upsample_groups": 32},
    "csm": {"codec_config.upsample_groups": 32},
    "ministral": {"head_dim": 32},
    "molmo2": {"adapter_config.vision_feature_layer": [-1, -2]},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"hidden_size": 16, "axial_pos_embds_dim": [4, 12]},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "swin2sr": {"embed_dim": 12},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3]},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "time_series_transformer": {"prediction_length": 4},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "moe_intermediate_size": 16},
    "stablelm": {"partial_rotary_factor": 0.5},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2,
                  "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3n": {"text_config.intermediate_size": 64, "text_config.num_hidden_layers": 5,
                "text_config.num_kv_shared_layers": 0, "text_config.activation_sparsity_pattern": [0.0] * 5},
    "gemma3n_text": {"intermediate_size": 64, "num_hidden_layers": 5, "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0] * 5},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 48},
    "pocket_tts": {"flow_head_config.condition_dim": 64},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "swinv2": {"image_size": 32, "patch_size": 4, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4]},
    "vits": {"depth_separable_channels": 2, "upsample_initial_channel": 32, "flow_size": 12},
    "zamba": {"num_hidden_layers": 8},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PPOCRV5MobileRecForTextRecognition": {"hidden_size": 16},
    "PPOCRV5ServerRecForTextRecognition": {"hidden_size": 16},
    "PPOCRV6SmallRecForTextRecognition": {"hidden_size": 16},
    "qwen4_exp": {"text_config.indexer_n_heads": 2, "text_config.indexer_kv_heads": 1,
                  "text_config.indexer_head_dim": 64, "text_config.indexer_budget": 16,
                  "text_config.indexer_compress_ratio": 4},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 16,
                       "indexer_compress_ratio": 4},
    **dict.fromkeys(("glm4v_text", "glm_image_text", "qwen2_5_vl_text", "qwen2_vl_text"), _rope("", 4, 6, 6)),
    **dict.fromkeys(("glm46v", "glm4v", "glmga", "glm_image", "qwen2_5_vl", "qwen2_vl", "qwen2_5_omni_thinker"),
                    _rope("text_config.", 4, 6, 6)),
    "glm4v_moe_text": _rope("", 1, 1, 1),
    "glm4v_moe": _rope("text_config.", 1, 1, 1),
    "glm_ocr_text": _rope("", 2, 3, 3),
    "glm_ocr": _rope("text_config.", 2, 3, 3),
}  # fmt: skip
"""What a type needs besides the rules, by key of its configuration; `text_config.x` reaches into a part of it."""

_PARTS = "its default configuration lacks parts that the model needs, or contradicts itself"
_SIZES = "its sizes depend on each other in ways that no rule here knows"
NOT_BUILT: dict[str, str] = {
    "JevForDecision": "an auto class names it for types whose configuration it does not take",
    "cohere_compass": _PARTS,
    "cohere_compass_text": _PARTS,
    "d_fine": _SIZES,
    "dots3_note": _SIZES,
    "dots3_note_audio_encoder": _SIZES,
    "dots3_note_vision_encoder": _SIZES,
    "esmfold2": _SIZES,
    "gemma4_assistant": _PARTS,
    "gemma4_unified_assistant": _PARTS,
    "granite4_vision": _SIZES,
    "muse_spark": _SIZES,
    "muse_spark_audio": _SIZES,
    "nemotron_h_omni": _PARTS,
    "nougat": _PARTS,
    "pp_ocrv5_server_det": _PARTS,
    "pp_ocrv6_medium_det": _PARTS,
    "qwen3_omni_moe": _PARTS,
    "sapiens2": _PARTS,
    "t5gemma2_encoder": "an auto class names it for a configuration that it does not take",
    "upernet": _SIZES,
    "uvdoc": _SIZES,
    "uvdoc_backbone": _SIZES,
    "voxtral_realtime_text": "an auto class names a class that Transformers does not have",
}
"""Types, and classes of types, that cannot be built here, and why."""

_HEADS = re.compile(r"(.*_)?(num_)?(attention_|key_value_|kv_|key_|value_)*(n_)?heads?(_per_stage)?|nhead|n_head_kv")
_HEAD_DIMS = re.compile(r".*(head_dim|d_kv|head_size|d_head|dim_head|rotary_dim|mrope_section)")
_LAYERS = re.compile(
    r"(.*_)?(num_)?(hidden_|encoder_|decoder_)?(layers|blocks|layer)|depth|.*_depth|num_.*_layers|.*_num_layers|n_layers?"
)
_DEPTHS = re.compile(
    r"depths|num_blocks|layers|stage_num_blocks|stage_numb_of_layers|blocks_per_stage|num_block_repeats"
)
_VOCABULARY = re.compile(r"(.*_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings")
_TOKENS = re.compile(r".*token_(id|index)s?|.*_token_id_.*")
_EXPERTS = re.compile(r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts")
_CHOSEN_EXPERTS = re.compile(r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts")
_GROUPS = re.compile(r"n_group|topk_group|num_expert_group")
_POSITIONS = re.compile(r"max_position_embeddings|n_positions|max_(source|target)_positions|max_2d_position_embeddings")
_WIDTHS = re.compile(
    r".*(hidden_size|intermediate_size|ffn_dim|ff_dim|mlp_dim|d_model|d_ff|n_embd|n_inner|embed_dim|emb_dim|embedding_size"
    r"|embedding_dim|lora_rank|projection_dim|proj_dim|proj_size|hidden_dim|hidden_sizes|filter_sizes|_channels"
    r"|channel_list|num_filters|feature_size|dim_per_stage|ffn_hidden_size|_units|inner_dim|codebook_dim|latent_dim|projector_dim"
    r"|output_size|output_dim|out_dim|tdnn_dim|conv_dim|_width|_features|projection_size|codevector_dim)"
)
_KEPT = re.compile(
    r"num_feat_extract_layers|num_channels|in_channels|.*input_channels|in_chans|.*audio_channels|.*image_channels"
)


def model_types() -> list[str]:
    """Every type that has a configuration, in order."""
    return sorted(CONFIG_MAPPING_NAMES)


@cache
def class_names(model_type: str) -> tuple[str, ...]:
    """The classes that auto classes make of a type, the base model first; none if it has none."""
    names: dict[str, None] = {}
    mappings = [name for name in dir(modeling_auto) if re.fullmatch("MODEL_.*MAPPING_NAMES", name)]
    for mapping in sorted(mappings, key=lambda name: name != "MODEL_MAPPING_NAMES"):
        found = getattr(modeling_auto, mapping).get(model_type, ())
        names |= dict.fromkeys([found] if isinstance(found, str) else found)
    return tuple(names)


def model_class(model_type: str, name: str) -> Any:
    """The class of that name."""
    module = importlib.import_module(type(CONFIG_MAPPING[model_type]()).__module__.rpartition(".")[0])
    transformers = importlib.import_module("transformers")
    return getattr(transformers, name, None) or getattr(module, name)


def tiny_config(model_type: str, name: str = "") -> Any:
    """The type's default configuration, shrunk; for the class `name`, where that matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = CONFIG_MAPPING[model_type]()
    values = _shrunk(default)
    for key, value in (EXCEPTIONS.get(model_type, {}) | EXCEPTIONS.get(name, {})).items():
        *path, last = key.split(".")
        part = values
        for name in path:
            part = part.setdefault(name, {})
        part[last] = value
    return type(default)(**values)


def why_not(model_type: str, name: str) -> str | None:
    """Why a class cannot be built here; None if it can."""
    reason = NOT_BUILT.get(name) or NOT_BUILT.get(model_type)
    if reason is None:
        try:
            with torch.device("meta"):
                make(model_type, name)
        except ImportError as error:  # an optional library that is not here
            return next(line for line in str(error).splitlines() if line)
    return reason


def build(model_type: str, name: str, *, seed: int = 0) -> nn.Module:
    """A model with random weights, no two of its tensors alike, in eval mode."""
    torch.manual_seed(seed)
    model = make(model_type, name)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dim():
                tensor.add_(torch.randn_like(tensor) * 0.02)
    return model.eval()


def make(model_type: str, name: str) -> nn.Module:
    """A model as Transformers initializes it; on the meta device, if that is the current one."""
    cls = model_class(model_type, name)
    config = tiny_config(model_type, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that are small, or zero
        model: nn.Module = cls._from_config(_part_for(cls, config), dtype=torch.float32)
    return model


def _part_for(cls: Any, config: Any) -> Any:
    """The configuration, or the part of it that the class takes, as the auto classes choose."""
    if isinstance(config, cls.config_class):
        return config
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return next((part for part in parts if isinstance(part, cls.config_class)), config)


def _shrunk(default: Any) -> dict[str, Any]:
    """What to change in a configuration, parts of it included."""
    tree = default.to_dict()
    factor = _head_factor(tree)
    tokens: dict[int, int] = {}
    return _shrink(tree, factor, tokens)


def _shrink(tree: dict[str, Any], factor: int, tokens: dict[int, int]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            if key in ("id2label", "label2id"):
                continue
            if "model_type" in value:
                small[key] = {"model_type": value["model_type"], **_shrink(value, factor, tokens)}
            elif "mrope_section" in value:
                small[key] = value | {"mrope_section": _divided(value["mrope_section"], _WIDTH_FACTOR // factor)}
            continue
        new = _small(key, value, tree, factor, tokens)
        if new != value:
            small[key] = new
    return small


def _small(key: str, value: Any, tree: dict[str, Any], factor: int, tokens: dict[int, int]) -> Any:
    if isinstance(value, bool) or not _is_of_integers(value):
        return value
    if _TOKENS.fullmatch(key):
        return _small_token(value, tokens)
    if _KEPT.fullmatch(key):
        return value
    for pattern, size in (
        (_CHOSEN_EXPERTS, 2), (_EXPERTS, EXPERTS), (_GROUPS, 1), (_VOCABULARY, VOCABULARY), (_POSITIONS, POSITIONS),
    ):  # fmt: skip
        if pattern.fullmatch(key):
            return _at_most(value, size)
    if key == "image_size" and "patch_size" in tree:
        return _image_size(value, tree["patch_size"])
    if _HEADS.fullmatch(key):
        return _divided(value, factor)
    if _HEAD_DIMS.fullmatch(key):
        return _divided(value, _WIDTH_FACTOR // factor)
    if _DEPTHS.fullmatch(key) and isinstance(value, list | tuple):
        return _at_most(value, LAYERS)
    if _LAYERS.fullmatch(key) and isinstance(value, int):
        return min(value, _layers(tree))
    if _WIDTHS.fullmatch(key):
        return _divided(value, _WIDTH_FACTOR)
    return value


def _is_of_integers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_of_integers(item) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _divided(value: Any, divisor: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_divided(item, divisor) for item in value)
    return value if value <= 1 else max(1, value // divisor)


def _at_most(value: Any, limit: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_at_most(item, limit) for item in value)
    return min(value, limit)


def _small_token(value: Any, tokens: dict[int, int]) -> Any:
    """Ids within the vocabulary, different ones for different tokens."""
    if isinstance(value, list | tuple):
        return type(value)(_small_token(item, tokens) for item in value)
    return value if value < VOCABULARY // 2 else tokens.setdefault(value, VOCABULARY - 2 - len(tokens))


def _image_size(value: Any, patch: Any) -> Any:
    if isinstance(value, list | tuple):
        patches = patch if isinstance(patch, list | tuple) else [patch] * len(value)
        return type(value)(_image_size(v, p) for v, p in zip(value, patches, strict=False))
    return min(value, PATCHES * (patch if isinstance(patch, int) else max(patch)))


def _layers(tree: dict[str, Any]) -> int:
    """As many layers as it takes to have one of every kind."""
    kinds = tree.get("layer_types") or tree.get("layers_block_type") or []
    first = [kinds.index(kind) + 1 for kind in set(kinds)] if isinstance(kinds, list) else []
    return min(max([LAYERS, *first]), _MAX_LAYERS)


def _head_factor(tree: dict[str, Any]) -> int:
    """What all numbers of heads can be divided by; the smallest ones (of keys and values) become one."""
    counts = list(_values(tree, _HEADS))
    return next(f for f in (4, 2, 1) if all(count % f == 0 or count < f for count in counts))


def _values(tree: dict[str, Any], pattern: re.Pattern[str]) -> Iterator[int]:
    for key, value in tree.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from _values(value, pattern)
        elif isinstance(key, str) and pattern.fullmatch(key) and _is_of_integers(value):
            yield from (value if isinstance(value, list | tuple) else [value])
