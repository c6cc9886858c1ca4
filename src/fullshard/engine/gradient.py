"""Gradients of one bucket: collected unsharded during backward, reduced, and published as sharded `.grad`s.

    autograd      parameter.grad -> copied (and cast) into `full`, unless made       per parameter, as it appears
                  there (`engine.weight_gradients`), then freed
    launch        reduce-scatter of `full` along the shard axis, and scale           once per backward
    advance       all-reduce of the shard along the replicate axis                   when the next bucket launches
                  and its way to the host, if main weights are there
    early         add to the main gradient of the micro-batches before, if that      when it has arrived
                  is all that is left to do
    finish        add to the main gradient, set the sharded parameters' `.grad`      at the end of backward

`full` lives from the first gradient to the end of the reduction. Under `no_sync` it stays and accumulates. Where the
reduction casts what it reads (`HostPages.widens`), `full` is in the narrower dtype that parameters compute in, in
which autograd makes gradients, until a second one is added to one of them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import Work
from fullshard.core.dtypes import collected
from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventKind
from fullshard.core.layout import BucketLayout, Interval
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.parameter import ShardedParameter, are_same, local_gradients
from fullshard.engine.precision import torch_dtype
from fullshard.engine.rounds import RoundSums
from fullshard.engine.tile import storage_of


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that is still to be computed: the product of two matrices."""

    left: torch.Tensor
    right: torch.Tensor

    def value(self) -> torch.Tensor:
        """In memory of its own."""
        return self.left.mm(self.right)

    def write(self, piece: torch.Tensor) -> torch.Tensor:
        """Into `piece`, shape (n,); returns it in its own shape."""
        return torch.mm(self.left, self.right, out=piece.view(self.left.shape[0], self.right.shape[1]))


