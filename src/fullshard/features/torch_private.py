"""The private names of torch that features and layers above use, beside those of `comm.torch_private`; see there."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import _api as tensor_api
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from fullshard.comm.torch_private import *  # noqa: F403 -- the kernel's names, for who has this file
from fullshard.comm.torch_private import Kernel, set_versions

# -- autograd ---------------------------------------------------------------------------------------------------

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of holders of a storage, by its `storage_id`. Without it, memory that forward still computes with would be
sent to the host. Since 2.8."""


def are_saved_elsewhere() -> bool:
    """Return whether `saved_tensors_hooks` are active here: a checkpoint has its own. Since 2.8."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# -- tensors of another kind ------------------------------------------------------------------------------------


def takes_plain_as_replicated() -> bool:
    """Return whether torch's public `implicit_replication()` is active, which no public function tells. Since 2.5."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


norm_partial: Callable[[float], Placement] = _NormPartial
"""The placement of a norm: every rank has the norm of its own elements. Since 2.2."""


def writes(kernel: Kernel) -> bool:
    """Return whether a kernel changes its arguments. Since 2.0."""
    return bool(kernel._schema.is_mutable)


@cache
def written(kernel: Kernel) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that a kernel changes. Since 2.0."""
    arguments = enumerate(kernel._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, torch calls no `__torch_function__` of a subclass. Since 2.0."""


def is_view(kernel: Kernel) -> bool:
    """Return whether a kernel returns memory that it was given. Since 2.0."""
    return not kernel._schema.is_mutable and any(value.alias_info is not None for value in kernel._schema.returns)


COPY_KERNELS = frozenset({"_to_copy"})
MANY_KERNELS = ("_foreach_", "_fused_", "_amp_foreach_")
ITEM, MAX_OF_MANY, NORM_OF_MANY = "_local_scalar_dense", "_foreach_max", "_foreach_norm"
"""How the kernel of `to()` is called, how those begin that take lists of tensors, the kernel of `item()`, and the
reductions of lists. Under other names they would be run on gathered tensors, which is slow, or as if they treated
elements alike, which is an error. Since 2.5."""


def let_dtensors_compute() -> None:
    """Have torch call the `__torch_dispatch__` of subclasses of DTensor.

    From 2.13 on it does. 2.10 to 2.12 compute with every DTensor as with one of torch's own, unless a rule is
    registered for its type. Since 2.6.
    """
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


def groups_of(placement: Placement) -> tuple[int, int] | None:
    """Return dim and number of groups if a placement cuts each of several groups along a dim; else None. Since 2.6."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rows_of_chunks(chunks: int) -> Placement:
    """Return the placement of rows that `Shard(0)` over another axis, of `chunks` ranks, has left here. Since 2.6."""
    return _StridedShard(0, split_factor=chunks)


def set_local(dtensor: DTensor, other: DTensor) -> None:
    """Make a DTensor what another is, in place: torch's `.data` leaves behind the part that is in Python. Since 2.0."""
    dtensor.data = other
    dtensor._local_tensor, dtensor._spec = other._local_tensor, other._spec


@contextmanager
def version_kept(tensor: torch.Tensor) -> Iterator[None]:
    """Keep a tensor's version while the block works on it: torch counts a change, but no value changes. Since 2.7."""
    version = tensor._version
    try:
        yield
    finally:
        set_versions((tensor,), (version,))


parse_to = torch._C._nn._parse_to
"""Device and dtype in the arguments of a `to()`. Without it bitsandbytes would quantise twice. Since 2.0."""


step_pre_hooks: Callable[[torch.optim.Optimizer], Mapping[int, object]] = attrgetter("_optimizer_step_pre_hooks")
"""The hooks that run before an optimizer's step: one of them steps in backward, and no other may. Since 2.0."""


# -- compiled code ----------------------------------------------------------------------------------------------


def mark_fully_sharded(module: nn.Module) -> None:
    """Have torch's composable functions, `replicate` among them, leave its parameters alone. Since 2.0."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def leave_state(module: nn.Module, state: object) -> None:
    """Have `fully_shard.state(module)` of torch's own give `state`. Since 2.6.

    Its pipeline schedules take that, to have gradients reduced once a step's backwards are over. It would be None.
    """
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state


# -- modules, optimizers, loaders -------------------------------------------------------------------------------

non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that are in no state dict, and so in no checkpoint. Since 2.0."""

