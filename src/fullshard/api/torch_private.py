"""Wrappers for the private names of torch that `api` and `integrations` use. See also `comm.torch_private`."""

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import _op_schema, experimental
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import dataloader

from fullshard.comm.torch_private import *  # noqa: F403 -- for who has this file
from fullshard.core.imports import Replaced
from fullshard.features.dtensor_ops.torch_private import written as written


def inside_compiled(module: nn.Module) -> nn.Module:
    """Return the original module if `module` is a wrapper of `torch.compile`, otherwise `module`. Since torch 2.0."""
    return getattr(module, "_orig_mod", module)


def steps_of(scheduler: Any) -> int:
    """Return how often a learning-rate scheduler has stepped, or 0 if it does not count its steps. Since torch 2.0."""
    return getattr(scheduler, "_step_count", 0)


def forget_iteration(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Drop the iterator of a copied data loader, which would share the workers of the original. Since torch 2.0."""
    object.__setattr__(loader, "_iterator", None)


classes_to_wrap: Callable[[Any], Iterable[type[nn.Module]]] = attrgetter("_module_classes")
"""The classes of torch's `ModuleWrapPolicy`. Since torch 2.0."""

wrap_function: Callable[[Any], Callable[[nn.Module], Any]] = attrgetter("_lambda_fn")
"""The function of torch's `CustomPolicy`. Since torch 2.1."""


DispatchMode = _python_dispatch.TorchDispatchMode
"""A base class for contexts that intercept every operation. Since torch 2.0."""

leaves_of: Callable[[Any], list[Any]] = _pytree.tree_leaves
"""Returns the leaves of nested lists, tuples and dicts of arguments. Without it, tensors that an operation takes in a
list would not be counted. Since torch 2.0."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an operation. It shows whether the result is a view, which costs less than a copy. Since torch 2.0."""

read_item = torch.ops.aten._local_scalar_dense
"""The operation that reads a number from the device, for which the host waits. Since torch 2.0."""

copy_all, zero_all = torch.ops.aten._foreach_copy_, torch.ops.aten._foreach_zero_
"""Operations that write their first argument without reading it. Since torch 2.0."""

view_of_a_product = torch.ops.aten._unsafe_view
"""Reshapes the result of a product. It does not launch a kernel, although its schema does not declare a view.
Since torch 2.0."""

wait_tensor, Unfinished = torch.ops._c10d_functional.wait_tensor, _functional_collectives.AsyncCollectiveTensor
"""Waits for the result of a functional collective, and the result until then. Torch's ring attention uses both.
Since torch 2.1."""

wrap_to_wait: Any = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", wait_tensor)
"""Makes a result unfinished, but not on the meta device. Since torch 2.13; earlier, this is not an operation."""

grouped_matmul = torch.ops.aten._grouped_mm
"""Multiplies rows by the weights of experts. torch's FLOP counter has no formula for it. Since torch 2.8."""

shapes_learned = (
    Replaced.of(FakeTensorMode, "__torch_dispatch__"),
    Replaced.of(_op_schema, "_rebuild_tensor_from_dtensor_meta"),
)
"""Functions that create tensors only to infer shapes. These tensors take no memory. Since torch 2.0, for
DTensor since torch 2.5."""

fused_devices = Replaced.of(torch_optimizer, "_get_fused_kernels_supported_devices")
"""The devices that have fused optimizers. Since torch 2.3."""

set_rotate_method: Callable[[str], None] = experimental._attention.set_rotate_method
"""Sets how torch's context parallelism exchanges keys and values. Without it, `cp_comm_strategy` would have no effect.
Since torch 2.7."""


def is_for_shapes(kind: type) -> bool:
    """Return whether tensors of this type are used only to infer shapes. Since torch 2.0."""
    return issubclass(kind, FakeTensor)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute causal or masked attention in a single kernel, which does not store the scores.

    Since torch 2.0. With a mask, the kernel computes every score, even those that are masked. Flash attention needs
    values of the size of keys.
    """
    aten = torch.ops.aten
    if mask is None and value.shape[-1] == key.shape[-1]:
        mixed: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    else:
        mixed = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, mask is None)[0]
    return mixed


groups_made = Replaced.of(distributed_c10d, "_new_process_group_helper")
"""Creates every process group. A rehearsal replaces it, because no other place can give a script that asks for NCCL or
Gloo another backend. Since torch 2.0."""

ranks_awaited = Replaced.of(distributed_c10d, "_store_based_barrier")
"""Waits in a store until all ranks have created a group, which nobody does in a rehearsal. Since torch 2.0."""

parts_checked = Replaced.of(default_planner, "_validate_global_plan")
"""Checks that the parts that ranks save do not overlap, which they do in a rehearsal. Returns whether they do not, or a
list of problems since torch 2.13. Since torch 2.0."""

ranks_of_a_save = Replaced.of(_DistWrapper, "__init__")
"""Creates what torch's saves and loads talk to the other ranks with, and says which rank plans. Since torch 2.0."""

copies_divided = Replaced.of(default_planner, "dedup_save_plans")
"""Divides among ranks what several of them would save. The first argument is all plans. Since torch 2.3."""

next_batch = Replaced.of(dataloader._BaseDataLoaderIter, "__next__")
"""Returns the next batch of any DataLoader. A rehearsal measures how long it takes. Since torch 2.0."""

reduction_of: Callable[[Any], tuple[Any, Any]] = methodcaller("__getstate__")
"""The kind of a `dist.ReduceOp`, and the factor of a scaled sum or None. Since torch 2.0."""


def call_backend(group: dist.ProcessGroup, asked: str) -> None:
    """Make `dist.get_backend` return the backend that the script has asked for. Since torch 2.1."""
    world = distributed_c10d._world
    world.pg_map[group] = (dist.Backend(asked), world.pg_map[group][1])
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(dist.Backend(asked)))


@functools.cache
def _kernel(name: str) -> Any:
    """Compile a kernel for the GPU's clock. Since torch 2.8."""
    from torch.utils import cpp_extension

    read = 'asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));'
    source = (
        f'extern "C" __global__ void take(long long *t, unsigned long long *sent, int us) '
        f"{{ unsigned long long now, seen, old = *sent; {read} do {{ seen = old; *t = seen > now ? seen : now; "
        f"old = atomicCAS(sent, seen, *t + us * 1000ull); }} while (old != seen); }}\n"
        f'extern "C" __global__ void wait(long long *t, int us) '
        f"{{ long long now; do {{ {read} }} while (now - *t < us * 1000ll); }}"
    )
    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or "."  # torch demands its headers, which pip does not install, and adds them
    try:
        return functools.partial(torch.cuda._compile_kernel(source, name), (1, 1, 1), (1, 1, 1))
    finally:
        cpp_extension.CUDA_HOME = home


def take_links(place: torch.Tensor, sent: torch.Tensor, seconds: float) -> None:
    """Let the current stream reserve the links for `seconds`, from the time in `sent` or from now. Since torch 2.8.

    On the GPU's clock, in nanoseconds: `place` gets the time at which that begins, `sent` the time at which it ends.
    """
    _kernel("take")([place, sent, round(seconds * 1e6)])


def wait_on_device(place: torch.Tensor, seconds: float) -> None:
    """Let the current stream wait until `seconds` after the time in `place`. Since torch 2.8."""
    _kernel("wait")([place, max(1, round(seconds * 1e6))])
