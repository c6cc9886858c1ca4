"""No model of Transformers has a large weight that is neither quantized nor named.

pytest tests/features/quantized_weights/test_every_model_type.py -m "full or not full"
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from fullshard.checkpoint.pretrained import _replace_linear_layers
from fullshard.checkpoint.quantities import conversion_of, quantize_rest
from fullshard.features.quantized_weights.marks import form_at
from fullshard.features.quantized_weights.quantize import mark_large
from fullshard.features.quantized_weights.scales import outline
from tests.tiny_inputs import trained_class
from tests.tiny_models import class_names, make, model_types, why_not

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")

CHUNKS = 12
UNNAMED = {"small ones", "routers", "embeddings", "left out"}


def models(types: list[str]) -> Iterator[Any]:
    """A model of each type that can be built here, frozen and without memory."""
    for model_type in types:
        name = trained_class(model_type) or next(iter(class_names(model_type)), None)
        if name is not None and why_not(model_type, name) is None:
            with torch.device("meta"):
                yield make(model_type, name).requires_grad_(False)


def check_no_weight_is_silent(
    model: Any, left: dict[str, int], is_reached: Callable[[nn.Module, str], bool], skipped: tuple[str, ...] = ()
) -> None:
    """Large weights are reached, or are tables or routers, or have their names in `left`, with all their elements."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    of_tables: list[Any] = [module for module in model.modules() if module is head or isinstance(module, nn.Embedding)]
    tables = {id(parameter) for module in of_tables for parameter in module.parameters()}
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    seen, named, small = {id(p) for module, name, p in places if is_reached(module, name)}, Counter[str](), 0
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name, kind = f"{path}.{attribute}", type(module).__name__
            is_router = path.endswith(".gate") or "router" in path.split(".") or "router" in kind.lower()
            if parameter.numel() // max(1, *parameter.shape, 1) < 16:
                small += parameter.numel()
            elif not (id(parameter) in tables or "embed" in attribute or is_router or path.endswith(skipped)):
                assert not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)), name
                assert "experts" not in path or "bias" in attribute, name
                named[f"{kind}.{attribute}"] += parameter.numel()
    assert {what: numel for what, numel in left.items() if what not in UNNAMED} == named
    assert left.get("small ones", 0) <= small


def check_at_rest(model: Any) -> set[str]:
    found = mark_large(model, "nf4")
    check_no_weight_is_silent(model, found.left, lambda module, name: bool(form_at(module, name)))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert sum(found.marked.values()) + sum(found.left.values()) == whole
    assert all(f"{what} " in str(found) for what in found.left)
    return set(found.marked)


def check_beside_layers(model: Any) -> None:
    """With the layers of bitsandbytes, as `BitsAndBytesConfig` has them."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    config: Any = BitsAndBytesConfig(load_in_4bit=True)
    _replace_linear_layers(model, config)
    outline(model)
    quantize_rest(model, freezes=True)
    found = conversion_of(model)
    assert found.converted + found.at_rest + found.whole == whole and sum(found.left.values()) == found.whole

    def is_reached(module: nn.Module, name: str) -> bool:
        return bool(form_at(module, name)) or (type(module).__name__ == "Linear4bit" and name == "weight")

    check_no_weight_is_silent(model, found.left, is_reached, tuple(config.llm_int8_skip_modules or ()))
    assert all(f"{what} " in found.said for what in found.left)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_large_weight_is_quantized_or_named(chunk: int) -> None:
    for model in models(model_types()[chunk::CHUNKS]):
        other = copy.deepcopy(model)
        if check_at_rest(model) - {"linear layers"}:
            check_beside_layers(other)


def test_large_weights_of_odd_kinds_are_quantized_or_named() -> None:
    for model in models(["dbrx", "gpt_oss", "siglip", "encodec"]):
        check_at_rest(model)