HOOK_NAMES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""How the attributes of a module end that hold its hooks, which a copy for merging must not run. Since 2.1."""

_FOREACH_TYPES: tuple[list[Any], ...] = (
    torch_optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Have optimizers update tensors of `kind` many at a time, as torch does for its own DTensor. Since 2.4."""
    for kinds in _FOREACH_TYPES:
        if kind not in kinds:
            kinds.append(kind)


# -- functions that the engine puts its own in the place of ------------------------------------------------------


@dataclass(eq=False, slots=True)
class Replaced:
    """A function of torch that `features.torch_tools` replaces, because torch offers no hook there.

    Attributes:
        owner: the module or class it is in.
        name: its name there.
        torchs: torch's own.
    """

    owner: Any
    name: str
    torchs: Callable[..., Any]

    @classmethod
    def of(cls, owner: Any, name: str) -> Replaced:
        """Return a record of the function as it is now."""
        return cls(owner, name, getattr(owner, name))


state_dict = Replaced.of(torch.optim.Optimizer, "state_dict")
load_state_dict = Replaced.of(torch.optim.Optimizer, "load_state_dict")
"""Public, and replaced all the same: torch's hooks for it are set per optimizer, and a script hands none to the engine.
Since 2.0."""

zero_grad = Replaced.of(torch.optim.Optimizer, "zero_grad")
"""Looks at each `.grad` before it drops it: sharded ones would be made DTensors for that alone. Since 2.0."""

total_norm = Replaced.of(clip_grad, "_get_total_norm")
"""Under `torch.nn.utils.clip_grad_norm_` and `get_total_norm`, which would take each rank's own norm. Since 2.6."""

unscale = Replaced.of(torch.amp.GradScaler, "_unscale_grads_")
"""Under `GradScaler`, whose step one rank alone would leave out on an overflow. Since 2.3."""

check_sent = Replaced.of(distributed_c10d, "_check_single_tensor")
check_sent_list = Replaced.of(distributed_c10d, "_check_tensor_list")
"""Called with the tensors of a collective, in which every rank would give other elements. Since 2.0."""

distribute_tensor = Replaced.of(state_dict_utils, "distribute_tensor")
"""Public. It, and so loading whole tensors into a sharded model, knows torch's own placements only. Since 2.0."""

redistribute = Replaced.of(DTensor, "redistribute")
from_local = Replaced.of(DTensor, "from_local")
"""Public. Given a placement that it does not know, it labels whatever elements it has with it. Since 2.0."""

make_dtensor = Replaced.of(tensor_api, "_dtensor_init_helper")
"""Under `torch.distributed.tensor.zeros`, `ones`, `full` and the like, which do the same. Since 2.0."""

distribute_tensors = Replaced.of(state_dict_utils, "_distribute_tensors")
"""The function that cuts whole tensors from rank 0 for a model's state dict: along one dim. Since 2.5."""

run_backward = Replaced.of(torch.autograd, "_engine_run_backward")
"""Under `torch.autograd.grad` and `backward`, where a sharded parameter's gradient would be None. Since 2.3."""


def keep_every_box(hf_storage: Any) -> None:
    """Have `HuggingFaceStorageWriter` put this rank's part of a tensor, if it is several boxes, into several files.

    A file holds one tensor of a name, so torch would silently keep the last box alone. Since 2.8.
    """
    torchs = hf_storage.HuggingFaceStorageWriter._split_by_storage_plan

    def split(writer: Any, storage_plan: dict[str, int] | None, items: list[Any]) -> dict[int, list[Any]]:
        rounds: list[list[Any]] = []  # of each tensor the first box, the second one, ...
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


def replace(functions: Mapping[Replaced, Callable[..., Any]]) -> None:
    """Put each function in its place, and wherever a module has imported torch's by name."""
    for place, function in functions.items():
        setattr(place.owner, place.name, function)
    new = {id(place.torchs): function for place, function in functions.items()}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if id(value) in new:
                setattr(module, name, new[id(value)])


def redirect(place: Replaced, function: Callable[..., Any]) -> None:
    """Have torch's function itself call `function`, for a script that has it in a local name; `torchs` does as it did.

    For one without a closure, as that is not to be changed. `distribute_tensor` has none. Since 2.0.
    """
    old: Any = place.torchs
    own = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__)
    own.__kwdefaults__, old.__signature__ = old.__kwdefaults__, inspect.signature(old)
    old.__code__, old.__defaults__, old.__kwdefaults__ = _call_other.__code__, None, {"_function": function}
    place.torchs = own


def _call_other(*args: Any, _function: Callable[..., Any], **options: Any) -> Any:
    """Stand in for the code of a function that is redirected. Since 2.0."""
    return _function(*args, **options)
