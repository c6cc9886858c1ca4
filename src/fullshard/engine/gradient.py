"""Gradients of one bucket: collected unsharded during backward, reduced, and published as sharded `.grad`s.

autograd      see `engine.unsharded_gradient`                                    per parameter, as it appears
launch        reduce-scatter of that along the shard axis, and scale             once per backward
advance       all-reduce of the shard along the replicate axis                   when the next bucket launches
and its way to the host, if main weights are there
early         add to the main gradient of the micro-batches before, if that      when it has arrived
is all that is left to do
finish        add to the main gradient, set the sharded parameters' `.grad`      at the end of backward
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

import torch

from fullshard.comm.base import Work
from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventKind
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.parameter import ShardedParameter, are_same, local_gradients
from fullshard.engine.precision import torch_dtype
from fullshard.engine.rounds import RoundSums
from fullshard.engine.unsharded_gradient import Cut, UnshardedGradient


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
        unsharded: what no reduction has taken yet.
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
        self._parameters, self._emit = parameters, emit
        self.main_dtype = torch_dtype(spec.plan.main_gradient_dtype)
        self.unsharded = UnshardedGradient(spec, parameters, storage_id=storage_id)
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
        self._cut = Cut(spec.layout, own=spec.layout.rank_interval(spec.mesh.shard_rank))

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
        return being_reduced + self.unsharded.nbytes

    @property
    def reduced_nbytes(self) -> int:
        """Bytes on the device of this rank's interval of gradients, as far as they are reduced, published or not."""
        found = (shard for shard in (self._held, self._earlier, self._main) if shard is not None)
        shards = [shard for shard in found if shard.device.type == self._spec.mesh.device.type]
        being_added = 0 if self._replicating is None else self._spec.layout.shard_numel * self.dtype.itemsize
        return being_added + sum(shard.nbytes for shard in shards)

    def launch(self) -> None:
        """Reduce what was collected. What was not used counts as zero, so every rank reduces the same shape.

        An earlier reduction in the same backward has been advanced.

        Raises:
            LifecycleError: see `check_whole`.
        """
        self.check_whole()
        full = self.unsharded.hand_over()
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

        Only where the `.grad`s are still its parts, and nothing else is to be done with this sum. Not on the host,
        which would wait for a copy, and compute, while it has the rest of backward to issue.
        """
        has_more_to_do = self._sums is not None or self._spec.reducing.hook is not None or self._spec.main_is_on_host
        if self._main is None or has_more_to_do:
            return
        self.advance()
        if self._replicating is not None and self._is_untouched(local_gradients(self._parameters)):
            self._main.add_(self._arrive(self._replicating))
            self._is_accumulated = True

    def _arrive(self, replicating: Work) -> torch.Tensor:
        """What one backward has reduced along both axes, in one reduction or two."""
        shard, self._replicating = replicating.wait(), None
        if self._earlier is not None:
            shard.add_(self._earlier)
            self._earlier = None
        return shard

    def finish(self, used: bytearray) -> bool:
        """Wait for the reduction and publish it; False if there is none. The caller forgets what was used.

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
        shard = self._arrive(self._replicating)
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
            used, self._used_in_rounds = self._used_in_rounds, bytearray(len(self._parameters))
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
        pieces, _ = self._cut.apply(self._rounded)
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
        self._reducing = self._replicating = self._earlier = None
        self.unsharded.clear()
        self.forget_rounds()

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
            self._round, self._used_in_rounds = None, bytearray(len(self._parameters))
