"""Private torch names that are used by the kernel, or by more than one folder outside it.

A folder that needs other names has its own `torch_private.py`. No other file may use private names, and
`test_architecture` enforces this. torch may rename these names in any release. Therefore each entry states its purpose,
what goes wrong if torch changes it, and the torch release that added it ("2.0" is the oldest release that was
examined). `tests/engine/test_torch_private` tests each name for exactly this purpose.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, _python_dispatch

from fullshard.core.boxes import strides_of

if TYPE_CHECKING:
    from torch.autograd.graph import Node

SEMI_PUBLIC = frozenset({"_base", "_buffers", "_modules", "_parameters", "_version"})
"""Names with an underscore that every file may use. torch's notes on autograd describe `Tensor._base` and `_version`.
The others are the dictionaries of a module, which all libraries read and torch pickles. No public function puts another
object into a module without the hooks that `setattr` calls."""


backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the innermost backward in progress, or -1 outside backward. Without it, a forward could not find out
whether it is a recomputation. Since torch 2.0."""

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next node of autograd's graph. Backward runs nodes with higher numbers first. Without it, the
engine could not find out which forwards began after a checkpoint. Since torch 2.0."""

number_of: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The number of a node. Without it, the engine could not find nodes that do not lead to an output. Since torch 2.1."""


def node_under_way() -> int | None:
    """Return the number of the node that backward is running in this thread, or None outside backward.

    Without it, a recomputation could not find out which part of the backward pass is still to run. Since torch 2.1.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else number_of(node)


def will_run(node: Node) -> bool | None:
    """Return whether the backward in progress will run a node, or None if it returns that node's gradient.

    `torch.autograd.grad` returns gradients to its caller. The engine must not collect these. Since torch 2.0.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets the version counters of tensors. Refilling the unsharded parameters must not increase them, or backward would
reject the tensors that it saved. Since torch 2.7 for several tensors."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of the storage object, equal for all tensors that share it, even while it has no memory (`data_ptr` is
0). Without it, views could not be distinguished from copies. Since torch 2.0."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether `torch.func` transforms are active. Their tensors have no graph for hooks. Since torch 2.0."""

_NOTHING = nullcontext()


def without_transforms() -> AbstractContextManager[object]:
    """Return a context without `torch.func` transforms, in which memory outlives these transforms. Since torch 2.4."""
    return temporarily_clear_interpreter_stack() if are_transforms_active() else _NOTHING


