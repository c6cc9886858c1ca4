"""Attention as a simulated device computes it.

With a causal mask, it is a single kernel that does not store the scores, if the device has such a kernel. If ranks
share sequences, torch's ring or the all-to-alls of `features/sequence_parallel` run around this kernel.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.api import torch_private
from fullshard.core.imports import import_extra
from fullshard.features.sequence_parallel.attention import SplitSequences
from fullshard.plan.attention import what_runs
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block

NAME = "virtual"


def register(job: Job, device: Device, around: Callable[..., Any] | None = None) -> str:
    """Register a job's attention on a device with Transformers, and return its name. `around` wraps its calls."""
    import_extra("transformers", extra="hf", purpose="simulating a Transformers model")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = functools.partial(_attend, job, device)
    ALL_ATTENTION_FUNCTIONS.register(NAME, functools.partial(around, attend) if around else attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME


@contextlib.contextmanager
def dividing(model: nn.Module, job: Job, device: Device) -> Iterator[dict[str, Any]]:
    """Divide sequences over groups of ranks within the block, as the job says. Yield the group of each axis."""
    groups, rank = {}, dist.get_rank()
    with contextlib.ExitStack() as stack:
        for axis, size, stride in (("cp", job.cp, job.sp), ("sp", job.sp, 1)):
            if size > 1:
                first = rank - rank // stride % size * stride
                groups[axis] = dist.new_group([first + stride * number for number in range(size)])
        if "cp" in groups:
            # With the same ranks and names, torch would take the mesh of an earlier simulation, whose groups are gone.
            mesh = DeviceMesh.from_group(groups["cp"], "cpu", mesh_dim_names=(f"cp {groups['cp'].group_name}",))
            whole = torch.empty(job.seq_len)  # torch takes the length from it
            stack.enter_context(
                context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole})
            )
            register(job, device, functools.partial(_in_a_ring, mesh))
        elif "sp" in groups:
            split = SplitSequences(model, groups["sp"], by_deepspeed=False)
            register(job, device, lambda attend, *args, **kwargs: split.attend(attend, NAME, *args, **kwargs))
        if groups:
            model.set_attn_implementation(NAME)  # type: ignore[operator]
        yield groups


def _in_a_ring(mesh: DeviceMesh, attend: Any, module: nn.Module, *parts: Any, **options: Any) -> tuple[Any, None]:
    divided = (DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts[:3])
    mixed: Any = torch_private.attend(*divided)
    return mixed.to_local().transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None as the mask, because the kernel itself applies the causal mask."""


def _attend(
    job: Job,
    device: Device,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention on (batch, heads, tokens, width), with values padded to the width of the keys."""
    width = value.shape[-1]
    block = Block(
        *(0, query.shape[1], key.shape[1], key.shape[-1], 0),
        value_dim=width,
        window=sliding_window or 0,
        attention_dropout=dropout > 0,
    )
    way = what_runs(block, job, device)
    if way == "math":
        with sdpa_kernel(SDPBackend.MATH):  # torch's own operations, of any device
            mixed = nn.functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=True
            )
        return mixed.transpose(1, 2).contiguous(), None
    if width < key.shape[-1]:
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (
            tensor[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *tensor.shape[2:])
            for tensor in (key, value)
        )
    read = None
    if way == "masked":  # made of the window for each layer, of the dtype of compute
        read = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2]).expand(-1, query.shape[1], -1, -1)
    return torch_private.attend(query, key, value, read)[..., :width].transpose(1, 2).contiguous(), None
