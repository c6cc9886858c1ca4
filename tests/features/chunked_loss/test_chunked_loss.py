"""The loss of some tokens at a time against the loss of whole logits: numbers, memory, and what is refused.

pytest tests/features/chunked_loss/test_chunked_loss.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fullshard.core.errors import ConfigError, WrapError
from fullshard.features import MixedPrecisionPolicy, shard_model
from fullshard.features.chunked_loss import chunked_cross_entropy, use_chunked_loss
from fullshard.features.unit_selection import unit_modules
from fullshard.recipes.arguments import TrainArguments
from tests.differential import BFLOAT16_TOLERANCE, TOLERANCE, rounding
from tests.distributed import run_ranks
from tests.memory import PeakGrowth
from tests.trainers import arguments, build, close, result, samples, trainer
from tests.traps import rank_and_size, sharded_parameters


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    labels[0, :4] = -100
    return labels


# -- the function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_and_its_gradients(tokens: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    labels = torch.randint(33, (16,))
    labels[3:6] = -100
    values = [torch.randn(16, 8), torch.randn(33, 8), torch.randn(33)][: 2 + bias]
    mine, plain = ([v.to(dtype).requires_grad_() for v in values] for _ in range(2))
    loss = chunked_cross_entropy(mine[0], mine[1], mine[2] if bias else None, labels, tokens=tokens)
    logits = functional.linear(plain[0], plain[1], plain[2] if bias else None)
    expected = functional.cross_entropy(logits.float(), labels, reduction="sum")
    for total in (loss, expected):
        (total * 3.0).backward()
    tolerance = rounding(torch.float32, 8 + 33 + 16) if dtype is torch.float32 else rounding(dtype, 1)  # terms of a sum
    assert relative(loss.detach(), expected.detach()) <= tolerance
    if tokens >= 16:
        assert torch.equal(loss, expected)
    for found, reference in zip(mine, plain, strict=True):
        assert found.grad is not None
        assert reference.grad is not None
        assert found.grad.dtype == dtype
        assert relative(found.grad.float(), reference.grad.float()) <= tolerance


def test_no_targets_and_frozen_weights() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    loss = chunked_cross_entropy(hidden, weight, None, torch.full((4,), -100), tokens=2)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is None


# -- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "tied", "experts"])
@pytest.mark.parametrize("count", [None, 30, torch.tensor(30)], ids=["mean", "number", "tensor"])
def test_models(family: str, count: Any) -> None:
    plain = build(family)
    plain.config.output_router_logits = family == "experts"  # adds the router's loss
    model = copy.deepcopy(plain)
    use_chunked_loss(model, tokens=5)
    ids = torch.randint(97, (2, 12))
    options = {} if count is None else {"num_items_in_batch": count}
    outputs = [m(input_ids=ids, labels=labels_of(ids), use_cache=False, **options) for m in (plain, model)]
    assert relative(outputs[1].loss.detach(), outputs[0].loss.detach()) <= TOLERANCE
    assert outputs[1].logits is None
    for output in outputs:
        output.loss.backward()
    for (name, found), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative(found.grad, reference.grad) <= TOLERANCE, name
    assert torch.equal(model(ids).logits, plain(ids).logits)  # without labels there are logits
    assert torch.equal(copy.deepcopy(model)(ids, labels=ids).loss, model(ids, labels=ids).loss)


def train(
    chunk: int | None, family: str, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of some steps of two micro-batches, normalized by the tokens of all ranks, and the last gradients."""
    model = build(family)
    units = unit_modules(model)
    if options.pop("head_alone", False):
        units = [*units, model.lm_head]
    if chunk is not None:
        use_chunked_loss(model, tokens=chunk)
    shard_model(model, unit_modules=units, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * step + rank_and_size()[0])
        for _ in range(2):
            ids = torch.randint(97, (2, 9), generator=generator)
            loss = model(input_ids=ids, labels=labels_of(ids), num_items_in_batch=24, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    named = sharded_parameters(model).items()
    return losses, {name: p.grad.full_tensor() for name, p in named if p.grad is not None}


def check(family: str, options: dict[str, Any], tolerance: float) -> None:
    (plain, expected), (losses, found) = (train(chunk, family, dict(options)) for chunk in (None, 5))
    assert max(relative(a, b) for a, b in zip(losses, plain, strict=True)) <= tolerance
    assert found.keys() == expected.keys()
    worst = {name: relative(found[name], expected[name]) for name in expected}
    assert max(worst.values()) <= tolerance, worst


def test_a_head_that_is_a_unit() -> None:
    check("llama", {"head_alone": True}, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("tied", {"strategy": "SHARD_GRAD_OP"}),
        ("llama", {"head_alone": True}),
        ("tied", {"strategy": "NO_SHARD"}),
    ],
    ids=str,
)
def test_sharded_models(family: str, options: dict[str, Any]) -> None:
    """Steps feed rounding back, hence ten times what one backward may differ by."""
    run_ranks(check, 2, family, options, TOLERANCE)


