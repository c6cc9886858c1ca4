"""Private torch names that only this feature uses, in addition to `comm.torch_private`; see that module."""

from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api
from torch.nn.utils import clip_grad

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file
from fullshard.core.imports import Replaced


def let_dtensors_compute() -> None:
    """Make torch call the `__torch_dispatch__` of DTensor subclasses, as 2.13 does. Since torch 2.6."""
    find = GenericTorchDispatchRuleHolder.find
    if not "2.10" <= torch.__version__ < "2.13" or hasattr(find, "__wrapped__"):
        return

    @cache
    def is_own(kind: type) -> bool:
        return issubclass(kind, DTensor) and kind.__torch_dispatch__.__func__ is not DTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def rule(kind: Any, *given: Any) -> Any:
        return kind.__torch_dispatch__(*given)

    @wraps(find)
    def find_own(self: GenericTorchDispatchRuleHolder, kind: type) -> Callable[..., Any] | None:
        return rule if is_own(kind) else find(self, kind)

    GenericTorchDispatchRuleHolder.find = find_own  # type: ignore[method-assign, assignment]


zero_grad = Replaced.of(torch.optim.Optimizer, "zero_grad")
"""It reads each `.grad` before dropping it, which would wrap sharded gradients as DTensors. Since torch 2.0."""

total_norm = Replaced.of(clip_grad, "_get_total_norm")
"""Called by `torch.nn.utils.clip_grad_norm_` and `get_total_norm`; it would return a local norm. Since torch 2.6."""

unscale = Replaced.of(torch.amp.GradScaler, "_unscale_grads_")
"""Called by `GradScaler`; on an overflow only one rank would skip the step. Since torch 2.3."""

check_sent = Replaced.of(distributed_c10d, "_check_single_tensor")
check_sent_list = Replaced.of(distributed_c10d, "_check_tensor_list")
"""Called with the tensors of a collective, to which every rank would pass different elements. Since torch 2.0."""

distribute_tensor = Replaced.of(state_dict_utils, "distribute_tensor")
"""Public. It supports only torch's own placements, also when a sharded model loads a tensor. Since torch 2.0."""

redistribute = Replaced.of(DTensor, "redistribute")
from_local = Replaced.of(DTensor, "from_local")
"""Public. It would accept any elements for a placement that it does not support. Since torch 2.0."""

make_dtensor = Replaced.of(tensor_api, "_dtensor_init_helper")
"""Called by `torch.distributed.tensor.zeros`, `ones`, `full` etc., with the same effect. Since torch 2.0."""

distribute_tensors = Replaced.of(state_dict_utils, "_distribute_tensors")
"""Shards tensors from rank 0 for a model's state dict, but only along one dim. Since torch 2.5."""

run_backward = Replaced.of(torch.autograd, "_engine_run_backward")
"""Called by `torch.autograd.grad` and `backward`; gradients of sharded parameters would be None. Since torch 2.3."""


def keep_every_box(hf_storage: Any) -> None:
    """Make `HuggingFaceStorageWriter` write all boxes of a tensor if this rank has several of them.

    A file can hold only one tensor of each name, so torch would silently keep only the last box. Here each further box
    of a tensor goes to another file. Since torch 2.8.
    """
    torchs = hf_storage.HuggingFaceStorageWriter._split_by_storage_plan

    def split(writer: Any, storage_plan: dict[str, int] | None, items: list[Any]) -> dict[int, list[Any]]:
        rounds: list[list[Any]] = []  # the first box of each tensor, then the second, ...
        found: Counter[str] = Counter()
        for item in items:
            if found[item.index.fqn] == len(rounds):
                rounds.append([])
            rounds[found[item.index.fqn]].append(item)
            found[item.index.fqn] += 1
        files = max(storage_plan.values()) if storage_plan else 1
        return {
            index + number * files: of_file
            for number, of_round in enumerate(rounds)
            for index, of_file in torchs(writer, storage_plan, of_round).items()
        }

    hf_storage.HuggingFaceStorageWriter._split_by_storage_plan = split
