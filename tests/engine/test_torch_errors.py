"""What torch's `fully_shard` refuses, and this one: errors of classes and in words that code written for torch knows.

pytest tests/engine/test_torch_errors.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard.core.errors import FullshardError
from fullshard.core.user_class import user_class
from tests.distributed import end_workers, run_ranks

Apply = Callable[..., Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def twice(apply: Apply) -> None:
    apply(apply(net()))


def container(apply: Apply) -> None:
    apply(nn.ModuleList([nn.Linear(4, 4)]))


def copied(apply: Apply) -> None:
    copy.deepcopy(apply(net()))


def three_axes(apply: Apply) -> None:
    apply(net(), mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")))


def no_such_dim(apply: Apply) -> None:
    apply(net(), shard_placement_fn=lambda parameter: Shard(1))


def stream_between_replicas(apply: Apply) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    apply(net(), mesh=mesh).set_all_reduce_hook(print, stream=torch.cpu.Stream())


def on_meta(apply: Apply) -> None:
    with torch.device("meta"):
        model = net()
    for module in (*model, model):
        apply(module)
    model(torch.ones(1, 4))


# What of torch's words is expected; what is not here follows where this engine's layout differs.
REFUSED: dict[Callable[[Apply], None], str] = {
    twice: "Each distinct composable distributed API can only be applied to a module once.",
    container: "fully_shard does not support containers that do not implement forward",
    copied: "FSDP does not support deepcopy",
    three_axes: "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
    no_such_dim: "Shard dim 1 is invalid for 1D tensor",
    stream_between_replicas: "stream cannot be set when using native HSDP",
    on_meta: "FSDP parameters should be materialized from meta device before training, but the following were still on "
    "meta device: ['0.weight', '0.bias']",
}


def check_refused() -> None:
    for misuse, words in REFUSED.items():
        with pytest.raises(Exception, match="") as theirs:
            misuse(torchs.fully_shard)
        with pytest.raises(FullshardError) as ours:
            misuse(fullshard.fully_shard)
        assert isinstance(ours.value, theirs.type), misuse
        assert words in str(theirs.value) and words in str(ours.value), (str(theirs.value), str(ours.value))
    assert str(theirs.value) != str(ours.value)  # the other has a hint


def check_classes() -> None:
    for apply, mixin in ((torchs.fully_shard, torchs.FSDPModule), (fullshard.fully_shard, fullshard.FSDPModule)):
        model = net()
        apply(model[0])
        apply(model)
        assert [type(m).__name__ for m in model.modules()] == ["FSDPSequential", "FSDPLinear", "Linear"]
        part = model[:1]
        assert type(part) is nn.Sequential and not isinstance(part, mixin) and part[0] is model[0]
    assert [user_class(m) for m in model.modules()] == [nn.Sequential, nn.Linear, nn.Linear]
    # Where the whole model is sharded at once, names stay: Transformers and PEFT look layers and models up by them.
    whole = fullshard.shard_model(net(), unit_modules=[])
    assert type(whole).__name__ == "Sequential" and type(whole[:1]) is nn.Sequential


def test_errors_are_those_that_torch_raises() -> None:
    end_workers()
    run_ranks(check_refused, 2)


def test_classes_are_named_as_torchs() -> None:
    run_ranks(check_classes, 2)
