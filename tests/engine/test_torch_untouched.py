"""Importing fullshard leaves torch as it was; the first thing that is sharded puts the engine's functions in place.

pytest tests/engine/test_torch_untouched.py
"""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from fullshard.core.imports import Replaced, replace
from fullshard.features import ShardedTensor, fully_shard, repoint
from fullshard.features.torch_tools import torch_private
from tests.distributed import run_ranks

SEE = """
import sys, types
import torch
import torch.distributed.tensor, torch.nn.utils, torch.optim.optimizer, torch.utils._foreach_utils
import torch.distributed._state_dict_utils

def torch_as_it_is():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for holder in (module, *(v for v in list(vars(module).values()) if isinstance(v, type))):
            for key, value in list(vars(holder).items()):
                is_count = isinstance(value, (dict, list)) and ("hooks" in key or "supported_types" in key)
                if callable(value) or is_count:
                    seen[name, getattr(holder, "__qualname__", ""), key] = (id(value), len(value) if is_count else 0)
    return seen

def changed(before):
    now = torch_as_it_is()
    return sorted(".".join(key) for key in before if now.get(key) != before[key])
"""

IMPORTED = f"""{SEE}
import torch.distributed.fsdp, torch.distributed.checkpoint, torch.utils.data, torch.distributed.device_mesh
before = torch_as_it_is()
import fullshard
for name in fullshard.__all__:
    getattr(fullshard, name)
import fullshard.features.steps_in_backward.stepper, fullshard.checkpoint.offline
print(*changed(before))
"""

SHARDED = f"""{SEE}
from torch.nn.utils import get_total_norm
before = torch_as_it_is()
import fullshard
fullshard.fully_shard(torch.nn.Linear(2, 2))
first = changed(before)
own = get_total_norm
again = torch_as_it_is()
fullshard.fully_shard(torch.nn.Linear(2, 2))
assert changed(again) == [], changed(again)
assert own is torch.nn.utils.get_total_norm and own.__module__ == "fullshard.features.torch_tools.install"
print(*first)
"""


def run_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_leaves_torch_alone() -> None:
    assert run_python(IMPORTED) == []


def test_the_first_thing_sharded_puts_them_in_place_and_the_second_changes_nothing() -> None:
    changed = run_python(SHARDED)
    for place in (
        "torch.nn.utils.clip_grad._get_total_norm",
        "torch.nn.utils.get_total_norm",
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        "torch.optim.optimizer.Optimizer.state_dict",
        "torch.optim.optimizer.Optimizer.load_state_dict",
        "torch.distributed.tensor._api.distribute_tensor",
        "torch.distributed._state_dict_utils.distribute_tensor",
        "torch.distributed.tensor._api.distribute_tensor",
        "torch.distributed._state_dict_utils.distribute_tensor",
        "torch.distributed.tensor._api.DTensor.redistribute",
        "torch.distributed.tensor._api.DTensor.from_local",
        "torch.distributed.tensor._api._dtensor_init_helper",
        "torch.distributed.distributed_c10d._check_single_tensor",
        "torch.distributed.distributed_c10d._check_tensor_list",
        "torch.autograd._engine_run_backward",
        "torch.optim.optimizer._foreach_supported_types",
        "torch.utils._foreach_utils._foreach_supported_types",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.nn.modules.module._global_parameter_registration_hooks",
        "torch.nn.modules.module._global_module_registration_hooks",
    ):
        assert any(name.replace("..", ".") == place for name in changed), f"{place} is as it was: {changed}"


def check_made_before() -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert torch.nn.utils.clip_grad._get_total_norm is torch_private.total_norm.torchs, "something was sharded before"
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 5), nn.Linear(3, 5)
    reference.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stays_plain = nn.Parameter(torch.ones(2))
    stays_plain.grad = torch.ones(2)
    plain_optimizer = torch.optim.AdamW([stays_plain])
    plain_optimizer.step()
    reference.load_state_dict(model.state_dict())

    fully_shard(model)
    repoint(optimizer, model)
    assert all(isinstance(value, ShardedTensor) for value in optimizer.state[model.weight].values() if value.dim())
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    reference(torch.full((2, 3), (size + 1) / 2)).sum().backward()
    norm: Any = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(
        norm.full_tensor(), get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    )
    before = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    scaler.scale(torch.zeros(()))
    if rank == 0:
        parameters: Any = model.parameters()
        gradient = next(p.local_grad for p in parameters if p.interval.numel)
        assert gradient is not None
        gradient[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0, "an overflow on one rank was not every rank's"
    for parameter, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), was, rtol=0.0, atol=0.0)  # type: ignore[attr-defined]


def test_what_was_there_before_is_protected_too() -> None:
    """A loss scaler and an optimizer that has stepped, both from before the sharding."""
    run_ranks(check_made_before, 2)


def test_a_function_is_replaced_wherever_it_was_imported() -> None:
    def first() -> None: ...

    def second() -> None: ...

    owner, other = ModuleType("owner"), ModuleType("other")
    owner.function = other.renamed = first  # type: ignore[attr-defined]
    sys.modules["a_module_that_imported_it"] = other
    try:
        replace({Replaced.of(owner, "function"): second})
    finally:
        del sys.modules["a_module_that_imported_it"]
    assert owner.function is other.renamed is second
