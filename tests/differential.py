"""Training one model with several engines, and measuring how far the results are apart.

A difference is the largest deviation relative to the largest element of the reference. 0.0 means bitwise equal, and
nothing else does. Bitwise equality is asked for wherever the order of summation is the same: on one and two ranks, as
a sum of two has only one order. Some processors' matrix products round in an order that depends on where in memory
their operands lie (MKL's do on some of AMD's), and a shard lies elsewhere than a whole parameter: there it is rounding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard.features import ShardedParameter, no_sync


def rounding(dtype: torch.dtype, chain: float) -> float:
    """Return how far apart two results may be, relative to the largest number on the way to them.

    Every processor sums in an order of its own. So a limit is never what one machine showed: it is what `chain`
    roundings of `dtype` make, each of them upwards on one side.

    Args:
        dtype: what is computed in.
        chain: operations one after the other that lead to an element: terms of the sums, times passes, times steps;
            times what a division by a small number makes of them.
    """
    return chain * torch.finfo(dtype).eps


TOLERANCE = rounding(torch.float32, 5 * 2 * 120)
"""Of float32: five steps of a forward and a backward pass, each of which adds up some 120 terms."""
CLOSE: Any = {"rtol": TOLERANCE, "atol": rounding(torch.float32, 16)}
"""For `assert_close`. Where terms cancel, what is left of 16 roundings of numbers as large as one."""
EPS = 1e-3
"""For Adam and its like where sums are in another order. They divide a gradient by its size and this: with their own
1e-8 the last bits of a gradient that is nearly zero decide where a weight goes."""
BFLOAT16_TOLERANCE = rounding(torch.bfloat16, 8)
"""For tensors stored in bfloat16: some roundings over a few steps."""

Engine = Callable[[Any], nn.Module]
Record = dict[str, dict[Any, torch.Tensor | None]]
"""kind of quantity -> name -> whole tensor"""


# -- engines to compare with ------------------------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    """Replicas: the simplest thing that can be right."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def torch_engine(
    model: nn.Module, units: Sequence[nn.Module], *, mesh_shape: tuple[int, ...] | None = None, **arguments: Any
) -> nn.Module:
    """Torch's `fully_shard` on the units and on the model. `mesh_shape`: (shard,) or (replicate, shard)."""
    if mesh_shape is not None:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        arguments["mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for unit in units:
        torch_fully_shard(unit, **arguments)
    torch_fully_shard(model, **arguments)
    return model


def plain(model: nn.Module) -> nn.Module:
    """Without the wrapper that DDP adds."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    """No gradient communication inside, in the engine's own words."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif any(isinstance(parameter, ShardedParameter) for parameter in model.parameters()):
        with no_sync(model):
            yield
    else:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        yield
        model.set_requires_gradient_sync(True)  # type: ignore[operator]


# -- whole tensors, whatever the engine -------------------------------------------------------------------------


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank has of a sharded tensor. To compare the whole, all ranks would send messages."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(tensor: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """The unsharded form of a parameter, its gradient or its optimizer state; a collective for the sharded ones."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return tensor.detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> whole gradient."""
    return {name: whole(p.grad, p) for name, p in plain(model).named_parameters()}


def parameters(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> whole parameter."""
    return {name: whole(p, p) for name, p in plain(model).named_parameters()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor | None]:
    """`name/key` -> whole tensor."""
    state: dict[str, torch.Tensor | None] = {}
    for name, parameter in plain(model).named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                # Step counters are 0-D for every engine; only what has the slice's shape is gathered.
                state[f"{name}/{key}"] = whole(value, parameter if value.shape == parameter.shape else value)
    return state


# -- comparison -------------------------------------------------------------------------------------------------


def difference(value: torch.Tensor | None, reference: torch.Tensor | None) -> float:
    """The deviation of `value`; infinite if one is missing or of another shape or dtype."""
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return float("inf")
    if torch.equal(value, reference):
        return 0.0
    scale = max(reference.abs().max().item(), 1e-30)
    relative = (value.double() - reference.double()).abs().max().item() / scale
    if value.dtype is torch.bfloat16:  # it comes to its limit where others come to theirs
        relative *= TOLERANCE / BFLOAT16_TOLERANCE
    return max(relative, 1e-30) if relative == relative else float("inf")  # NaN on one side only is no small matter


def is_same_product(value: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether results of the same products, whose operands lie elsewhere, are equal: bit for bit where they can be."""
    return difference(value, reference) <= (0.0 if products_are_exact() else TOLERANCE)


def compare(record: Record, reference: Record) -> dict[str, float]:
    """The largest difference per kind of quantity, with the name of the tensor that has it."""
    result: dict[str, float] = {}
    for kind, expected in reference.items():
        names = sorted(map(str, expected.keys() ^ record[kind].keys()))
        assert not names, f"{kind}: only one of the two has {names}"
        values = {name: difference(record[kind][name], expected[name]) for name in expected}
        worst = max(values, key=values.__getitem__, default="")
        result[f"{kind} ({worst})"] = values.get(worst, 0.0)
    return result


def check(results: Sequence[dict[str, float]], *, exact: bool, tolerance: float = TOLERANCE) -> None:
    """Every rank's differences within the limit, all of them in the message if not.

    `exact` asks for equal bits where this processor's products have them; elsewhere for `tolerance`.
    """
    limit = 0.0 if exact and products_are_exact() else tolerance
    assert results
    for rank, result in enumerate(results):
        assert result, "nothing was compared"
        assert all(value <= limit for value in result.values()), f"rank {rank}: {result}, limit {limit}"


@functools.cache
def products_are_exact() -> bool:
    """Whether this processor's matrix products are the same bit for bit wherever, and in which layout, operands lie."""

    def placed(matrix: torch.Tensor, offset: int) -> torch.Tensor:
        memory = matrix.new_empty(matrix.numel() + offset)
        return memory[offset:].view(matrix.shape).copy_(matrix)

    generator = torch.Generator().manual_seed(1)
    shapes = ((21, 12, 11), (8, 5, 8), (6, 12, 50), (16, 24, 16), (13, 33, 7), (4, 6, 6), (2, 3, 8), (4, 16, 16))
    for (rows, inputs, outputs), dtype in itertools.product(shapes, (torch.float32, torch.float64)):
        left, right = (torch.randn(n, inputs, generator=generator, dtype=dtype) for n in (rows, outputs))
        expected = left @ right.t()
        turned = left.t().contiguous().t()
        others = [
            placed(left, 1) @ right.t(),
            left @ placed(right, 3).t(),
            left @ right.t().contiguous(),
            turned @ right.t(),
        ]
        if not all(torch.equal(other, expected) for other in others):
            return False
    return True
