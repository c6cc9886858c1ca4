"""The simulated time of an operation.

It is the longer of two times: to compute the operation's FLOP and to move its bytes, at the speeds that training
reaches.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fullshard.api import torch_private
from fullshard.plan.attention import part_of_size
from fullshard.plan.experts import slowdown
from fullshard.plan.hardware import Device

aten = torch.ops.aten

_NO_KERNEL = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.detach,
              aten.lift_fresh, torch_private.view_of_a_product, torch_private.read_item, aten.record_stream, aten.set_,
              aten.resize_}  # fmt: skip
"""Operations that allocate or inspect a tensor without launching a kernel."""

_LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather}
"""Operations that read as many bytes as they write, regardless of the size of the table that they read from."""

_ONLY_WRITTEN = {aten.copy_, aten.zero_, aten.fill_, torch_private.copy_all, torch_private.zero_all}
"""Operations that write their first argument without reading it."""


@functools.cache
def is_view(operation: Any) -> bool:
    """Return whether an operation launches no kernel, for example because its result is a view of its argument."""
    if operation.overloadpacket in _NO_KERNEL:
        return True
    returns = torch_private.schema_of(operation).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return all tensors in the (possibly nested) arguments or results of an operation."""
    return [leaf for leaf in torch_private.leaves_of(values) if isinstance(leaf, torch.Tensor)]


def seconds(operation: Any, given: Sequence[Any], named: dict[str, Any], made: Any, device: Device) -> float:
    """Return how many seconds an operation takes on an otherwise idle device."""
    flops = _flops(operation, given, named, made)
    is_attention = "attention" in operation.name()
    read = given[:1] if is_attention else given  # attention keeps sums in float32 beside
    is_wide = any(isinstance(value, torch.Tensor) and value.dtype is torch.float32 for value in read)
    peak, part = device.flops_fp32 if is_wide else device.flops, device.efficiency
    if is_attention and not is_wide:
        part = part_of_size(given[0].shape[-1], given[1].shape[-2], flash=device.flash)
    return max(flops / (peak * part), _moved(operation, given, named, made) / device.memory_speed)


def _flops(operation: Any, given: Sequence[Any], named: dict[str, Any], made: Any) -> float:
    """Return the FLOP of an operation, or for a grouped product, of a single product that takes the same time."""
    kind = operation.overloadpacket
    if kind is torch_private.grouped_matmul:  # each row with one expert's weights; or the gradient of those
        rows, inner = map(int, given[0].shape[-2:])
        is_gradient = made.dim() == 3
        experts = len(made if is_gradient else given[1])
        slower = slowdown(math.inf, inner / experts) if is_gradient else slowdown(rows / experts, inner)
        return 2.0 * rows * inner * int(given[1].shape[-1]) * slower
    formula = flop_registry.get(kind)
    if formula is None:
        return 0.0
    is_attention = "attention" in operation.name()
    if is_attention:  # older formulas do not count grouped heads
        heads = max(t.shape[1] for t in tensors_of(given) if t.dim() == 4)
        given = [_with_heads(value, heads) for value in given]
    flops = float(formula(*given, **named, out_val=made))
    return flops / 2 if is_attention and _is_causal(operation, given, named) else flops


def _with_heads(value: Any, heads: int) -> Any:
    is_grouped = isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[1] < heads
    return value.new_empty(len(value), heads, *value.shape[2:]) if is_grouped else value


def _is_causal(operation: Any, given: Sequence[Any], named: dict[str, Any]) -> bool:
    for value, argument in zip(given, torch_private.schema_of(operation).arguments, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return bool(named.get("is_causal", False))


def _moved(operation: Any, given: Sequence[Any], named: dict[str, Any], made: Any) -> float:
    kind = operation.overloadpacket
    written = {id(t): t for t in tensors_of(made) or tensors_of(_changed(operation, given))}
    read = {id(t): t for t in tensors_of((given, list(named.values())))}
    if kind in _LOOKUPS:
        return 2.0 * sum(map(_nbytes, written.values()))
    if operation.name() == "fsdp::all_gather_copy_in":  # torch's, into a part of its result
        return 2.0 * sum(map(_nbytes, given[0]))
    if kind in _ONLY_WRITTEN:
        written = {}
    return float(sum(map(_nbytes, [*read.values(), *written.values()])))


def _changed(operation: Any, given: Sequence[Any]) -> list[Any]:
    """Return the arguments that an operation changes in place, but not the gradients that fused optimizers scale."""
    changed = torch_private.written(operation)
    return [given[place] for place, name in changed if place < len(given) and name != "grads"]


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in memory. An expanded tensor takes less than its shape implies."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
