"""Prevent an optimizer step on all ranks if the gradients of any rank are not finite.

    reduction            `reduced` checks each part of a sum of gradients while it is still in the cache
    end of backward      an all-reduce of one byte tells all ranks whether any rank has found NaN or infinity; no rank
                         waits for it yet
    optimizer.step()     reads the byte. The gradients are searched for such values only if it is set

If sums overflow because of a loss scale, the gradient scaler skips the step, and the byte is not read.
"""

import itertools
import math
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import torch_private
from fullshard.comm.device import has_values
from fullshard.comm.waiting import waiting_in_step
from fullshard.core.errors import ConfigError, LifecycleError, NonFiniteError, first_of, plural
from fullshard.core.journal import JOURNAL, Happening
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extension
from fullshard.engine.lookup import require_unit
from fullshard.engine.schedule import Schedule

OnNonFinite = Literal["raise", "skip", "off"]
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Describes the non-finite gradients of a step. All ranks get the same description."""

    names: Mapping[str, str]  # names of the affected parameters, mapped to the kind of value found
    ranks: Collection[int]  # ranks that contributed such values to the sum, as far as they are known

    def __str__(self) -> str:
        shown = first_of([f"{name} ({kind})" for name, kind in self.names.items()], _SHOWN)
        ranks = " and ".join(map(str, sorted(self.ranks)))
        where = f"rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "an unknown rank"
        return f"gradients are not finite: {shown}; they came from {where}"


class NonFiniteGuard(Extension):
    """Checks the gradients of one model for NaN and infinity.

    Attributes:
        policy: what to do if gradients are not finite: raise an error on all ranks, skip the step, or nothing.
        limit: maximum number of consecutive steps to skip.
        skipped: number of steps skipped so far.
    """

    settings: ClassVar[Mapping[str, Any]] = {"policy": "raise", "limit": 10}
    policy: OnNonFinite
    limit: int

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._mesh = model.mesh
        self.skipped, self._in_a_row, self._is_early = 0, 0, False
        self._forget()

    def _forget(self) -> None:
        self._is_bad = False
        self._ranks: set[int] = set()
        self._squares: list[torch.Tensor] = []  # on an accelerator: the host does not wait for them in backward
        self._seen: torch.Tensor | None = None  # the flag of earlier backwards
        self._message: tuple[torch.Tensor, dist.Work | None] | None = None
        self._alarm: bool | None = None
        self._names: dict[str, str] | None = None

    def reduced(self, part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
        """Check a part of a reduced gradient for NaN and infinity. `comm.base.Inspector` describes the arguments."""
        if self.policy == "off" or not part.numel() or not has_values(part.device):
            return
        if part.device.type != "cpu":  # not `dot`, which is limited to 2^31 elements on CUDA
            self._squares.append(torch.linalg.vector_norm(part))
            return
        is_plain = part.dtype in (torch.float32, torch.float64)
        square = torch.dot(part, part) if is_plain else torch.linalg.vector_norm(part)
        if math.isfinite(square.item()) or bool(part.isfinite().all()):  # finite values can have an infinite square
            return
        self._is_bad = True
        others = {rank: term for rank, term in terms.items() if term.data_ptr() != part.data_ptr()}
        ranks = [rank for rank, term in others.items() if not bool(term.isfinite().all())]
        # The sum has replaced the term of one rank. If all other terms are finite, that rank is to blame.
        guilty, group = ranks or terms.keys() - others.keys(), self._mesh.shard_group
        self._ranks |= {self._mesh.rank if group is None else dist.get_global_rank(group, rank) for rank in guilty}

    def backward_begins(self) -> None:
        """Raise an error if the policy is `skip`, but an optimizer steps before all gradients are known."""
        self._is_early = self.model.backward.reducer.publishes_early
        if self._is_early and self.policy == "skip":
            raise LifecycleError(
                "steps with non-finite gradients must be skipped, but the optimizer steps in backward, before all "
                "gradients are known",
                hint="let optimizers step after backward, or call set_nonfinite_gradients('raise')",
            )

    def doubts_gradients(self) -> bool:
        """Return whether this rank has found non-finite gradients since the last step."""
        if self._squares or self._seen is not None:
            self._is_bad, self._seen = bool(self._flag()), None
        return self._is_bad

    def _flag(self) -> torch.Tensor:
        """Return a uint8 flag of shape (1,) that is 1 if this rank has found non-finite gradients."""
        flag = torch.full((1,), self._is_bad, dtype=torch.uint8, device=self._mesh.device)
        if self._seen is not None:
            flag |= self._seen
        if self._squares:
            squares = torch.stack([square.float() for square in self._squares])
            self._squares.clear()
            flag |= squares.isfinite().all().logical_not()
            self._seen = flag.clone()  # the flag itself will be reduced over all ranks
        return flag

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Start to send this rank's flag, which covers earlier backwards, to the other ranks, without waiting."""
        if used:
            self._announce()
        if self._is_early and (finding := self._find(p.name for p in self.model.parameters())):
            raise NonFiniteError(
                f"rank {self._mesh.rank}, step {self.model.steps + 1} of this process: {finding}; parameters with "
                "gradients computed earlier in this backward have already been updated, but those with non-finite "
                "gradients have not",
                hint="load a checkpoint; an optimizer that steps after backward would not have updated any parameter",
            )

    def _announce(self) -> None:
        if self.policy == "off" or not has_values(self._mesh.device):
            return
        mesh, flag, work = self._mesh, self._flag(), None
        group = mesh.control_group if mesh.device.type == "cpu" else mesh.world_group
        with torch_private.uncounted():
            if group is not None:
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
            for outer in self.model.outer_groups():
                if work is not None:
                    work.wait()
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=outer, async_op=True)
        self._message, self._alarm = (flag, work), None

    @property
    def is_alarmed(self) -> bool:
        """Return whether any rank has found non-finite gradients since the last step. All ranks get the same result."""
        if self._message is None:
            return False
        if self._alarm is None:
            flag, work = self._message
            if work is not None:
                work.wait()
            self._alarm = bool(flag.item())  # the host waits here, once a step
        return self._alarm

    def before_clipping(self) -> None:
        """Record which gradients on this rank are not finite before they are clipped, which makes all of them NaN."""
        if self._names is None and self.is_alarmed:
            self._names = self._look_through()

    def _look_through(self) -> dict[str, str]:
        bad = {}
        for parameter in self.model.parameters():
            gradient = parameter.local_grad
            if gradient is not None and not bool(gradient.isfinite().all()):
                bad[parameter.name] = "NaN" if bool(gradient.isnan().any()) else "infinite"
        return bad

    def _find(self, held: Iterable[str]) -> NonFinite | None:
        """Return which gradients are not finite now, or None. This is a collective if the guard is alarmed."""
        if not self.is_alarmed:
            return None
        now = self._look_through()
        names: dict[str, str] = {}
        known: dict[str, str] = {}
        ranks: set[int] = set()
        found = self._mesh.all_gather_object((now, self._names or {}, self._ranks))
        for outer in self.model.outer_groups():
            everything = [found] * dist.get_world_size(outer)
            with waiting_in_step("the names of gradients that are not finite", [outer]):
                dist.all_gather_object(everything, found, group=outer)
            found = list(itertools.chain.from_iterable(everything))
        for there, before, sources in found:
            names |= there
            known |= before
            ranks |= sources
        if not names:
            self._forget()
            return None
        if not any(name in names for name in held):
            return None  # the gradients belong to another optimizer
        self._forget()
        return NonFinite({name: kind for name, kind in known.items() if name in names} or names, ranks)

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Handle non-finite gradients alike on all ranks: set all to None (`skip`) or raise `NonFiniteError`."""
        _left_out.discard(optimizer)
        if getattr(optimizer, "found_inf", None) is not None:
            return  # set by a scaler: the optimizer's kernel skips the step
        finding = self._find(p.name for bucket in buckets for p in bucket.sharded_parameters)
        if finding is None:
            self._in_a_row = 0
            return
        where = f"rank {self._mesh.rank}, step {self.model.steps + 1} of this process: {finding}"
        if self.policy != "skip":
            raise NonFiniteError(
                f"{where}; nothing was updated",
                hint=(
                    "inspect that rank's batch, or lower the learning rate; set training.nonfinite_gradients = skip "
                    "(model.set_nonfinite_gradients('skip')) to skip such steps"
                ),
            )
        self._leave_out(finding)
        if self._mesh.is_first:
            JOURNAL.note(Happening.SKIP, str(finding), skipped=self.skipped)
            warnings.warn(f"{where}; the step is skipped ({self.skipped} so far)", stacklevel=4)
        _left_out.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _leave_out(self, finding: NonFinite) -> None:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self.limit:
            raise NonFiniteError(
                f"{finding}; already skipped {plural(self.limit, 'consecutive step')}",
                hint="lower the learning rate, or resume from an earlier checkpoint",
            )


_left_out: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def was_left_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skipped its last step because its gradients were not finite."""
    return optimizer in _left_out


class NonFiniteMethods:
    """Methods of `FSDPModule` that configure the check for non-finite gradients."""

    def set_nonfinite_gradients(self, policy: str, *, limit: int = 10) -> None:
        """Choose what happens in a step if the gradients of any rank are NaN or infinite.

        The setting applies to the whole model.

        Args:
            policy: `raise` raises a `NonFiniteError` on all ranks before anything is changed. `skip` makes all ranks
                skip the step and drop the optimizer's gradients. `off` disables the check.
            limit: maximum number of consecutive steps to skip. If the next step would also be skipped, the error is
                raised instead.

        Raises:
            ConfigError: The policy does not exist, or the limit is less than 1.
        """
        if policy not in get_args(OnNonFinite):
            raise ConfigError(
                f"{policy!r} is not a valid policy for non-finite gradients", hint="use raise, skip or off"
            )
        if limit < 1:
            raise ConfigError(
                f"the limit on consecutive skipped steps is {limit}, expected 1 or more", hint="use 1 or more"
            )
        guard = NonFiniteGuard.of(require_unit(cast("nn.Module", self)).schedule)
        guard.policy, guard.limit = policy, limit  # type: ignore[assignment]