class Gradient:
    """The gradient side of a trainable bucket.

    Whoever calls `launch`, `advance` and `finish` has turned autograd off.

    Args:
        spec: of the bucket.
        parameters: sharded ones, in the order of `spec.slots`.
        storage_id: which storage the unsharded parameters are views of; None if that is not known.
        emit: tells the sink of a copy to the host.

    Attributes:
        dtype: in which gradients are summed over backwards and ranks.
        main_dtype: in which they are accumulated over micro-batches: the wider of `dtype` and the stored dtype.
        fired: indices of the parameters whose gradient has appeared in this backward.
        used: for each parameter, whether it has appeared since the last `finish`, maybe under `no_sync`.
        is_used_up: an optimizer has used it up within this backward (`engine.step.in_backward`).
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[ShardedParameter],
        *,
        storage_id: int | None,
        emit: Callable[[EventKind, int, str], None],
    ) -> None:
        self._spec, self.dtype = spec, spec.reduce_dtype
        self._parameters, self._storage_id, self._emit = parameters, storage_id, emit
        self.main_dtype = torch_dtype(spec.plan.main_gradient_dtype)
        self.fired: set[int] = set()
        self.used = bytearray(len(spec.slots))
        self.is_used_up = False
        self._full: torch.Tensor | None = None
        plan, widens = spec.plan, spec.mesh.reduce.pages.widens
        self._first_dtype = torch_dtype(collected(plan.compute_dtype, plan.reduce_dtype, widens=widens))
        self._pieces: Sequence[torch.Tensor] = ()
        self._filled: set[int] = set()
        self._begun: dict[int, int] = {}
        self._lent: set[int] = set()
        self._reducing: Work | None = None
        self._replicating: Work | None = None
        self._earlier: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self._main: torch.Tensor | None = None
        self._rounded: torch.Tensor | None = None
        self._is_accumulated = False
        self._torn: list[int] = []
        self._published: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._sums = None if spec.rounds is None else RoundSums(spec.rounds)
        self._round: torch.Tensor | None = None
        self._used_in_rounds = bytearray(len(spec.slots))
        layout, own = spec.layout, spec.layout.rank_interval(spec.mesh.shard_rank)
        self._full_cut = _Cut(layout, own=Interval(0, layout.full_numel))
        self._shard_cut = _Cut(layout, own=own)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded gradient in `dtype`, although it may be collected in a narrower one."""
        return self._spec.layout.full_numel * self.dtype.itemsize

    @property
    def held_nbytes(self) -> int:
        """Bytes of the main gradient, or of what is to be one after the last round; 0 if there is none."""
        return (0 if self._main is None else self._main.nbytes) + (0 if self._sums is None else self._sums.nbytes)

    @property
    def collected_nbytes(self) -> int:
        """Bytes of unsharded gradients, those included that a reduction still reads."""
        being_reduced = 0 if self._reducing is None else self._spec.layout.full_numel * self.dtype.itemsize
        return being_reduced + (0 if self._full is None else self._full.nbytes)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes on the device of this rank's interval of gradients, as far as they are reduced, published or not."""
        found = (shard for shard in (self._held, self._earlier, self._main) if shard is not None)
        shards = [shard for shard in found if shard.device.type == self._spec.mesh.device.type]
        being_added = 0 if self._replicating is None else self._spec.layout.shard_numel * self.dtype.itemsize
        return being_added + sum(shard.nbytes for shard in shards)

    @property
    def is_collecting(self) -> bool:
        """Whether there are unsharded gradients that no reduction has taken yet."""
        return self._full is not None

    def collect(self, index: int, parameter: torch.Tensor) -> bool:
        """Take parameter `index`'s fresh `.grad` into `full`; False if there is none.

        Adds if this parameter has been collected before.
        """
        grad = parameter.grad
        if grad is None:
            return False
        parameter.grad = None  # its memory goes as soon as it is copied
        tile = self._spec.tiles[index]
        if tile is not None:
            grad = tile.of_gradient(grad)
        self._add(index, parameter, grad)
        self.fired.add(index)
        return True

    def takes_uses(self, index: int) -> bool:
        """Whether the sum over a parameter's uses is the same, bit for bit, if they are collected one by one.

        It is not where they are collected in another dtype than autograd adds them up in, or where a backward before,
        under `no_sync`, has left something.
        """
        return self._is_as_made and (index not in self._filled or index in self._begun)

    @property
    def _is_as_made(self) -> bool:
        """Whether gradients are collected in the dtype that autograd makes them in."""
        dtype = self._first_dtype if self._full is None else self._full.dtype
        return dtype == self._spec.compute_dtype

    def take(self, index: int, grad: torch.Tensor | Product) -> bool:
        """Collect `grad`, what one use of parameter `index` gives, unless autograd must add it up."""
        if not self.takes_uses(index):
            return False
        self._add(index, self._spec.slots[index].parameter, grad)
        self._begun[index] = torch_private.backward_under_way()
        return True

    def lend(self, index: int) -> torch.Tensor | None:
        """Where parameter `index`'s gradient will be, shape (n,), for who can make it there; None if it must be added.

        `collect` finds it there then, unless autograd has added another use's to it, in other memory.
        """
        if not self._is_as_made or self.is_used_up or index in self._filled or index in self._lent:
            return None
        if self._full is None:
            self._begin()
        self._lent.add(index)
        return self._pieces[index]

    def end_backward(self) -> None:
        """Forget what appeared in it."""
        self.fired.clear()
        self._begun.clear()
        self._lent.clear()

    def _add(self, index: int, parameter: torch.Tensor, grad: torch.Tensor | Product) -> None:
        if self.is_used_up:
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[index].name}: "
                "another part of its gradient appeared after the optimizer had stepped in backward",
                hint="do not share parameters between parts under reentrant checkpointing, or leave step_in_backward",
            )
        found = self._storage_id and torch_private.storage_id(storage_of(parameter))
        if found != self._storage_id:
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[index].name}: "
                f"forward gave it other data ({parameter.dtype}), which the optimizer would never update",
                hint="a layer that assigns `.data` in forward does this, often to cast it: cast it before sharding",
            )
        if self._full is None:
            self._begin()
        is_first = index not in self._filled
        is_continued = self._begun.get(index) == torch_private.backward_under_way() and index not in self.fired
        if not is_first and not is_continued:  # not a part of the same of autograd's sums
            self._widen()
        piece = self._pieces[index]
        self._filled.add(index)
        self.used[index] = True  # stays after `end_backward`: under `no_sync` a later one publishes it
        if isinstance(grad, Product):
            if is_first:
                grad.write(piece)
                return
            grad = grad.value()
        if grad.requires_grad:
            grad = grad.detach()  # under create_graph it would bring its graph with it
        if grad.is_sparse:
            _add_rows(piece, grad, is_first=is_first)
        elif index in self._lent and grad.data_ptr() == piece.data_ptr():
            pass  # made in place; adding would double it
        elif is_first:
            piece.copy_(grad.reshape(-1))
        else:
            piece.add_(grad.reshape(-1))

    def _begin(self) -> torch.Tensor:
        """Memory for the unsharded gradients, and a piece of it for each parameter; zeros between them."""
        self._full = self._empty(self._first_dtype)
        self._pieces, gaps = self._full_cut.apply(self._full)
        for gap in gaps:
            gap.zero_()
        return self._full

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        mesh = self._spec.mesh
        return mesh.reduce.pages.staging(self._spec.layout.full_numel, dtype, mesh.device)

    def _widen(self) -> None:
        """Cast what was collected to `dtype`, before something is added to it."""
        if self._full is not None and self._full.dtype != self.dtype:
            self._full = self._empty(self.dtype).copy_(self._full)
            self._pieces, _ = self._full_cut.apply(self._full)

    def launch(self) -> None:
        """Reduce what was collected. What was not used counts as zero, so every rank reduces the same shape.

        An earlier reduction in the same backward has been advanced.

        Raises:
            LifecycleError: see `check_whole`.
        """
        self.check_whole()
        full = self._begin() if self._full is None else self._full  # nothing used here, but maybe on another rank
        if len(self._filled) < len(self._pieces):
            for index, piece in enumerate(self._pieces):
                if index not in self._filled:
                    piece.zero_()
        # Before the call: what appears later in this backward goes into new memory, and `full` is the reduction's.
        self._full, self._pieces, self._filled = None, (), set()
        self._reducing = self._spec.mesh.reduce.reduce_scatter(
            full,
            tag=self._spec.tag,
            divisor=self._spec.reducing.divisor,
            packing=self._spec.reduce_packing,
            dtype=self.dtype,
            watch=self._spec.reducing.watch,
        )

    def advance(self) -> None:
        """Once reduced along the shard axis, go on along the replicate axis."""
        if self._reducing is None:
            return
        shard, self._reducing = self._reducing.wait(), None  # this lets go of the unsharded gradient's memory
        if self._replicating is not None:  # a bucket was reduced twice in one backward: both count
            if self._sums is not None:
                raise LifecycleError(
                    f"rank {self._spec.mesh.rank}, parameter {self._parameters[0].name}: its gradient was reduced "
                    "twice in one backward, so that the order of the sum is another one at each number of ranks",
                    hint="use non-reentrant checkpointing, or leave virtual_ranks out",
                )
            self._earlier = self._replicating.wait()
        if self._held is not None:  # of backwards that left the replicas out
            shard.add_(self._held)
            self._held = None
        if self._spec.reducing.requires_all_reduce:
            replicate = self._spec.mesh.replicate
            reduce = replicate.all_reduce if self._sums is None else replicate.all_reduce_in_tree
            self._replicating = reduce(shard, tag=self._spec.tag)
            if self._spec.main_is_on_host and self._spec.storage.host is not None:
                # Now, not in `finish`: the copy goes on beside the rest of backward.
                self._replicating = self._spec.storage.host.send(self._replicating)
                self._emit(EventKind.TO_HOST, shard.nbytes, "gradient")
        else:
            self._held = shard

    def accumulate_early(self) -> None:
        """Add what has arrived along both axes to the main gradient, so that its memory goes before backward ends.

        Only where every `.grad` is a part of that already, and nothing else is to be done with this sum: then it does
        not matter what the other ranks have used.
        """
        self.advance()
        has_more_to_do = self._sums is not None or self._spec.reducing.hook is not None or self._spec.main_is_on_host
        if self._replicating is None or self._main is None or self._earlier is not None or has_more_to_do:
            return
        grads = local_gradients(self._parameters)
        if all(map(operator.is_not, self._published, itertools.repeat(None))) and self._is_untouched(grads):
            shard, self._replicating = self._replicating.wait(), None
            self._main.add_(shard)
            self._is_accumulated = True

    def finish(self, used: bytearray) -> bool:
        """Wait for the reduction and publish it; False if there is none. The caller calls `forget_used` later.

        Args:
            used: for each parameter, whether it got a gradient on any rank. The others keep `.grad` as it is.
        """
        self.advance()
        if self._is_accumulated:
            self._finish_early(used)
            if self._replicating is None:
                return True
        if self._replicating is None:
            return False
        shard, self._replicating = self._replicating.wait(), None
        if self._earlier is not None:
            shard.add_(self._earlier)
            self._earlier = None
        self._spec.reducing.call_hook(shard)  # sees this backward's sum alone, not what was accumulated before
        if self._sums is None:
            self._accumulate(shard.to(self.main_dtype), used)
        else:
            self._round = shard
            self._used_in_rounds = bytearray(map(operator.or_, self._used_in_rounds, used))
        return True

    def end_round(self) -> None:
        """A backward is over, in which this has got something or not; after the last of a step publish the sum."""
        if self._sums is None:
            return
        total, self._round = self._sums.add(self._round), None
        if total is not None:
            used, self._used_in_rounds = self._used_in_rounds, bytearray(len(self.used))
            self._accumulate(total.to(self.main_dtype), used)

    def _finish_early(self, used: bytearray) -> None:
        self._is_accumulated = False
        grads = local_gradients(self._parameters)
        if not self._is_untouched(grads):
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[0].name}: a `.grad` of its unit was changed "
                "during backward, after this micro-batch's gradients were added to it",
                hint="change gradients between backward and optimizer.step()",
            )
        self._publish(grads, used)

    def forget_used(self) -> None:
        """What was used has been published on all ranks."""
        self.used = bytearray(len(self.used))

    def _accumulate(self, shard: torch.Tensor, used: bytearray) -> None:
        """Add to the main gradient if the published `.grad`s are still ours, else start a new one from theirs."""
        grads = local_gradients(self._parameters)
        if self._main is not None and self._is_untouched(grads):
            self._main.add_(shard)
        else:
            for part, grad in zip(self._spec.slices, grads, strict=True):
                if grad is not None:  # the script has put another there, or changed ours: that is what is added to
                    shard[part].add_(grad)
            self._main = shard
            self._published, self._versions = [None] * len(grads), [0] * len(grads)
        self._publish(grads, used)

    def _publish(self, grads: list[torch.Tensor | None], used: bytearray) -> None:
        """Have the sharded parameters' `.grad`s, now `grads`, show the main gradient."""
        assert self._main is not None  # noqa: S101 -- something was added to it, or became it
        self._rounded = self._main.to(self._spec.dtype)  # itself, unless the dtypes differ
        watch = self._spec.reducing.watch
        if watch is not None and self._rounded.dtype is torch.float16 and self._rounded is not self._main:
            watch(self._rounded, {})  # what float32 holds may be more than that does
        pieces, _ = self._shard_cut.apply(self._rounded)
        for index, parameter in enumerate(self._parameters):
            grad = grads[index]
            if grad is None and not used[index]:
                continue
            if grad is None or self._published[index] is None or self._rounded is not self._main:
                grad = pieces[index]
                parameter.publish(grad)
            self._published[index], self._versions[index] = grad, grad._version

    def published(self, first: int, last: int) -> torch.Tensor | None:
        """Shape (S,): what the `.grad`s of parameters `first` to `last` are views of; None if not all of them are."""
        published = self._published[first : last + 1]
        grads = local_gradients(self._parameters[first : last + 1])
        is_whole = all(map(operator.is_not, published, itertools.repeat(None)))
        return self._rounded if is_whole and are_same(grads, published) else None

    def _is_untouched(self, grads: list[torch.Tensor | None]) -> bool:
        """Whether every `.grad` is the tensor published last, so that the main gradient holds its value.

        Where the dtypes differ the published tensor is a rounded copy, so a change in place counts as touched too.
        """
        copied = self.main_dtype != self._spec.dtype
        for current, grad, version in zip(grads, self._published, self._versions, strict=True):
            if current is not grad or (copied and grad is not None and grad._version != version):
                return False
        return any(published is not None for published in self._published)

    def release_if_cleared(self) -> None:
        """Give the memory of the main gradient back once the user has set every `.grad` to None."""
        if self._main is not None and all(grad is None for grad in local_gradients(self._parameters)):
            self._main = self._rounded = None
            self._published, self._versions = [], []

    def reset(self) -> None:
        """Forget everything collected or under way, after a failed backward.

        Published `.grad`s stay. If it had added to them already, nobody may go on with them: see `check_whole`.
        """
        for work in (self._reducing, self._replicating):
            if work is not None:
                work.wait()  # it writes into memory that is about to be let go
        if self._is_accumulated:
            self._torn, self._is_accumulated = [0 if grad is None else grad._version for grad in self._published], False
        self._reducing = self._replicating = self._full = self._earlier = None
        self._pieces = ()
        self._filled, self._lent, self.fired = set(), set(), set()
        self._begun = {}
        self.forget_rounds()
        self.forget_used()

    def check_whole(self) -> None:
        """What is published is the sum of whole backwards.

        Raises:
            LifecycleError: a backward that has failed has left a part of its gradients there, and nobody has cleared
                them since.
        """
        if not self._torn:
            return
        versions, self._torn = self._torn, []
        grads = local_gradients(self._parameters)
        if are_same(grads, self._published) and versions == [0 if grad is None else grad._version for grad in grads]:
            self._torn = versions
            raise LifecycleError(
                f"rank {self._spec.mesh.rank}, parameter {self._parameters[0].name}: its `.grad` has a part of a "
                "backward that failed beside the micro-batches before",
                hint="call optimizer.zero_grad() and begin the step again",
            )

    def forget_rounds(self) -> None:
        """The next backward is the first round."""
        if self._sums is not None:
            self._sums.clear()
            self._round, self._used_in_rounds = None, bytearray(len(self.used))


