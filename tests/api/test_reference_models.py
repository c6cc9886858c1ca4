"""Reference models: what other libraries shard for an Accelerator comes to its engine, whatever was imported first.

pytest tests/api/test_reference_models.py
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard.api import Accelerator
from fullshard.features import FSDPModule

FUNCTIONS = [("accelerate.utils.fsdp_utils", "fsdp2_prepare_model"), ("trl.models.utils", "prepare_fsdp")]


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for home, name in FUNCTIONS:
        function = getattr(importlib.import_module(home), name)
        monkeypatch.setattr(sys.modules[home], name, getattr(function, "__wrapped__", function))


@pytest.mark.parametrize(("home", "name"), FUNCTIONS)
@pytest.mark.parametrize("order", ["before the Accelerator", "after it", "after a second one"])
def test_a_reference_model_comes_to_this_engine(
    home: str, name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = ModuleType("holder")  # of a trainer that imported the function under a name of its own
    monkeypatch.setitem(sys.modules, "holder", holder)
    found = sys.modules[home]
    if order.startswith("after"):
        monkeypatch.delitem(sys.modules, home)
    else:
        holder.shard = getattr(found, name)  # type: ignore[attr-defined]
    accelerator = Accelerator(cpu=True)
    if order.endswith("second one"):
        accelerator = Accelerator(cpu=True)
    if order.startswith("after"):  # as a trainer's module, which goes on to prepare its model
        monkeypatch.setitem(sys.modules, home, found)
        holder.shard = getattr(found, name)  # type: ignore[attr-defined]
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert holder.shard is getattr(found, name)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    arguments = {"accelerator": accelerator, "model": model}
    prepared = holder.shard(**arguments) if name == "prepare_fsdp" else holder.shard(accelerator, model)
    assert prepared is model
    assert isinstance(prepared, FSDPModule)
    assert prepared.training == (name != "prepare_fsdp"), "TRL's is for inference alone"
    assert prepared(torch.ones(1, 2)).shape == (1, 2)


def test_another_librarys_accelerator_keeps_its_own_function() -> None:
    theirs = importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    Accelerator(cpu=True)
    ours = importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    assert ours is not theirs
    with pytest.raises(AttributeError, match="fsdp_plugin"):
        ours(SimpleNamespace(state=SimpleNamespace()), nn.Linear(2, 2))
