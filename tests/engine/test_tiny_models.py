"""The builder of tiny models: every class of every type is built, or the reason is named.

pytest tests/engine/test_tiny_models.py
"""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import NOT_BUILT, build, class_names, model_types, why_not

CHUNKS = 12


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "LlamaForCausalLM"), ("vit", "ViTModel"), ("t5", "T5Model")]
)
def test_a_model_is_small_and_its_weights_depend_on_the_seed(model_type: str, name: str) -> None:
    first, again, other = (build(model_type, name, seed=seed) for seed in (0, 0, 1))
    assert sum(parameter.numel() for parameter in first.parameters()) < 4_000_000
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_class_is_built_or_the_reason_is_named(chunk: int) -> None:
    for model_type in model_types()[chunk::CHUNKS]:
        for name in class_names(model_type):
            reason = why_not(model_type, name)
            assert reason is None or reason.strip(), (model_type, name)


def test_reasons_are_given_for_types_and_classes_that_exist() -> None:
    known = {name for model_type in model_types() for name in (model_type, *class_names(model_type))}
    assert known >= NOT_BUILT.keys()
