"""What is put into a model after it was sharded: refused at the next forward where nobody would synchronize it.

pytest tests/features/late_registration/test_late_registration.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from fullshard.core.errors import FullshardError, LifecycleError
from fullshard.features import fully_shard, shard_model, unsharded
from tests.distributed import run_ranks
from tests.trainers import build as build_transformer
from tests.trainers import samples
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    run_squared,
)

Change = Callable[[Any], object]


class LowRank(nn.Module):
    """A hand-made adapter around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, WIDTH).double())
        self.b = nn.Parameter(torch.zeros(WIDTH, 2).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y + x @ self.a.T @ self.b.T


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).double()


def new_module(model: Any) -> None:
    model.blocks[1].extra = linear()


def into_a_container(model: Any) -> None:
    model.blocks.append(Block().double())


def deep_inside(model: Any) -> None:
    model.blocks[0].up.extra = nn.Sequential(nn.Identity(), linear())


def replaced_module(model: Any) -> None:
    model.head = nn.Linear(WIDTH, 3).double()


def replaced_unit(model: Any) -> None:
    model.blocks[1] = Block().double()


def new_parameter(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(WIDTH).double())


def registered(model: Any) -> None:
    model.blocks[2].register_parameter("gain", nn.Parameter(torch.ones(WIDTH).double(), requires_grad=False))


def replaced_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(3, WIDTH).double())


def written_past_torch(model: Any) -> None:
    model.head._parameters["weight"] = nn.Parameter(torch.ones(3, WIDTH).double())


def removed_parameter(model: Any) -> None:
    del model.head.bias


def adapter_by_hand(model: Any) -> None:
    model.embed = LowRank(model.embed)


def weight_normed(model: Any) -> None:
    with unsharded(model):
        parametrizations.weight_norm(model.head)


def old_weight_norm(model: Any) -> None:
    with unsharded(model):
        weight_norm(model.head)


def pruned(model: Any) -> None:
    with unsharded(model):
        prune.l1_unstructured(model.head, "weight", amount=2)


def tied_late(model: Any) -> None:
    model.blocks[0].down.bias = model.blocks[1].down.bias


def tied_in_a_new_module(model: Any) -> None:
    model.mirror = nn.Module()
    model.mirror.weight = model.embed.weight


def unit_of_its_own(model: Any) -> None:
    model.blocks[1].extra = fully_shard(linear())


def filled_later(model: Any) -> None:
    model.extra = nn.ModuleDict()
    model(batch(0, 0))
    model.extra["late"] = linear()


def new_name_past_torch(model: Any) -> None:
    model.blocks[1].up._parameters["gain"] = nn.Parameter(torch.ones(WIDTH).double())


def new_module_past_torch(model: Any) -> None:
    model.blocks[1]._modules["extra"] = linear()


def replaced_past_torch(model: Any) -> None:
    model._modules["head"] = nn.Linear(WIDTH, 3).double()


REFUSED: dict[Change, str] = {
    new_module: r"blocks\.1\.extra\.weight of shape \(6, 6\) was added to the model after",
    into_a_container: r"blocks\.3\.scale of shape",
    deep_inside: r"blocks\.0\.up\.extra\.1\.weight",
    replaced_module: r"parameter head\.weight of shape \(3, 6\) was added to",
    replaced_unit: r"blocks\.1\.scale.*it would not be sharded",
    new_parameter: r"parameter gain of",
    registered: r"blocks\.2\.gain",
    replaced_parameter: r"head\.weight was replaced by a Parameter after it was sharded",
    written_past_torch: r"head\.weight was replaced by a Parameter after it was sharded",
    new_name_past_torch: r"blocks\.1\.up\.gain of shape \(6,\) was added to the model after",
    new_module_past_torch: r"blocks\.1\.extra\.weight",
    replaced_past_torch: r"parameter head\.weight of shape \(3, 6\) was added to",
    removed_parameter: r"head\.bias was replaced by a NoneType after it was sharded",
    adapter_by_hand: r"embed\.a of shape \(2, 6\)",
    tied_late: r"blocks\.0\.down\.bias was replaced by a ShardedParameter after it was sharded",
    tied_in_a_new_module: r"mirror\.weight.*now tied to embed\.weight",
    unit_of_its_own: r"blocks\.1\.extra\.weight.*its unit was created after",
    filled_later: r"extra\.late\.weight",
    weight_normed: r"head\.(parametrizations|weight)",
    old_weight_norm: r"head\.(weight_g|weight)",
    pruned: r"head\.(weight_orig|weight)",
}


def refuse(change: Change, message: str, has_run: bool) -> None:
    model = build_sharded(Stack, BLOCKS)
    if has_run:
        run_squared(model, 0, 0)
    with pytest.raises(FullshardError, match=message):
        change(model)
        run_squared(model, 1, 0)


@pytest.mark.parametrize("has_run", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("change", REFUSED)
def test_what_nobody_would_synchronize_is_refused(change: Change, has_run: bool) -> None:
    run_ranks(refuse, 2, change, REFUSED[change], has_run)


def give_a_bias_late() -> None:
    """To a layer that was made without one: neither the number of parameters nor any module is another."""
    model = build(Stack)
    inner: Any = model.get_submodule("blocks.1.up")
    inner.register_parameter("gain", None)
    shard_model(model, unit_modules=[model.get_submodule(name) for name in BLOCKS])
    run_squared(model, 0, 0)
    inner.gain = nn.Parameter(torch.ones(WIDTH).double())
    with pytest.raises(LifecycleError, match=r"blocks\.1\.up\.gain of shape \(6,\) was added to the model after"):
        run_squared(model, 1, 0)


def test_what_is_put_where_none_was_is_refused() -> None:
    run_ranks(give_a_bias_late, 2)


def wrapped(model: Any) -> None:
    model.head = nn.Sequential(model.head)


def without_parameters(model: Any) -> None:
    model.blocks.append(Double())


def fewer_layers(model: Any) -> None:
    del model.blocks[1]


def another_order(model: Any) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def train_on(change: Change) -> None:
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    names = [name for name, _ in plain.named_parameters()]
    for one in (model, plain):
        run_squared(one, 0, 0)
        change(one)
        for parameter in one.parameters():
            parameter.grad = None
    assert (change is wrapped) == ([name for name, _ in plain.named_parameters()][-1] != names[-1])
    assert_trains_alike(model, plain, run_squared, steps=2)


@pytest.mark.parametrize("change", [wrapped, without_parameters, fewer_layers, another_order])
def test_what_brings_no_parameter_is_fine(change: Change) -> None:
    run_ranks(train_on, 2, change)


def late_changes_of_transformers() -> None:
    from peft import LoraConfig, get_peft_model

    from fullshard import Accelerator

    ids = samples(1)[0]["input_ids"][None]
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(build_transformer("llama"))
    rows = model.config.vocab_size
    model.tie_weights()
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(LifecycleError, match=rf"resize_token_embeddings\({rows + 8}\) was called on .* sharded"):
        model.resize_token_embeddings(rows + 8)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(LifecycleError, match=r"q_proj\.lora_A.* was added to the model after it was sharded"):
        adapted(input_ids=ids, labels=ids)


def test_resized_or_adapted_too_late() -> None:
    run_ranks(late_changes_of_transformers, 2)
