"""Gradients of virtual ranks, added up in one order at any number of real ones; see `core.virtual_ranks`.

A backward is one round, and what it reduces over the ranks is a subtree. At its end `RoundSums` goes on with the upper
levels of the tree, in each rank's own interval; after the last round of a step the root is published as `.grad`.
Clipping asks for `square_sum`, which is the same bits wherever parameters are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import all_reduce
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.core.virtual_ranks import BLOCK_NUMEL, rounds_of
from fullshard.engine.reduction_settings import ReductionSettings

_BLOCKS = 256
"""Blocks whose squares are added up at a time: 1 MiB of float32, which the cache holds."""

_MANTISSA_BITS = 24
_LEAST_EXPONENT, _MOST_EXPONENT = -148, 128
"""Of float32 as `frexp` has them."""
_EXPONENTS = _MOST_EXPONENT - _LEAST_EXPONENT + 1


class RoundSums:
    """Adds up a bucket's gradients of 2**k rounds as they come, in a balanced binary tree.

    Held are at most k sums, like the ones of a binary counter: of the last 1, 2, 4 ... rounds.

    Args:
        rounds: how many there are.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._levels: list[torch.Tensor | None] = []
        self._number = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that are held."""
        return sum(level.nbytes for level in self._levels if level is not None)

    def add(self, term: torch.Tensor | None) -> torch.Tensor | None:
        """Add what a round has given; None: nothing.

        Returns:
            After the last round what all have given, None if nothing; before it None.
        """
        level, self._number = 0, self._number + 1
        number = self._number
        while number % 2 == 0:  # the subtree to the left is complete, too
            left, self._levels[level] = self._levels[level], None
            term = left if term is None else term if left is None else left.add_(term)
            number, level = number // 2, level + 1
        if self._number == self._rounds:
            self.clear()
            return term
        self._levels += [None] * (level + 1 - len(self._levels))
        # What a reduction returns may be a part of the memory that it read.
        is_part = term is not None and term.untyped_storage().nbytes() > term.nbytes
        self._levels[level] = term.clone() if term is not None and is_part else term
        return None

    def clear(self) -> None:
        """Back to the first round."""
        self._levels, self._number = [], 0


class Rounds:
    """Where a model is among the rounds of a step.

    Args:
        count: how many there are; None: there are none.
        modules: the units', whose buffers are the same on all ranks and are to stay so.

    Attributes:
        number: of those that have gone by in this step.
    """

    def __init__(self, count: int | None = None, modules: Iterable[nn.Module] = ()) -> None:
        self.count, self.number = count, 0
        self._modules = list(modules)
        self._buffers: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._is_first = count is not None

    @classmethod
    def of(cls, counts: Iterable[int | None], modules: Iterable[nn.Module]) -> Rounds:
        """Those of a model, whose buckets have `counts`.

        Raises:
            ConfigError: not all the same.
        """
        different = set(counts)
        if len(different) > 1:
            raise ConfigError(
                "some units of the model have other virtual_ranks than others",
                hint="give all of them the same policy",
            )
        return cls(next(iter(different), None), modules)

    def begin_forward(self) -> None:
        """Before the first of a process: remember what forward is not to change."""
        if self._is_first and torch.is_grad_enabled():
            named = (pair for module in self._modules for pair in module.named_buffers())
            found = {id(buffer): (name, buffer, buffer.clone()) for name, buffer in named}
            self._buffers = list(found.values())

    def check_backward(self, settings: Sequence[ReductionSettings], *, keeps: bool, steps: bool) -> None:
        """Every backward is a round, and a round ends in each rank's own interval, or bits would differ.

        Args:
            settings: of every unit.
            keeps: whether gradients of any stay whole and unreduced.
            steps: whether an optimizer steps in backward.

        Raises:
            LifecycleError: it does not.
        """
        problem = (
            "gradients of a round are kept whole (no_sync, SHARD_OPTIMIZER)"
            if keeps or not all(each.requires_all_reduce for each in settings)
            else "a hook sees gradients of ranks, not of virtual ranks"
            if any(each.hook is not None for each in settings)
            else "an optimizer steps in backward, before the last round"
            if steps
            else ""
        )
        if problem:
            raise LifecycleError(
                f"{problem}, so that bits would differ between numbers of ranks",
                hint="leave that out, or virtual_ranks",
            )

    def end_one(self) -> None:
        """One has gone by.

        Raises:
            LifecycleError: forward has changed a buffer, each rank its own: of how many rounds depends on the ranks.
        """
        assert self.count is not None  # noqa: S101 -- there are some
        self.number = (self.number + 1) % self.count
        buffers, self._buffers, self._is_first = self._buffers, [], False
        for name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                raise LifecycleError(
                    f"buffer {name!r} was changed by a forward (running statistics?), by each rank's slices alone, so "
                    "that it would differ between numbers of ranks",
                    hint="use a norm without running statistics (GroupNorm, LayerNorm), or leave virtual_ranks out",
                )

    def check_complete(self) -> None:
        """Raise `LifecycleError` if an optimizer's step comes too early."""
        if self.number:
            raise LifecycleError(
                f"an optimizer's step after {self.number} of {self.count} backwards: each of a rank's slices of the "
                "batch is one",
                hint="step after the last one; with an Accelerator, inside `with accelerator.accumulate(model)`",
            )

    def clear(self) -> None:
        """Back to the first."""
        self.number = 0


