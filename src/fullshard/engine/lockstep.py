"""Check that all ranks do the same in each step, or report the rank that does not.

Before the first forward the ranks compare the model and the loaded weights. During that forward they compare, before
each unit is unsharded, which unit they are at. Later each rank logs the gathers of its forwards and backwards; ranks
that wait for long compare their logs (`comm.track`). The message at the end of backward, which is sent anyway, carries
an eight-byte digest of what the rank has done since the step before (`engine.end_of_backward`): units in order,
backwards, failed ones, optimizer steps, the run's step, learning rates, data orders. A failure is reported to waiting
ranks (`comm.stalls`), because the rank that has caught the error goes on elsewhere.
"""

from __future__ import annotations

import struct
import sys
import warnings
import weakref
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import STALLS
from fullshard.comm.track import Track
from fullshard.core.errors import CommunicationError
from fullshard.core.journal import JOURNAL
from fullshard.core.orders import HINT, ORDERS, difference
from fullshard.core.stopping import STOPPING
from fullshard.engine.end_of_backward import BucketEnd, EndOfBackward
from fullshard.engine.unit import Unit

_END_OF_FORWARD, _END_OF_BACKWARD, _STEP, _SAVE, _BACKWARD = -1, -2, -3, -4, -5
_WORDS = {
    _END_OF_FORWARD: "the end of a forward",
    _BACKWARD: "a backward",
    _END_OF_BACKWARD: "the end of a backward",
    _STEP: "an optimizer step",
    _SAVE: "a checkpoint",
}
"""Events of a rank's track other than units."""
_HINT = "give every rank as many batches, and have all of them run the same units, steps and learning rates"
_MODEL_HINT = (
    "build the same model from the same configuration, and load the same weights, on every rank; after a sharding that "
    "some ranks failed in, make a new process group"
)
_ORDER_HINT = (
    "every rank runs the same units in the same order: make no unit of what runs for some inputs only (experts: their "
    "block is the unit), and build the same model"
)


