"""Adafactor, sharded: every rank sums squares over its own elements of each row and column, and few numbers travel.

    every rank     sums of squared gradients by row and by column, of its own interval; of its weights as a whole
    all ranks      one sum over the shard group of all these, rows + columns per matrix
    every rank     averages of rows and columns, which all have whole; the direction of its own elements
    all ranks      one sum per bucket: the norm of each direction
    every rank     the update of its own elements

No rank needs a whole matrix, so none is sent. The state is as small as in one process: rows + columns per matrix, on
each rank. A sum over ranks adds in another order than one process, so the numbers are the same to a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from fullshard.comm.torch_dist import all_reduce
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features.matrices import MatrixOptimizer

_ROWS, _COLUMNS, _EACH = "row_var", "col_var", "variance"


@dataclass(frozen=True, slots=True)
class _Window:
    """A rank's elements of a parameter that is a batch of matrices, as lines of whole rows.

    Attributes:
        batch, rows, columns: of the parameter.
        start, stop: of the elements.
    """

    batch: int
    rows: int
    columns: int
    start: int
    stop: int

    @property
    def _lines(self) -> slice:
        """The rows that it touches, counted over all matrices."""
        return slice(self.start // self.columns, -(-self.stop // self.columns))

    def _matrices(self) -> Iterable[tuple[int, slice]]:
        """Yield each matrix that the window has a part of, and its slice of the window's lines."""
        first, last = self._lines.start, self._lines.stop
        for matrix in range(first // self.rows, -(-last // self.rows)):
            begin, end = matrix * self.rows, (matrix + 1) * self.rows
            yield matrix, slice(max(first, begin) - first, min(last, end) - first)

    def sums(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return sums by row, shape (batch * rows,), and column, (batch * columns,), of this rank's elements, (n,)."""
        by_row, by_column = values.new_zeros(self.batch * self.rows), values.new_zeros(self.batch, self.columns)
        around = self.start - self._lines.start * self.columns, self._lines.stop * self.columns - self.stop
        lines = F.pad(values, around).view(-1, self.columns)
        by_row[self._lines] = lines.sum(1)
        for matrix, own in self._matrices():
            by_column[matrix] = lines[own].sum(0)
        return [by_row, by_column.view(-1)]

    def products(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, (n,), of the product of rows (batch, rows, 1) and columns (batch, 1, cols)."""
        by_row, by_column = row.reshape(-1)[self._lines], column.reshape(self.batch, self.columns)
        lines = row.new_empty(len(by_row), self.columns)
        for matrix, own in self._matrices():
            torch.outer(by_row[own], by_column[matrix], out=lines[own])
        lead = self.start - self._lines.start * self.columns
        return lines.view(-1)[lead : lead + self.stop - self.start]


@dataclass(slots=True)
class _Updated:
    """A parameter in a step.

    Attributes:
        parameter, group, state: as the optimizer has them.
        weights, gradient: this rank's elements, shape (n,), the gradient in float32 at least.
        window: None of a vector, whose squares are averaged one by one.
        sums: over all ranks, once they are: squared weights, and squared gradients by row and by column.
    """

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    weights: torch.Tensor
    gradient: torch.Tensor
    window: _Window | None
    sums: list[torch.Tensor]

    @property
    def step(self) -> float:
        """The number of this step, from 1."""
        return float(self.state["step"])

    @property
    def size(self) -> float:
        """Root mean square of the weights."""
        return math.sqrt(self.sums[0].item() / self.parameter.numel())


class Adafactor(MatrixOptimizer):
    """Adafactor, with the arguments and numbers of `torch.optim.Adafactor` (to 1e-5, as sums over ranks round).

    `params` may be sharded or not; `foreach` changes nothing.
    """

    whole_state = frozenset({_ROWS, _COLUMNS})

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        del foreach
        defaults: dict[str, Any] = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
            "maximize": maximize,
        }  # fmt: skip
        optim.Adafactor([nn.Parameter(torch.empty(0))], **defaults)  # torch's own words about values
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a collective where any is sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_bucket: dict[int, list[_Updated]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if (gradient := _gradient(p)) is not None and p.numel():
                    bucket = p.bucket if isinstance(p, ShardedParameter) else p
                    by_bucket.setdefault(id(bucket), []).append(self._updated(p, gradient, group))
        given = [member for own in by_bucket.values() for member in own]
        _sum_over_ranks(given, [member.sums for member in given])
        for own in by_bucket.values():
            directions = [self._direction(member) for member in own]
            norms = [[direction.square().sum().view(1)] for direction in directions]
            _sum_over_ranks(own, norms)
            for member, direction, [square] in zip(own, directions, norms, strict=True):
                self._apply(member, direction, math.sqrt(square.item() / member.parameter.numel()))
        return loss

    def _updated(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> _Updated:
        """Return a parameter in this step, with this rank's part of the sums."""
        state, weights, shape = self.state[parameter], _flat(parameter), list(parameter.shape)
        if not state:
            state["step"] = torch.tensor(0.0)
            if len(shape) > 1 and shape[-1] > 1 and shape[-2] > 1:
                state[_ROWS] = weights.new_zeros([*shape[:-1], 1])
                state[_COLUMNS] = weights.new_zeros([*shape[:-2], 1, shape[-1]])
            else:  # a matrix of one row or one column is a vector, which is equivalent
                state[_EACH] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient = gradient.detach().reshape(-1)
        gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        window, sums = None, [weights.float().square().sum().view(1)]
        if _ROWS in state:
            start = parameter.interval.start if isinstance(parameter, ShardedParameter) else 0
            window = _Window(math.prod(shape[:-2]), shape[-2], shape[-1], start, start + len(weights))
            sums += window.sums(gradient.square().add_(self._added(group)))
        return _Updated(parameter, group, state, weights, gradient, window, sums)

    def _direction(self, member: _Updated) -> torch.Tensor:
        """Take the squares into the averages; this rank's elements of the direction, in float32."""
        state, window, keeps = member.state, member.window, member.step ** self._exponent(member.group)
        if window is None:
            squares = member.gradient.square().add_(self._added(member.group))
            variance = _flat(state[_EACH]).lerp_(squares.to(state[_EACH].dtype), keeps)
            return self._of_variance(member, variance.clone())
        by_row, by_column = member.sums[1:]
        rows, columns = state[_ROWS], state[_COLUMNS]
        rows.lerp_((by_row / window.columns).view(rows.shape).to(rows.dtype), keeps)
        columns.lerp_((by_column / window.rows).view(columns.shape).to(columns.dtype), keeps)
        return self._of_factors(member, window, rows, columns)

    def _apply(self, member: _Updated, direction: torch.Tensor, size: float) -> None:
        """Decay this rank's elements, and move them by the direction, whose root mean square is `size`."""
        group, lr = member.group, float(member.group["lr"])
        step = max(group["eps"][1], member.size) * min(lr, 1 / math.sqrt(member.step))
        if group["weight_decay"]:
            member.weights.mul_(1 - lr * group["weight_decay"])
        member.weights.add_(direction.to(member.weights.dtype), alpha=-step / max(1.0, size / group["d"]))

    # -- where torch's and Transformers' numbers differ -----------------------------------------------------------

    def _exponent(self, group: dict[str, Any]) -> float:
        return float(group["beta2_decay"])

    def _added(self, group: dict[str, Any]) -> float:
        """Return the number that is added to each square."""
        return 0.0

    def _of_factors(self, member: _Updated, window: _Window, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        mean = rows.mean(dim=-2, keepdim=True).clamp_(min=self._least(member))
        return self._of_variance(member, window.products(rows / mean, columns))

    def _of_variance(self, member: _Updated, variance: torch.Tensor) -> torch.Tensor:
        """Return the gradient over the root of its variance."""
        gradient = -member.gradient if member.group["maximize"] else member.gradient
        return variance.clamp_(min=self._least(member) ** 2).rsqrt_().mul_(gradient)

    @staticmethod
    def _least(member: _Updated) -> float:
        eps: float | None = member.group["eps"][0]
        return torch.finfo(member.weights.dtype).eps if eps is None else eps


class TransformersAdafactor(Adafactor):
    """Adafactor, with the arguments and numbers of `transformers.optimization.Adafactor`.

    Raises:
        ConfigError: `lr` and `relative_step` are both there or both not, or `warmup_init` is alone.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ConfigError("Adafactor: lr and relative_step=True both say how long a step is", hint="keep one")
        if lr is None and not relative_step:
            raise ConfigError("Adafactor: relative_step=False without lr", hint="give a learning rate")
        if warmup_init and not relative_step:
            raise ConfigError("Adafactor: warmup_init=True needs relative_step=True")
        defaults = {
            "lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1,
            "weight_decay": weight_decay, "scale_parameter": scale_parameter, "relative_step": relative_step,
            "warmup_init": warmup_init,
        }  # fmt: skip
        MatrixOptimizer.__init__(self, params, defaults)

    def _apply(self, member: _Updated, direction: torch.Tensor, size: float) -> None:
        group, state = member.group, member.state
        lr = group["lr"]
        if group["relative_step"]:
            lr = min(1e-6 * member.step if group["warmup_init"] else 1e-2, 1 / math.sqrt(member.step))
        lr *= max(group["eps"][1], member.size) if group["scale_parameter"] else 1.0
        update = direction.mul_(lr / max(1.0, size / group["clip_threshold"]))
        if group["beta1"] is not None:
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(member.parameter.grad)  # type: ignore[arg-type]
            average = _flat(state["exp_avg"])
            update = average.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            member.weights.mul_(1 - group["weight_decay"] * lr)
        member.weights.sub_(update.to(member.weights.dtype))

    def _exponent(self, group: dict[str, Any]) -> float:
        return float(group["decay_rate"])

    def _added(self, group: dict[str, Any]) -> float:
        return float(group["eps"][0])

    def _of_factors(self, member: _Updated, window: _Window, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        mean = rows.mean(dim=-2, keepdim=True)
        return window.products((rows / mean).rsqrt_(), columns.rsqrt()).mul_(member.gradient)

    def _of_variance(self, member: _Updated, variance: torch.Tensor) -> torch.Tensor:
        return variance.rsqrt_().mul_(member.gradient)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this rank's elements.

    Raises:
        OptimizerError: no sums of rows and columns can be made of it.
    """
    sharded = parameter if isinstance(parameter, ShardedParameter) else None
    gradient = parameter.grad if sharded is None else sharded.local_grad
    name = getattr(parameter, "name", None) or "a parameter"
    if gradient is not None and (gradient.is_sparse or parameter.is_complex()):
        raise OptimizerError(f"Adafactor: {name} has a sparse gradient, or is complex")
    if gradient is not None and sharded is not None and sharded.spec.is_chunked:
        raise OptimizerError(
            f"Adafactor: {name} {tuple(parameter.shape)} is split by tensor parallelism, so no rank has whole sums of "
            "its rows and columns",
            hint="use AdamW with tensor parallelism",
        )
    return gradient


def _sum_over_ranks(members: Sequence[_Updated], parts: Sequence[list[torch.Tensor]]) -> None:
    """Sum what each member's ranks have, in place: one collective per group of ranks and device."""
    together: dict[Any, list[torch.Tensor]] = {}
    for member, tensors in zip(members, parts, strict=True):
        for group in member.parameter.spec.groups if isinstance(member.parameter, ShardedParameter) else ():
            together.setdefault((group, member.weights.device), []).extend(tensors)
    for (group, _), held in together.items():
        flat = torch.cat(held)
        all_reduce(flat, "Adafactor's sums", [group])
        for tensor, summed in zip(held, flat.split_with_sizes([t.numel() for t in held]), strict=True):
            tensor.copy_(summed)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as a view of shape (n,)."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach().view(-1)
