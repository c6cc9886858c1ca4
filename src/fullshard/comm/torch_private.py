"""All private names of torch that fullshard uses, except those of torch's launcher (`launch.torch_private`).

No third file has one; `tests/test_architecture` ensures that. torch may rename any of these in any release without
notice. So each entry says its purpose, what goes wrong if torch changes it, and since which release torch has it
("2.0" is the oldest that was examined). `tests/test_torch_private` uses each of them for just that purpose, and fails
with its name.

They are in this layer because it is the lowest that may import torch, and every layer above it needs some.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from operator import attrgetter, methodcaller
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, _op_schema
from torch.distributed.tensor import _api as tensor_api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree

from fullshard.core.boxes import strides_of

if TYPE_CHECKING:
    from torch.autograd.graph import Node

SEMI_PUBLIC = frozenset({"_base", "_buffers", "_modules", "_parameters", "_version"})
"""Names with an underscore that every file may use. `Tensor._base` and `_version` are in torch's notes on autograd; the
others are the dictionaries of a module, which all libraries read and torch pickles. Nothing public puts
another object into a module without the hooks that `setattr` calls."""

OVERRIDDEN: Mapping[str, frozenset[str]] = {
    "torch.nn.Module": frozenset({"_apply", "_replicate_for_data_parallel"}),
    "torch.distributed.fsdp.FSDPModule": frozenset({"_get_fsdp_state"}),
}
"""Methods that torch calls and that a class of fullshard replaces: the methods of `FSDPModule` by which a sharded model
refuses to be moved, cast or replicated, and all that ask for the state of torch's engine. If torch renamed them, it
would not call the replacements any more. Since 2.0."""

# -- autograd ---------------------------------------------------------------------------------------------------

backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the innermost backward that autograd is in; -1 outside of any. Without it a forward could not tell
whether it is a recomputation. Since 2.0."""


next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of autograd's graph gets: backward comes to higher ones first. Without it the engine
could not tell which forwards began after a checkpoint. Since 2.0."""


number_of: Callable[[Node], int] = methodcaller("_sequence_nr")
"""A node's number. Without it the engine could not tell which nodes cannot lead to an output of theirs. Since 2.1."""


def node_under_way() -> int | None:
    """Return the number of the node that backward is at, in this thread; None outside of any.

    Without it a recomputation could not tell how much of backward lies before it. Since 2.1.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else number_of(node)


def will_run(node: Node) -> bool | None:
    """Return whether the backward under way comes to a node; None: `torch.autograd.grad` returns what comes there.

    Without it a gradient that the caller asked for would be collected as well. Since 2.0.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets how often tensors were changed. Filling the unsharded parameters again must not count, or backward refuses what
it saved. Since 2.7 for several tensors."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The storage's address: the same for all tensors that share it, even while it has no memory, when `data_ptr` is 0.
Without it views could not be told from copies. Since 2.0."""

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of holders of a storage, by its `storage_id`. Without it, memory that forward still computes with would be
sent to the host. Since 2.8."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether `torch.func` is at work: its tensors have no graph to hook into. Since 2.0."""

_NOTHING = nullcontext()


def without_transforms() -> AbstractContextManager[object]:
    """Return a context without them, for messages of ranks, which have no memory under `torch.func.vmap`. Since 2.4."""
    return temporarily_clear_interpreter_stack() if are_transforms_active() else _NOTHING