class Lockstep:
    """The desync detection of one model.

    Args:
        mesh: the ranks that share the model.

    Attributes:
        has_begun: whether the model was found to be the same on all ranks.
        is_order_verified: whether the order of its units in a whole forward was, too, and may be relied on.
        loads: how often `load_state_dict` has reached a unit. A rank that it has not reached has other weights.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._units: Sequence[Unit] = ()
        self._track: Track | None = None
        self._backwards, self._failures = 0, 0
        self._has_gathered = self._is_in_backward = False
        self.has_begun = self.is_order_verified = False
        self.loads = 0
        self._compared: set[tuple[int, int]] = set()  # loader orders that were compared; they are not compared again
        self._told: set[tuple[int, int | None]] = set()
        self._stepped: list[tuple[weakref.ref[torch.optim.Optimizer], list[dict[str, Any]]]] = []

    def begin(self, units: Sequence[Unit]) -> None:
        """Check before the first forward that the model is the same on every rank. A collective.

        Raises:
            CommunicationError: the models differ.
        """
        self._compare_model(units, [f"weights loaded into {self.loads} units"])
        self._mesh.forget_failures()
        self._mesh.agree_on_shardings()
        self._units, self.has_begun = units, True
        if self._mesh.gather.size > 1 and self._mesh.control_group is not None:
            self._track = Track(self._words)
            STALLS.tell(self._track, self._mesh.control_group)

    def compare_unless_begun(self, units: Sequence[Unit]) -> None:
        """Run `begin` before a gather outside a forward, unless it has run. A collective.

        Raises:
            CommunicationError: the model is not the same on every rank.
        """
        if not self.has_begun and self._mesh.gather.size > 1:
            self._compare_model(units, [])

    def _compare_model(self, units: Sequence[Unit], further: Sequence[str]) -> None:
        lines = [*_describe_structure(units[::-1]), *further]
        placed = self._mesh.gather.placed
        if placed:  # last: if the models themselves differ, report that
            lines += [f"{placed} buckets in shared memory, those of earlier models included"]
            real = [unit for unit in units[::-1] if unit.stand_ins is None and unit.buckets]
            lines += [f"unit {unit.name!r} was made real after {unit.placed} of them" for unit in real]
        self._mesh.check_agreement(lines, what="the sharded model", hint=_MODEL_HINT)

    def compare_first(self, position: int, unit: Unit | None) -> None:
        """Check in the first forward, before a unit is unsharded, that all ranks are at it. A collective.

        `unit` None marks the end of the forward; from then on the order may be relied on.
        """
        line = f"forward {position}: " + ("its end" if unit is None else f"unit {unit.name!r}")
        self._mesh.check_agreement([line], what="the order in which units run", hint=_ORDER_HINT)
        self.is_order_verified = unit is None

    def note_gather(self, unit: Unit, *, in_backward: bool = False) -> None:
        """Note that a forward, or a backward, is about to wait for a unit's parameters."""
        self._has_gathered |= not in_backward and self._mesh.gather.size > 1
        self._note(unit.number)

    def note_end_of_forward(self) -> None:
        """Note that a forward is over; if it waited for no rank, the others need not know of it."""
        if self._has_gathered:
            self._has_gathered = False
            self._note(_END_OF_FORWARD)

    def note_failed_forward(self) -> None:
        """Note that a forward has failed; if it waited for no rank, the others need not know of it."""
        if self._has_gathered or not self.is_order_verified:
            self._fail("a forward", sys.exc_info()[1])
        self._has_gathered = False
        self.end_track()

    def note_begin_of_backward(self) -> None:
        """Note that a backward has reached the model on this rank."""
        self._is_in_backward = True
        self._note(_BACKWARD)

    def note_left_backward(self, _: object) -> None:
        """Note that autograd has dropped a backward: it has failed unless it has reached its end."""
        if self._is_in_backward:
            self._is_in_backward = False
            self._fail("a backward", None)  # `features.torch_tools` learns of it a moment later

    def _fail(self, what: str, error: BaseException | None) -> None:
        self._failures += 1
        self._mesh.note_failure(what, error)

    def forget_failures(self) -> None:
        """Forget failures on any rank: all ranks begin anew."""
        self._failures = 0
        self._mesh.forget_failures()

    def note_end_of_backward(self) -> None:
        """Note that a backward has reached its end on this rank, and gathers nothing more."""
        self._note(_END_OF_BACKWARD)

    def count_backward(self) -> None:
        """Count a backward that all ranks have completed."""
        self._is_in_backward = False
        self._backwards += 1

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step the model."""
        if self._backwards:
            self._stepped.clear()
        if all(groups is not optimizer.param_groups for _, groups in self._stepped):
            # Keep its groups: a dropped optimizer would otherwise have a learning rate until garbage collection.
            self._stepped.append((weakref.ref(optimizer), optimizer.param_groups))

    def note_step(self) -> None:
        """Note that an optimizer is about to step."""
        self._backwards = 0
        self._note(_STEP)

    def note_save(self) -> None:
        """Note that the model is about to be saved."""
        self._note(_SAVE)

    def _note(self, number: int) -> None:
        if self._track is not None:
            self._track.note(number)

    def end_track(self) -> None:
        """End this rank's track after a failure: the ranks may go on elsewhere, and find each other again."""
        if self._track is not None:
            self._track.end()

    def _words(self, here: int, there: int, rank: int) -> str:
        at, other = self._name(here), self._name(there)
        return f"ranks are out of step: this rank has come to [{at}], rank {rank} to [{other}]"

    def _name(self, number: int) -> str:
        return _WORDS.get(number) or f"unit {self._units[number].name!r}"

    # -- end of backward ----------------------------------------------------------------------------------------

    def digest(self, units: Collection[Unit], steps: int) -> bytes:
        """Return eight bytes of what this rank has done since the step before.

        For the last forward, the digest covers those `units`, in their order, whose gradients are reduced.
        """
        entered = zlib.crc32(struct.pack(f"={len(units)}I", *[unit.number for unit in units]))
        rates = sum(zlib.crc32(struct.pack(f"={len(r)}d", *r)) for r in self._rates()) & 0xFFFFFFFF
        read = sorted({(number, order) for (number, _), order in list(ORDERS.items())} - self._compared)
        orders = zlib.crc32(repr(read).encode())
        done = struct.pack("=QQQqII", steps, self._backwards, self._failures, _run_step(), rates, orders)
        return struct.pack("=II", entered, zlib.crc32(done))

    def exchange(self, ends: Sequence[BucketEnd], ran: Collection[Unit], steps: int, *, last: Unit) -> EndOfBackward:
        """Send how a backward has ended on this rank, and return how it has ended on all. A collective.

        See `digest`. `last` is the unit that ran last, which an error names if other ranks do not come.
        """
        message = EndOfBackward(self.loads, STOPPING.is_wanted, self.digest(ran, steps), ends)
        if self._mesh.control_group is not None and ends:
            with last.waiting("end of backward (the last unit that ran forward)"):
                message.exchange(self._mesh.control_group)
        return message

    def check_loads(self, message: EndOfBackward) -> None:
        """Refuse to go on with a model that only some ranks have loaded.

        Raises:
            CommunicationError: `load_state_dict` has not reached all ranks equally often.
        """
        if not message.agrees_on_loads:
            raise CommunicationError(
                f"rank {self._mesh.rank}: load_state_dict has come to {self.loads} units on this rank, which is not so "
                "on all others: the model is loaded in parts",
                hint="call load_state_dict on every rank, or fullshard.checkpoint.load_full_state_dict, which sends "
                "what one rank has",
            )

    def compare(self, units: Collection[Unit], steps: int) -> None:
        """Find and report the difference. A collective, once some rank's digest differs.

        Ranks that read a loader in different orders get one warning only, because some scripts intend that.

        Raises:
            CommunicationError: on every rank, with the values of rank 0 and of the first rank that differs.
        """
        lines = [f"errors in forward or backward: {self._failures}", f"{steps} optimizer steps of this process"]
        lines += [f"backward {self._backwards + 1} since the last of them"]
        lines += [f"step {_run_step()} of the run"] * JOURNAL.is_told
        lines += [f"learning rates {rates}" for rates in sorted(self._rates())]
        lines += [f"forward {number}: unit {unit.name!r}" for number, unit in enumerate(units)]
        self._mesh.check_agreement(lines, what=f"step {steps + 1} of this process", hint=_HINT)
        own = dict(ORDERS)  # a script's threads may read loaders too
        of_all = dict(zip(self._mesh.ranks, self._mesh.all_gather_object(own), strict=True))
        self._compared = {(number, order) for (number, _), order in own.items()}
        for loader in sorted(set().union(*of_all.values()) - self._told, key=str):
            found = difference((rank, orders.get(loader)) for rank, orders in of_all.items())
            if found is not None:
                self._told.add(loader)
                warnings.warn(f"{found}\nhint: {HINT}", stacklevel=2)

    def _rates(self) -> list[list[float]]:
        """Return the current rates of each optimizer that stepped last, without waiting for those on a device."""
        found = []
        for _, groups in self._stepped:
            rates = [group.get("lr") for group in groups]
            on_host = [r for r in rates if not isinstance(r, torch.Tensor) or r.device.type == "cpu"]
            found.append([0.0 if rate is None else float(rate) for rate in on_host])  # None: the optimizer's own rule
        return found


def _run_step() -> int:
    return -1 if JOURNAL.step is None or not JOURNAL.is_told else JOURNAL.step


def _describe_structure(units: Sequence[Unit]) -> list[str]:
    """Return one line per parameter with everything that the layout and the communication depend on."""
    lines = []
    for unit in units:
        if unit.stand_ins is not None:
            lines.append(f"unit {unit.name!r} is on the meta device")
            continue
        for number, bucket in enumerate(unit.buckets):
            reduce = bucket.gradient.dtype if bucket.has_gradient else "frozen"
            where = (
                f"unit {unit.name!r}, bucket {number} ({bucket.dtype}, compute {bucket.compute_dtype}, reduce {reduce}"
            )
            if unit.policy.gather_as is not None or unit.policy.reduce_as is not None:
                where += f", gather as {unit.policy.gather_as}, reduce as {unit.policy.reduce_as}"
            where += ")"
            for parameter in bucket.sharded_parameters:
                shape = tuple(parameter.shape)
                grad = parameter.requires_grad
                lines.append(f"{where}: {parameter.name} {shape} requires_grad={grad}")
    return lines