def _add_rows(piece: torch.Tensor, grad: torch.Tensor, *, is_first: bool) -> None:
    """Add the rows that a sparse gradient has to the collected one.

    Args:
        piece: shape (n,), what was collected.
        grad: n elements in their parameter's shape.
        is_first: `piece` has nothing yet.
    """
    if is_first:
        piece.zero_()
    if grad.sparse_dim() == 1 and grad.dense_dim() == 1:
        # Rows that were looked up several times are added up first, by the kernel and in the order of a dense gradient;
        # `coalesce` has an order of its own.
        indices, values = torch_private.rows_of(grad)
        rows, place = torch.unique(indices[0], return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(values, place, rows.numel(), -1, False)
        piece.view(grad.shape).index_add_(0, rows, sums.to(piece.dtype))
    else:
        piece.add_(grad.to_dense().reshape(-1))


class _Cut:
    """Cuts a flat tensor, the elements `own` of a bucket, into its parameters and the gaps between them, in one go."""

    def __init__(self, layout: BucketLayout, *, own: Interval) -> None:
        self._sizes: list[int] = []
        self._parameters: list[int] = []
        self._gaps: list[int] = []
        end = own.start
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            held = Interval(offset, offset + spec.numel).intersect(own)
            if held.numel and held.start > end:
                self._add(self._gaps, held.start - end)
            self._add(self._parameters, held.numel)
            end = held.stop if held.numel else end
        if own.stop > end:
            self._add(self._gaps, own.stop - end)

    def _add(self, kind: list[int], numel: int) -> None:
        kind.append(len(self._sizes))
        self._sizes.append(numel)

    def apply(self, flat: torch.Tensor) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        """1-D views of the parameters' parts, empty ones included, and of the gaps."""
        pieces = flat.split_with_sizes(self._sizes)
        if not self._gaps:
            return pieces, []
        return [pieces[i] for i in self._parameters], [pieces[i] for i in self._gaps]