@pytest.mark.full
def test_half_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(check, 2, "llama", {"mp_policy": policy}, BFLOAT16_TOLERANCE)


def under_trainer(output: str, chunk: int | None) -> Any:
    model = build()
    if chunk is not None:
        use_chunked_loss(model, tokens=chunk)
    made = trainer(model, arguments(output, gradient_accumulation_steps=2, bf16=chunk == 3), eval_dataset=samples(8))
    made.train()
    return result(made)["losses"], made.evaluate()["eval_loss"]


@pytest.mark.full
def test_transformers_trainer(tmp_path: Path) -> None:
    """Its columns, its count of tokens, its evaluation; in bfloat16 by autocast, too."""
    plain, chunked, half = (run_ranks(under_trainer, 2, str(tmp_path), chunk)[0] for chunk in (None, 5, 3))
    assert close(chunked[0], plain[0])
    assert chunked[1] == pytest.approx(plain[1], rel=TOLERANCE)
    assert close(half[0], plain[0], 2e-2)


# -- memory -----------------------------------------------------------------------------------------------------


def peak(chunk: int | None, tokens: int) -> tuple[int, float]:
    """Most that a step takes besides what was there before it, in bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50_000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )
    if chunk is not None:
        use_chunked_loss(model, tokens=chunk)
    shard_model(model, unit_modules=unit_modules(model))
    ids = torch.randint(50_000, (1, tokens))
    for _ in range(2):  # the first makes the buffers that stay
        with PeakGrowth() as memory:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        model.zero_grad()
    return memory.nbytes, loss.item()


@pytest.mark.full
def test_what_it_saves_of_a_vocabulary_of_50_000() -> None:
    """1,024 tokens: 205 MB for each whole copy of the logits in float32; the plain loss holds three at once.

    Of what is left without them, 51 MB are gradients: 26 MB as they are collected, and as many that are kept.
    """
    tokens, copy_nbytes = 1024, 4 * 1024 * 50_000
    (plain, loss), (chunked, same) = (run_ranks(peak, 1, chunk, tokens)[0] for chunk in (None, 64))
    print(f"peak of a step: whole logits {plain / 1e6:.0f} MB, 64 tokens at a time {chunked / 1e6:.0f} MB")
    assert same == pytest.approx(loss, rel=TOLERANCE)
    assert plain >= 2.5 * copy_nbytes
    assert chunked <= plain / 5


# -- refusals ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    ids = torch.randint(97, (1, 6))
    gemma = build("gemma")  # squashes its logits
    use_chunked_loss(gemma, tokens=4)
    with pytest.raises(WrapError, match="changes the logits"):
        gemma(input_ids=ids, labels=ids)
    assert gemma(input_ids=ids).logits.shape == (1, 6, 97)

    model = build()
    with pytest.raises(WrapError, match="chunk size is 0"):
        use_chunked_loss(model, tokens=0)
    use_chunked_loss(model, tokens=4)
    with pytest.raises(WrapError, match="already computes its loss in chunks"):
        use_chunked_loss(model, tokens=4)
    with pytest.raises(WrapError, match="6 labels, but the head received 2 tokens"):
        model(input_ids=ids, labels=ids, logits_to_keep=2)
    model.lm_head = nn.Linear(32, 97)
    with pytest.raises(WrapError, match="did not call its original head"):
        model(input_ids=ids, labels=ids)

    small = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(WrapError, match="no output embeddings"):
        use_chunked_loss(LlamaForSequenceClassification(small), tokens=4)
    own = build()
    own.loss_function = functional.cross_entropy
    with pytest.raises(WrapError, match="expected that of a causal language model"):
        use_chunked_loss(own, tokens=4)
    adapted = build()
    adapted.lm_head = type("Lora", (nn.Linear,), {})(32, 97)
    with pytest.raises(WrapError, match="not a plain linear layer"):
        use_chunked_loss(adapted, tokens=4)
    with pytest.raises(ConfigError, match="part of the compiled graph"):
        TrainArguments.of({"loss_chunk": 64, "compile": True, "wrap": "none"})