accumulated_hooks: Callable[[torch.Tensor], OrderedDict[int, object] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook` on a parameter, by number; None if there are none. Without it, a
gradient that such a hook reads would be collected before it is complete. Since torch 2.1."""


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward in progress, to reduce the remaining gradients. Since torch 2.0."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


Kernel = OpOverload
"""The type of the kernel that `__torch_dispatch__` receives. Since torch 2.0."""

Layout = DTensorSpec
"""The layout of a DTensor: its mesh, placements and global shape. Since torch 2.5."""


def layout_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> DTensorSpec:
    """Return the layout of a DTensor, which is contiguous unless a `stride` is given. Since torch 2.5."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride or strides_of(shape), dtype))


def wrap(kind: type[DTensor], local: torch.Tensor, layout: DTensorSpec, *, requires_grad: bool = False) -> Any:
    """Create a DTensor of class `kind` from this rank's part, without autograd or communication. Since torch 2.5."""
    return DTensor.__new__(kind, local, layout, requires_grad=requires_grad)


_LOCAL: Any = DTensor._local_tensor  # the slot, which a subclass may hide
local_of: Callable[[DTensor], torch.Tensor] = _LOCAL.__get__
"""Returns this rank's part of a DTensor. `to_local()` would be recorded by autograd. Since torch 2.0."""

put_local: Callable[[DTensor, torch.Tensor], None] = _LOCAL.__set__
"""Sets this rank's part in a subclass that exposes another tensor under that name. Since torch 2.0."""

layout_from: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""Returns the layout with which a DTensor was created. Since torch 2.0."""


def mesh_without_groups(device_type: str, ranks: Sequence[Any], rank: int) -> DeviceMesh:
    """Return a mesh as rank `rank` would see it, but without process groups. Since torch 2.3."""
    return DeviceMesh(device_type, ranks, _init_backend=False, _rank=rank)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join slices of one mesh into a mesh with all of their axes, or raise `RuntimeError`. Since torch 2.9."""
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("a mesh to be joined has an unnamed axis")
    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Return a mesh flattened into one axis, registered under a name in the root mesh. Collective. Since torch 2.4."""
    return mesh._flatten(name)


def made_as(kind: type[Any], data: torch.Tensor, *, requires_grad: bool) -> Any:
    """Return `data` as a tensor of class `kind`, without calling its constructor. Since torch 2.0."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor class has its own dispatch, so that it may wrap other tensors. Since torch 2.0."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def writes(kernel: Kernel) -> bool:
    """Return whether a kernel modifies its arguments. Since torch 2.0."""
    return bool(kernel._schema.is_mutable)


def is_view(kernel: Kernel) -> bool:
    """Return whether a kernel returns a view of one of its arguments. Since torch 2.0."""
    return not kernel._schema.is_mutable and any(value.alias_info is not None for value in kernel._schema.returns)


MANAGED = "_is_fsdp_managed_module"
"""An attribute of every module in a sharded model. It makes the compiler read the parameters at each call instead of
using those from compilation. Since torch 2.0."""


WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Parts that torch's wrappers for checkpointing and compiling insert into parameter names. If they stayed, the names in
a checkpoint would depend on the wrappers. Since torch 2.0."""

_LEFT_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def keep_compiler_out(hook: Callable[..., Any], *, is_in_graphs: bool = False) -> None:
    """Keep the compiler from compiling a hook and its callees separately, without importing the compiler.

    Without this, one graph (`fullgraph`) could not be called between hooks. If `is_in_graphs` is set, the caller's
    graph includes the hook; otherwise the graph ends there. Since torch 2.7.
    """
    set_code_exec_strategy(hook.__code__, _LEFT_ALONE)
    if is_in_graphs:
        return
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = "fullshard runs its hooks outside the graph"  # type: ignore[attr-defined]


INIT_GROUP = "_init_group"
"""The method in which torch's optimizers list the tensors of a group, replaced to list plain tensors. If torch renamed
it, optimizers would update sharded tensors, with the same result but more slowly. Since torch 2.0."""


def may_hold(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether `tensor.data = data` is allowed. Across devices, this depends on both tensors. Since torch 2.0."""
    return torch._has_compatible_shallow_copy_type(tensor, data)


_FOREACH_TYPES: tuple[list[Any], ...] = (
    torch_optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Let optimizers update many tensors of `kind` together, as torch does for its own DTensor. Since torch 2.4."""
    for kinds in _FOREACH_TYPES:
        if kind not in kinds:
            kinds.append(kind)


default_store = _get_default_store
"""The store of `init_process_group`, through which ranks communicate when they are out of step. Since torch 2.0."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the time-out passed to `init_process_group`. Since torch 2.0.

    Without it, new groups would get the backend's default time-out.
    """
    backend = backend_of(group, device)
    return dist.default_pg_timeout if backend is None else backend.options._timeout


def count_for_debugging(operation: str) -> None:
    """Let `CommDebugMode` count a collective that torch itself does not run. `operation` is its name in `torch.ops`.

    Otherwise, the mode would miss the communication of CPU ranks, which share memory or send messages. Since torch 2.5.
    """
    for mode in _counters():
        mode.__torch_dispatch__(_Collective(attrgetter(operation)(torch.ops)), ())


def uncounted() -> AbstractContextManager[object]:
    """Return a context in which `CommDebugMode` does not count messages that coordinate ranks. Since torch 2.0."""
    return _python_dispatch._disable_current_modes() if _counters() else nullcontext()


class _Collective:
    """A stand-in for a kernel, which `CommDebugMode` counts as if the kernel had run."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None: ...

    def __str__(self) -> str:
        return str(self._overloadpacket)


def _counters() -> list[Any]:
    """Return the active `CommDebugMode` instances. Since torch 2.5."""
    tools = sys.modules.get("torch.distributed.tensor.debug")  # its import takes a second
    if tools is None or not torch._C._len_torch_dispatch_stack():
        return []
    return [m for m in _python_dispatch._get_current_dispatch_mode_stack() if isinstance(m, tools.CommDebugMode)]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that a group uses for a device, or None if the group is written in Python. Since torch 2.0."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def awaited_worker(frame: FrameType) -> str:
    """Return the data loader's worker that a frame waits for, or "": hangs are told without it. Since torch 2.0."""
    with suppress(AttributeError, LookupError):
        if frame.f_code.co_filename.endswith("/torch/utils/data/dataloader.py"):
            loader = frame.f_locals["self"]
            number = loader._task_info[loader._rcvd_idx][0]
            return f"worker {number} (process {loader._workers[number].pid})"
    return ""