accumulated_hooks: Callable[[torch.Tensor], OrderedDict[int, object] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks that `register_post_accumulate_grad_hook` has put on a parameter, by number; None before the first. Else a
gradient that one of them reads would be collected before it is whole. Since 2.1."""


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have the backward under way call `callback` at its end, where the remaining gradients are reduced. Since 2.0."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def are_saved_elsewhere() -> bool:
    """Return whether `saved_tensors_hooks` are active here: a checkpoint has its own. Since 2.8."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def rows_of(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse gradient unchanged; the public ones add up equal rows first. Since 2.0."""
    return sparse._indices(), sparse._values()


# -- tensors of another kind ------------------------------------------------------------------------------------

Kernel = OpOverload
"""The type of the kernel that `__torch_dispatch__` gets. Since 2.0."""

Layout = DTensorSpec
"""The layout that makes a DTensor: its mesh, placements and global shape. Since 2.5."""


def layout_of(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Return the layout of a contiguous tensor. Since 2.5."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, strides_of(shape), dtype))


def layout_as(layout: DTensorSpec, whole: torch.Tensor) -> DTensorSpec:
    """Return the layout of `whole`, which every rank has all of, on the ranks of another layout. Since 2.5."""
    return DTensorSpec(layout.mesh, layout.placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))


def wrap(kind: type[DTensor], local: torch.Tensor, layout: DTensorSpec, *, requires_grad: bool = False) -> Any:
    """Make a DTensor of a subclass around this rank's part, without autograd or asking other ranks. Since 2.5."""
    return DTensor.__new__(kind, local, layout, requires_grad=requires_grad)


_LOCAL: Any = DTensor._local_tensor  # the slot, which a subclass may have hidden
local_of: Callable[[DTensor], torch.Tensor] = _LOCAL.__get__
"""This rank's part of a DTensor. `to_local()` is a step of autograd's. Since 2.0."""

put_local: Callable[[DTensor, torch.Tensor], None] = _LOCAL.__set__
"""Sets that part, in a subclass that shows another tensor under its name. Since 2.0."""

layout_from: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""The layout that a DTensor was made with. Since 2.0."""


def takes_plain_as_replicated() -> bool:
    """Return whether torch's public `implicit_replication()` is active, which no public function tells. Since 2.5."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def groups_of(placement: Placement) -> tuple[int, int] | None:
    """Return dim and number of groups if a placement cuts each of several groups along a dim; else None. Since 2.6."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rows_of_chunks(chunks: int) -> Placement:
    """Return the placement of rows that `Shard(0)` over another axis, of `chunks` ranks, has left here. Since 2.6."""
    return _StridedShard(0, split_factor=chunks)


norm_partial: Callable[[float], Placement] = _NormPartial
"""The placement of a norm: every rank has the norm of its own elements. Since 2.2."""


def mesh_without_groups(device_type: str, ranks: Sequence[Any], rank: int) -> DeviceMesh:
    """Return a mesh as rank `rank` would see it, with no processes behind it. Since 2.3."""
    return DeviceMesh(device_type, ranks, _init_backend=False, _rank=rank)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join the axes of several meshes cut out of one to one mesh; `RuntimeError` if they were not. Since 2.9."""
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("an axis has no name")
    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Return a part of a mesh as one axis, which the whole mesh knows by that name.

    All ranks make it together. Since 2.4.
    """
    return mesh._flatten(name)


def set_local(dtensor: DTensor, other: DTensor) -> None:
    """Make a DTensor what another is, in place: torch's `.data` leaves behind the part that is in Python. Since 2.0."""
    dtensor.data = other
    dtensor._local_tensor, dtensor._spec = other._local_tensor, other._spec


def writes(kernel: OpOverload) -> bool:
    """Return whether a kernel changes its arguments. Since 2.0."""
    return bool(kernel._schema.is_mutable)


@cache
def written(kernel: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that a kernel changes. Since 2.0."""
    arguments = enumerate(kernel._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, torch calls no `__torch_function__` of a subclass. Since 2.0."""


@contextmanager
def version_kept(tensor: torch.Tensor) -> Iterator[None]:
    """Keep a tensor's version while the block works on it: torch counts a change, but no value changes. Since 2.7."""
    version = tensor._version
    try:
        yield
    finally:
        set_versions((tensor,), (version,))


def is_view(kernel: OpOverload) -> bool:
    """Return whether a kernel returns memory that it was given. Since 2.0."""
    return not kernel._schema.is_mutable and any(value.alias_info is not None for value in kernel._schema.returns)


COPY_KERNELS = frozenset({"_to_copy"})
MANY_KERNELS = ("_foreach_", "_fused_", "_amp_foreach_")
ITEM, MAX_OF_MANY, NORM_OF_MANY = "_local_scalar_dense", "_foreach_max", "_foreach_norm"
"""How the kernel of `to()` is called, how those begin that take lists of tensors, the kernel of `item()`, and the
reductions of lists. Under other names they would be run on gathered tensors, which is slow, or as if they treated
elements alike, which is an error. Since 2.5."""

ATTENTION_KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The kernels that `scaled_dot_product_attention` calls, where it is one kernel. Selective checkpointing keeps their
results; under another name attention would be computed twice. Since 2.5."""


def made_as(kind: type[Any], data: torch.Tensor, *, requires_grad: bool) -> Any:
    """Return memory as a tensor of a subclass, past a constructor that may want more arguments. Since 2.0."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)


parse_to = torch._C._nn._parse_to
"""Device and dtype in the arguments of a `to()`. Some subclasses convert data in their own. Since 2.0."""


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor class has its own dispatch, so may wrap tensors that sharding never sees. Since 2.0."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


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


# -- compiled code ----------------------------------------------------------------------------------------------

MANAGED = "_is_fsdp_managed_module"
"""Attribute of every module in a sharded model: the compiler then takes its parameters for what they are at each call,
not for what they were when it compiled. Since 2.0."""


def mark_fully_sharded(module: nn.Module) -> None:
    """Have torch's composable functions, `replicate` among them, leave its parameters alone. Since 2.0."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def apply_past_fsdp(module: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> Any:
    """Call `Module._apply` of the class behind torch's `FSDPModule`, whose own asks for torch's engine. Since 2.6."""
    return super(FSDPModule, module)._apply(fn, recurse)


def leave_state(module: nn.Module, state: object) -> None:
    """Have `fully_shard.state(module)` of torch's own give `state`. Since 2.6.

    Its pipeline schedules take that, to have gradients reduced once a step's backwards are over. It would be None.
    """
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state


WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Parts that torch's wrappers, for checkpointing and compiling, put into the names of parameters. If they stayed, a
name in a checkpoint would depend on the wrappers. Since 2.0."""


_LEFT_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def keep_compiler_out(hook: Callable[..., Any], *, is_in_graphs: bool = False) -> None:
    """Keep the compiler from compiling a function, and those that it calls, by itself, without importing the compiler.

    Without it a single graph (`fullgraph`) could not be called between hooks. Since 2.7.

    Args:
        hook: the function.
        is_in_graphs: a graph of its caller goes on through it; otherwise the graph ends there.
    """
    set_code_exec_strategy(hook.__code__, _LEFT_ALONE)
    if is_in_graphs:
        return
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = "fullshard runs its hooks outside the graph"  # type: ignore[attr-defined]


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Return whether `torch.compile` made a function; a checkpoint cannot look at its operations. Since 2.0."""
    return hasattr(function, "_torchdynamo_orig_callable")


def inside_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped as a whole; `module` if it wraps none. Since 2.0."""
    return getattr(module, "_orig_mod", module)


# -- modules, optimizers, loaders -------------------------------------------------------------------------------

NormBase = _NormBase
"""The base class of all batch norms; they stay in float32. Since 2.0."""

non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that are in no state dict, and so in no checkpoint. Since 2.0."""

HOOK_NAMES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""How the attributes of a module end that hold its hooks, which a copy for merging must not run. Since 2.1."""

INIT_GROUP = "_init_group"
"""The method in which torch's optimizers list a group's tensors; plain tensors are put in there. Under another name
sharded tensors would be updated, which is slower, and the same. Since 2.0."""

step_pre_hooks: Callable[[torch.optim.Optimizer], Mapping[int, object]] = attrgetter("_optimizer_step_pre_hooks")
"""The hooks that run before an optimizer's step: one of them steps in backward, and no other may. Since 2.0."""

_FOREACH_TYPES: tuple[list[Any], ...] = (
    torch_optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Have optimizers update tensors of `kind` many at a time, as torch does for its own DTensor. Since 2.4."""
    for kinds in _FOREACH_TYPES:
        if kind not in kinds:
            kinds.append(kind)


def may_hold(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether `tensor.data = data` is allowed; between devices it depends on both. Since 2.0."""
    return torch._has_compatible_shallow_copy_type(tensor, data)


def copy_module_versions(source: Any, target: Any) -> None:
    """Give a state dict another one's data beside tensors: the versions of its modules. Since 2.0."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


def steps_of(scheduler: Any) -> int:
    """Return how often a learning rate schedule has stepped; 0 if it does not count. Since 2.0."""
    return getattr(scheduler, "_step_count", 0)


def forget_iteration(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Drop a copied data loader's iterator, which would go on with the original's workers. Since 2.0."""
    object.__setattr__(loader, "_iterator", None)


classes_to_wrap: Callable[[Any], Iterable[type[nn.Module]]] = attrgetter("_module_classes")
"""The classes of torch's `ModuleWrapPolicy`. Since 2.0."""

wrap_function: Callable[[Any], Callable[[nn.Module], Any]] = attrgetter("_lambda_fn")
"""The function of torch's `CustomPolicy`. Since 2.1."""


# -- processes --------------------------------------------------------------------------------------------------

default_store = _get_default_store
"""The store of `init_process_group`, through which ranks that are out of step talk. Since 2.0."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the time-out given to `init_process_group`; further groups would get the backend's default. Since 2.0."""
    backend = backend_of(group, device)
    return dist.default_pg_timeout if backend is None else backend.options._timeout


def count_for_debugging(operation: str) -> None:
    """Have `CommDebugMode` count a collective, by its name in `torch.ops`, that torch has no part in.

    Otherwise it would say that ranks on CPUs, which share memory or send messages, exchange nothing. Since 2.5.
    """
    for mode in _Collective.counters():
        mode.__torch_dispatch__(_Collective(attrgetter(operation)(torch.ops)), ())


def uncounted() -> AbstractContextManager[object]:
    """Keep `CommDebugMode` from counting: these are messages of a few bytes about what ranks do. Since 2.0."""
    return _python_dispatch._disable_current_modes() if _Collective.counters() else nullcontext()


class _Collective:
    """Stands for a kernel where `CommDebugMode` is told of it."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        """Do nothing: the work is done elsewhere."""

    def __str__(self) -> str:
        return str(self._overloadpacket)

    @staticmethod
    def counters() -> list[Any]:
        """Return the modes that count now."""
        tools = sys.modules.get("torch.distributed.tensor.debug")  # its import takes a second
        if tools is None or not torch._C._len_torch_dispatch_stack():
            return []
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        return [mode for mode in modes if isinstance(mode, tools.CommDebugMode)]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that sends tensors of a device. Since 2.0.

    Returns:
        None in a group that is written in Python, which has no such part.
    """
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


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


zero_grad = Replaced.of(torch.optim.Optimizer, "zero_grad")
"""Looks at each `.grad` before it drops it: sharded ones would be made DTensors for that alone. Since 2.0."""

total_norm = Replaced.of(clip_grad, "_get_total_norm")
"""Under `torch.nn.utils.clip_grad_norm_` and `get_total_norm`, which would take each rank's own norm. Since 2.6."""

unscale = Replaced.of(torch.amp.GradScaler, "_unscale_grads_")
"""Under `GradScaler`, whose step one rank alone would leave out on an overflow. Since 2.3."""

state_dict = Replaced.of(torch.optim.Optimizer, "state_dict")
load_state_dict = Replaced.of(torch.optim.Optimizer, "load_state_dict")
"""Public, and replaced all the same: torch's hooks for it are set per optimizer, and a script hands none to the engine.
Since 2.0."""

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


@cache
def keep_every_box() -> None:
    """Have `HuggingFaceStorageWriter` put this rank's part of a tensor, if it is several boxes, into several files.

    A file holds one tensor of a name, so torch would silently keep the last box alone. Since 2.8.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # only for a save

    torchs = HuggingFaceStorageWriter._split_by_storage_plan

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

    HuggingFaceStorageWriter._split_by_storage_plan = split  # type: ignore[assignment, method-assign]


# -- a device that is not there ---------------------------------------------------------------------------------

DispatchMode = _python_dispatch.TorchDispatchMode
"""A context that sees every operation, for a class to derive from. Since 2.0."""

leaves_of: Callable[[Any], list[Any]] = _pytree.tree_leaves
"""The leaves of lists, tuples and dicts of arguments. Without it, memory that an operation takes in a list would not be
counted. Since 2.0."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operation's arguments, and which of them it returns. Without it a view would cost as much as a copy. Since 2.0."""

read_item = torch.ops.aten._local_scalar_dense
"""Reads a number, for which the host waits. Since 2.0."""

copy_all, zero_all = torch.ops.aten._foreach_copy_, torch.ops.aten._foreach_zero_
"""Write their first argument, and do not read it. Since 2.0."""

view_of_a_product = torch.ops.aten._unsafe_view
"""Another shape of a product's fresh result; its schema does not say so, and it launches nothing. Since 2.0."""

softmaxes = (torch.ops.aten._softmax, torch.ops.aten._log_softmax, torch.ops.aten._log_softmax_backward_data)
"""Compute an exponential for each element. Since 2.0."""

grouped_matmul = torch.ops.aten._grouped_mm
"""Multiplies rows by the weights of experts; the counter of FLOP does not know it. Since 2.8."""

shapes_learnt = (
    Replaced.of(FakeTensorMode, "__torch_dispatch__"),
    Replaced.of(_op_schema, "_rebuild_tensor_from_dtensor_meta"),
)
"""Under these torch makes tensors to learn a shape, which take no memory. Since 2.0, and 2.5 for DTensor."""

fused_devices = Replaced.of(torch_optimizer, "_get_fused_kernels_supported_devices")
"""The devices that have fused optimizers. Since 2.3."""


gradient_hooks: Callable[[torch.Tensor], Mapping[int, object] | None] = attrgetter("_backward_hooks")
"""The hooks that `register_hook` has put on a tensor, by number. Since 2.0."""


def is_for_shapes(kind: type) -> bool:
    """Return whether tensors of this type are made to learn a shape. Since 2.0."""
    return issubclass(kind, FakeTensor)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention, causal or by a mask, in one kernel that keeps no scores, where a device has only one.

    Since 2.0. The kernel that reads a mask computes every score.
    """
    aten = torch.ops.aten
    if mask is None:
        mixed: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    else:
        mixed = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True)[0]
    return mixed


def store_of_nobody() -> dist.Store:
    """Return a store with which one process alone can start any number of ranks. Since 2.0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: dist.Store = FakeStore()
    return store


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
