"""Sees to it that no optimizer steps with gradients that are not finite, on any rank.

    reduction            looks at every part of a sum that it makes anyway, while the cache has it: `watch`
    end of backward      one byte to all ranks, whether any has seen NaN or infinity; nobody waits for it: `announce`
    optimizer.step()     reads what has come: `find`. Only if a rank has seen something are gradients looked through

Sums that a loss scale makes overflow are none of its business: the scaler leaves that step out, and nobody reads.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.device import has_values
from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import STALLS, all_reduce
from fullshard.core.errors import ConfigError, NonFiniteError, first_of
from fullshard.engine.parameter import ShardedParameter

OnNonFinite = Literal["raise", "skip", "off"]
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Gradients that are not finite, the same on every rank.

    Attributes:
        names: of their parameters, and what was found.
        ranks: that gave it to the sum, as far as that is known.
    """

    names: Mapping[str, str]
    ranks: Collection[int]

    def __str__(self) -> str:
        shown = first_of([f"{name} ({kind})" for name, kind in self.names.items()], _SHOWN)
        ranks = " and ".join(map(str, sorted(self.ranks)))
        where = f"rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "a rank that is not known"
        return f"gradients are not finite: {shown}; they came from {where}"


class FiniteGuard:
    """Of one model.

    Args:
        mesh: the ranks that share it.
        parameters: all of them.

    Attributes:
        policy: what becomes of a step whose gradients are not finite: an error on all ranks, left out, or nothing.
        limit: how many steps in a row may be left out.
        skipped: how many were left out so far.
    """

    def __init__(self, mesh: Mesh, parameters: Callable[[], Iterable[ShardedParameter]]) -> None:
        self._mesh, self._parameters = mesh, parameters
        self.policy: OnNonFinite = "raise"
        self.limit = 10
        self.skipped = self._in_a_row = 0
        self._outer: list[dist.ProcessGroup] | None = None
        self._forget()
        _guards.add(self)

    def _forget(self) -> None:
        self._is_bad = False
        self._ranks: set[int] = set()
        self._squares: list[torch.Tensor] = []  # of an accelerator, for which the host does not wait in backward,
        self._seen: torch.Tensor | None = None  # and what those of earlier backwards have shown
        self._message: tuple[torch.Tensor, dist.Work | None] | None = None
        self._alarm: bool | None = None
        self._names: dict[str, str] | None = None

    def choose(self, policy: str, limit: int) -> None:
        """Set `policy` and `limit`.

        Raises:
            ConfigError: there is no such policy, or the limit is less than 1.
        """
        if policy not in get_args(OnNonFinite):
            raise ConfigError(f"no policy {policy!r} for gradients that are not finite", hint="use raise, skip or off")
        if limit < 1:
            raise ConfigError(f"a limit of {limit} steps in a row that may be left out", hint="use 1 or more")
        self.policy, self.limit = policy, limit  # type: ignore[assignment]

    # -- in backward --------------------------------------------------------------------------------------------

    def watch(self, part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
        """Look at a part of a sum of gradients; see `comm.base.Watch`."""
        if self.policy == "off" or not part.numel() or not has_values(part.device):
            return
        if part.device.type != "cpu":  # no `dot`: CUDA's takes no more than 2^31 elements
            self._squares.append(torch.linalg.vector_norm(part))
            return
        is_plain = part.dtype in (torch.float32, torch.float64)
        square = torch.dot(part, part) if is_plain else torch.linalg.vector_norm(part)
        if math.isfinite(square.item()) or bool(part.isfinite().all()):  # a square overflows before what it is of
            return
        self._is_bad = True
        others = {rank: term for rank, term in terms.items() if term.data_ptr() != part.data_ptr()}
        ranks = [rank for rank, term in others.items() if not bool(term.isfinite().all())]
        # The sum is where the term of a rank was; it is that one's fault if it is no other's.
        self._ranks |= {self._mesh.rank_at(rank) for rank in ranks or terms.keys() - others.keys()}

    @property
    def has_seen_any(self) -> bool:
        """Whether this rank has seen any since the last step."""
        if self._squares or self._seen is not None:
            self._is_bad, self._seen = bool(self._flag()), None
        return self._is_bad

    def _flag(self) -> torch.Tensor:
        """Shape (1,), uint8: whether this rank has seen any."""
        flag = torch.full((1,), self._is_bad, dtype=torch.uint8, device=self._mesh.device)
        if self._seen is not None:
            flag |= self._seen
        if self._squares:
            squares = torch.stack([square.float() for square in self._squares])
            self._squares.clear()
            flag |= squares.isfinite().all().logical_not()
            self._seen = flag.clone()  # the flag itself becomes all ranks'
        return flag

    def announce(self) -> None:
        """Tell the other ranks whether this one has seen any. Each does at the end of each backward; nobody waits.

        Not for an earlier message either: this one says what that has said, and arrives after it.
        """
        if self.policy == "off" or not has_values(self._mesh.device):
            return
        mesh, flag, work = self._mesh, self._flag(), None
        group = mesh.control_group if mesh.device.type == "cpu" else mesh.world_group
        with torch_private.uncounted():
            if group is not None:
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
            for outer in self._outer_groups():
                if work is not None:
                    work.wait()
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=outer, async_op=True)
        self._message, self._alarm = (flag, work), None

    def largest_outside(self, number: int) -> int:
        """The largest of what ranks have along axes that are not the mesh's. A collective if there are such."""
        for outer in self._outer_groups():
            message = torch.tensor([number], dtype=torch.uint8, device=self._mesh.device)
            all_reduce(message, "the end of backward", [outer], dist.ReduceOp.MAX)
            number = int(message)
        return number

    def _outer_groups(self) -> list[dist.ProcessGroup]:
        """Of ranks that share the model along an axis that is not the mesh's: tensor parallelism's."""
        if self._outer is None:
            tiles = (parameter.span.tile for parameter in self._parameters())
            self._outer = list(dict.fromkeys(tile.mesh.get_group() for tile in tiles if tile is not None))
        return self._outer

    # -- after it -----------------------------------------------------------------------------------------------

    @property
    def is_alarmed(self) -> bool:
        """Whether any rank has seen any since the last step, the same on every rank."""
        if self._message is None:
            return False
        if self._alarm is None:
            flag, work = self._message
            if work is not None:
                work.wait()
            self._alarm = bool(flag.item())  # the host waits here, once a step
        return self._alarm

    def note_names(self) -> None:
        """Before gradients are clipped, which makes all of them NaN: note which are not finite on this rank."""
        if self._names is None and self.is_alarmed:
            self._names = self._look_through()

    def _look_through(self) -> dict[str, str]:
        bad = {}
        for parameter in self._parameters():
            gradient = parameter.local_grad
            if gradient is not None and not bool(gradient.isfinite().all()):
                bad[parameter.name] = "NaN" if bool(gradient.isnan().any()) else "infinite"
        return bad

    def find(self, held: Iterable[str]) -> NonFinite | None:
        """What is wrong with the gradients of the parameters called so; None: nothing. A collective if it is alarmed.

        Names are only asked for then.

        Gradients may have been mended since, or dropped: it is what they are now that counts.
        """
        if not self.is_alarmed:
            return None
        now = self._look_through()
        names: dict[str, str] = {}
        known: dict[str, str] = {}
        ranks: set[int] = set()
        found = self._mesh.all_gather_object((now, self._names or {}, self._ranks))
        for outer in self._outer_groups():
            everything = [found] * dist.get_world_size(outer)
            with STALLS.waiting_in([outer], "the names of gradients that are not finite", in_step=True):
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
            return None  # those of another optimizer
        self._forget()
        return NonFinite({name: kind for name, kind in known.items() if name in names} or names, ranks)

    def note_good_step(self) -> None:
        """An optimizer is about to step with finite gradients."""
        self._in_a_row = 0

    def note_left_out(self, finding: NonFinite) -> None:
        """A step is left out.

        Raises:
            NonFiniteError: too many were in a row.
        """
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self.limit:
            raise NonFiniteError(
                f"{finding}; {self.limit} steps in a row have been left out before",
                hint="lower the learning rate, or go back to an earlier checkpoint",
            )


_guards: weakref.WeakSet[FiniteGuard] = weakref.WeakSet()


def note_before_clipping(meshes: Collection[Mesh]) -> None:
    """Gradients that are shared by these ranks are about to be clipped."""
    for guard in list(_guards):
        if guard._mesh in meshes:
            guard.note_names()
