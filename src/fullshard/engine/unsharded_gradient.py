"""Unsharded gradients of one bucket, from autograd to the reduction of the bucket.

    collect     copy (and cast) parameter.grad into `full` and free it                when autograd has summed it
    hand_over   pass `full` to the reduction

`full` exists from the first gradient to the end of the reduction. Under `no_sync` it stays and accumulates. If the
reduction casts its input (`Collectives.widens`), `full` has the narrower compute dtype, in which autograd produces
gradients, until a second gradient of the same parameter is added.
"""

from collections.abc import Sequence
from itertools import compress

import torch

from fullshard.comm import torch_private
from fullshard.core.dtypes import collected
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import BucketLayout, Interval
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.end_of_backward import BucketEnd
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.precision import torch_dtype


class UnshardedGradient:
    """The gradients of a bucket that autograd has produced and that have not been passed to a reduction yet.

    Attributes:
        expected: number of parameters that require a gradient.
        fired: indices of the parameters whose gradient has arrived in this backward.
        used: for each parameter, whether it got a gradient since the last publication, possibly under `no_sync`.
        is_kept: whether part of the gradient is from earlier backwards. It stays set if this backward reduces it.
        used_up_by: the name of an option that has used up the reduced gradient within this backward; otherwise empty.
        full: the collected gradients, shape (F,); None if there are none.
    """

    def __init__(self, spec: BucketSpec, parameters: Sequence[ShardedParameter], *, storage_id: int | None) -> None:
        self._spec, self._parameters, self._storage_id = spec, parameters, storage_id
        self._originals: tuple[torch.Tensor, ...] = tuple(slot.parameter for slot in spec.slots)
        readers = [kind.from_autograd(slot) for kind, slot in zip(spec.kinds, spec.slots, strict=True)]
        self._readers = readers if any(readers) else []
        self.expected = len(parameters)
        self.fired: set[int] = set()
        self.used = bytearray(len(spec.slots))
        self.is_kept, self.used_up_by = False, ""
        self.full: torch.Tensor | None = None
        plan, widens = spec.plan, spec.mesh.reduce.widens
        self._first_dtype = torch_dtype(collected(plan.compute_dtype, plan.reduce_dtype, widens=widens))
        self._pieces: Sequence[torch.Tensor] = ()
        self._fresh: dict[int, torch.Tensor] = {}  # pieces that hold no gradient yet
        self._split = Split(spec.layout, own=Interval(0, spec.layout.full_numel))

    @property
    def exists(self) -> bool:
        """Return whether any gradient has been collected and not yet passed to a reduction."""
        return self.full is not None

    @property
    def is_complete(self) -> bool:
        """Return whether the gradients of all parameters that require one have arrived in this backward."""
        return len(self.fired) >= self.expected

    def collect(self, index: int, parameter: torch.Tensor) -> bool:
        """Add the new `.grad` of parameter `index`, if it has one, to `full`. Return whether the bucket is complete."""
        grad = parameter.grad
        if grad is None:
            return False
        parameter.grad = None  # frees its memory as soon as it is copied
        if self._readers and (reader := self._readers[index]) is not None:
            grad = reader(grad)
        piece = self._fresh.pop(index, None)
        try:
            if piece is None or self.used_up_by or grad.requires_grad or grad.is_sparse:
                self._add(index, grad, piece)
            else:  # the usual case, without a call
                self.used[index] = True
                piece.copy_(grad.ravel())
        except RuntimeError:  # its shape differs from that of its piece
            self._check_data(index)
            raise
        self.fired.add(index)
        return len(self.fired) >= self.expected  # `is_complete`, inlined to save a call per gradient

    def end_backward(self) -> None:
        """Clear the record of which gradients arrived, and record whether any are left for the next backward."""
        self.is_kept = self.exists
        self.fired.clear()

    def _add(self, index: int, grad: torch.Tensor, piece: torch.Tensor | None) -> None:
        """Collect `grad` in `piece`, which is unused. If it is None, allocate memory or add to the piece in use."""
        if self.used_up_by:
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[index].name}: another part of its gradient "
                "arrived in a backward that had already consumed the gradient",
                hint=f"do not use {self.used_up_by}, or do not share parameters between reentrant checkpoint segments",
            )
        if self.full is None:
            self._begin()
            piece = self._fresh.pop(index)
        self.used[index] = True  # stays after `end_backward`: under `no_sync` a later one publishes it
        is_first = piece is not None
        if piece is None:
            self._widen()
            piece = self._pieces[index]
        if grad.requires_grad:
            grad = grad.detach()  # under create_graph it would keep its graph alive
        if grad.is_sparse:
            grad = grad.to_dense()
        if is_first:
            piece.copy_(grad.ravel())
        else:
            piece.add_(grad.ravel())

    def _check_data(self, failed: int | None = None) -> None:
        """Raise an error if a parameter with a gradient no longer has its data in the bucket."""
        # `failed` is the index of a parameter with a gradient that could not be collected.
        if self._storage_id is None:
            return
        held = self._originals
        if self._readers:
            held = tuple(kind.plain(each) for kind, each in zip(self._spec.kinds, held, strict=True))
        ids = list(map(torch_private.storage_id, map(torch.Tensor.untyped_storage, held)))
        if ids.count(self._storage_id) == len(ids):
            return
        for index, found in enumerate(ids):
            is_filled = self.full is not None and index not in self._fresh
            if found != self._storage_id and (index == failed or is_filled):
                raise LifecycleError(
                    f"rank {self._spec.mesh.rank}, parameter {self._parameters[index].name}: forward assigned other "
                    f"data ({held[index].dtype}) to it, and the optimizer would never update this data",
                    hint="if the layer assigns `.data` in forward to cast its parameters, cast it before sharding",
                )

    def _begin(self) -> torch.Tensor:
        """Allocate `full` for the gradients, split it into a piece per parameter, and set the gaps to zero."""
        self.full = self._empty(self._first_dtype)
        self._pieces, gaps = self._split.apply(self.full)
        for gap in gaps:
            gap.zero_()
        self._fresh = dict(enumerate(self._pieces))
        return self.full

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        mesh = self._spec.mesh
        return mesh.reduce.staging(self._spec.layout.full_numel, dtype, mesh.device)

    def _widen(self) -> None:
        """Cast the collected gradients to the dtype of the reduction, because more gradients will be added to them."""
        if self.full is not None and self.full.dtype != self._spec.reduce_dtype:
            self.full = self._empty(self._spec.reduce_dtype).copy_(self.full)
            self._pieces, _ = self._split.apply(self.full)
            self._fresh = {index: self._pieces[index] for index in self._fresh}

    def hand_over(self) -> torch.Tensor:
        """Return `full`, shape (F,), with zeros for unused parameters. Gradients that arrive later get new memory."""
        self._check_data()
        full = self._begin() if self.full is None else self.full  # unused on this rank, but perhaps not on another
        for piece in self._fresh.values():
            piece.zero_()
        self._free()
        return full

    def _free(self) -> None:
        self.full, self._pieces = None, ()
        self._fresh.clear()

    def bucket_end(self, *, is_reduced: bool) -> BucketEnd:
        """Return the bucket's part of the message that this rank sends at the end of backward."""
        if self.exists:
            self._check_data()
        return BucketEnd(is_reduced, not is_reduced, self.exists, self.used)

    def clear_used(self) -> None:
        """Clear the record of which parameters were used, because their gradients have been published on all ranks."""
        self.used = bytearray(len(self.used))

    def reset(self) -> None:
        """Discard all gradients and the record of used parameters, after a failed backward."""
        self._free()
        self.end_backward()
        self.clear_used()


class Split:
    """Splits the interval `own` of a bucket into its parameters, and the gaps between them, in one torch operation."""

    def __init__(self, layout: BucketLayout, *, own: Interval) -> None:
        self._sizes: list[int] = []
        self._are_gaps: list[bool] = []
        end = own.start
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            held = Interval(offset, offset + spec.numel).intersect(own)
            if held.numel and held.start > end:
                self._add(held.start - end, is_gap=True)
            self._add(held.numel, is_gap=False)
            end = held.stop if held.numel else end
        if own.stop > end:
            self._add(own.stop - end, is_gap=True)
        self._are_parameters = [not is_gap for is_gap in self._are_gaps]

    def _add(self, numel: int, *, is_gap: bool) -> None:
        self._are_gaps.append(is_gap)
        self._sizes.append(numel)

    def apply(self, flat: torch.Tensor) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        """Return 1-D views of `flat`: one for each parameter's piece, which may be empty, and one for each gap."""
        pieces = flat.split_with_sizes(self._sizes)
        return list(compress(pieces, self._are_parameters)), list(compress(pieces, self._are_gaps))