def check_rounds(
    mesh: Mesh,
    virtual_ranks: int | None,
    *,
    reduce_dtype: torch.dtype | None,
    is_extended: bool,
    by_rows: bool,
    is_tiled: bool,
) -> int | None:
    """Rounds of a step; None where gradients are summed as they come.

    Args:
        mesh: the ranks.
        virtual_ranks: how many there are to be; None: none.
        reduce_dtype: in which the gradients of a bucket are summed, if it has any.
        is_extended: whether its parameter says itself how it is gathered.
        by_rows: whether `shard_placement_fn` has asked for rows of its parameter.
        is_tiled: whether tensor parallelism has split a parameter of it.

    Raises:
        ConfigError: the same bits at any number of ranks cannot be promised.
    """
    if virtual_ranks is None:
        return None
    problem = ""
    if mesh.device.type != "cpu":
        problem = f"on {mesh.device.type}: its kernels and collectives add up in orders of their own"
    elif not (mesh.reduce.adds_in_tree and mesh.replicate.adds_in_tree):
        problem = "with collectives that add up in an order of their own"
    elif is_tiled:
        problem = "with tensor parallelism, which adds up within a layer"
    elif is_extended:
        problem = "with parameters that say themselves how they are gathered"
    elif by_rows:
        problem = "with parameters that shard_placement_fn has cut between rows"
    elif reduce_dtype not in (None, torch.float32):
        problem = f"with gradients summed in {reduce_dtype}"
    if problem:
        raise ConfigError(
            f"virtual_ranks = {virtual_ranks} {problem}, so that bits would differ between numbers of ranks",
            hint="train on CPUs, gradients summed in float32, without tensor parallelism; or leave virtual_ranks out",
        )
    return rounds_of(virtual_ranks, mesh.world_size)


def square_sum(gradients: Sequence[torch.Tensor], groups: Iterable[dist.ProcessGroup]) -> float:
    """The sum of the squares of all elements, over the ranks of `groups`: the same bits wherever they are cut.

    Within a block of a parameter it is a tree of float32. The blocks' sums are added up exactly, as integers, one for
    each exponent; so the order, and who has which block, make no difference. NaN and infinity come out as such.

    Args:
        gradients: this rank's intervals of parameters, each beginning with a block.
        groups: in which every rank has other blocks.
    """
    sums = [part for gradient in gradients for part in _block_sums(gradient)]
    bins = _exact(torch.cat(sums) if sums else torch.empty(0))
    all_reduce(bins, "the norm of gradients", groups)
    *counts, infinities, nans = bins.tolist()
    if nans or infinities:
        return float("nan" if nans else "inf")
    total: int = sum(count << place for place, count in enumerate(counts))
    return total / (1 << (_MANTISSA_BITS - _LEAST_EXPONENT))  # rounded once


def _block_sums(gradient: torch.Tensor) -> Iterable[torch.Tensor]:
    for part in gradient.reshape(-1).split(_BLOCKS * BLOCK_NUMEL):
        missing = -part.numel() % BLOCK_NUMEL
        squares = functional.pad(part.float(), (0, missing)).view(-1, BLOCK_NUMEL)
        squares = squares * squares
        while (width := squares.shape[1] // 2) > 0:
            squares = squares[:, :width] + squares[:, width:]
        yield squares.view(-1)


def _exact(values: torch.Tensor) -> torch.Tensor:
    """Units of each exponent's last place, shape (exponents + 2,); at the end how many infinities and NaNs."""
    mantissas, exponents = torch.frexp(values.where(values.isfinite(), 0.0))
    bins = torch.zeros(_EXPONENTS + 2, dtype=torch.int64)
    units = (mantissas * 2**_MANTISSA_BITS).long()
    bins.index_add_(0, exponents.long() - _LEAST_EXPONENT, units)
    bins[-2], bins[-1] = values.isinf().sum(), values.isnan().sum()
    return bins
