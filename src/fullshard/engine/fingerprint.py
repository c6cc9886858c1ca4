"""Sees to it that all ranks do the same in each step, or says which one does not.

In the first forward the ranks compare which unit they are at before it is unsharded. Later, what a forward gathers is
noted where the ranks of the host see it: one that waits for another looks whether that has gone another way
(`comm.cpu.track`). At the end of a backward eight bytes of what this rank has done since the step before ride on the
message that is sent anyway: units in their order, backwards, optimizer steps, the run's step, learning rates.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Collection, Sequence

import torch

from fullshard.comm.host_pages import OutOfStep
from fullshard.comm.mesh import Mesh
from fullshard.core.journal import JOURNAL
from fullshard.engine.agree import check_agreement
from fullshard.engine.unit import Unit

NBYTES = 8
_END_OF_FORWARD, _END_OF_BACKWARD, _STEP, _SAVE = -1, -2, -3, -4
_WORDS = {
    _END_OF_FORWARD: "the end of a forward",
    _END_OF_BACKWARD: "the end of a backward",
    _STEP: "an optimizer step",
    _SAVE: "a checkpoint",
}
"""What a rank comes to beside units."""
_HINT = "give every rank as many batches, and have all of them run the same units, steps and learning rates"


class Fingerprint:
    """Of one model.

    Args:
        mesh: the ranks that share it.

    Attributes:
        optimizers: that have stepped it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._units: Sequence[Unit] = ()
        self._track = None if mesh.gather.size == 1 else mesh.gather.pages.open_track()
        if self._track is not None:
            mesh.reduce.pages.heed(self._track)
        self._backwards, self._has_gathered = 0, False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begin(self, units: Sequence[Unit]) -> None:
        """The model has these units, on every rank."""
        self._units = units

    def compare_first(self, position: int, unit: Unit | None) -> None:
        """In the first forward, before a unit is unsharded: it is the same on every rank. A collective.

        Args:
            position: how many came before.
            unit: None at the end.
        """
        line = f"forward {position}: " + ("its end" if unit is None else f"unit {unit.name!r}")
        check_agreement(self._mesh, [line], what="the order in which units run")

    def note_gather(self, unit: Unit) -> None:
        """A forward is about to wait for a unit's parameters."""
        if self._track is not None:
            self._has_gathered = True
            self._track.note(unit.number)

    def note_end_of_forward(self) -> None:
        """A forward is over on this rank; of one that waited for nobody others need not know."""
        if self._track is not None and self._has_gathered:
            self._has_gathered = False
            self._track.note(_END_OF_FORWARD)

    def note_end_of_backward(self) -> None:
        """A backward is over on this rank."""
        self._backwards += 1
        if self._track is not None:
            self._track.note(_END_OF_BACKWARD)

    def note_step(self) -> None:
        """An optimizer is about to step."""
        self._backwards = 0
        if self._track is not None:
            self._track.note(_STEP)

    def note_save(self) -> None:
        """The model is about to be saved."""
        if self._track is not None:
            self._track.note(_SAVE)

    def end_track(self) -> None:
        """Something has failed on this rank: others may go on elsewhere, and find each other again."""
        if self._track is not None:
            self._track.end()

    def words(self, error: OutOfStep) -> str:
        """An error of a rank that has looked where the others are, with names."""
        here, there = self._name(error.here), self._name(error.there)
        other = self._mesh.rank_at(error.rank)
        return f"ranks are out of step: this rank has come to [{here}], rank {other} to [{there}]"

    def _name(self, number: int) -> str:
        return _WORDS.get(number) or f"unit {self._units[number].name!r}"

    # -- end of backward ----------------------------------------------------------------------------------------

    def digest(self, units: Collection[Unit], steps: int) -> bytes:
        """`NBYTES` bytes of what this rank has done since the step before.

        Args:
            units: of the last forward whose gradients are reduced, in their order.
            steps: of this process.
        """
        entered = zlib.crc32(struct.pack(f"={len(units)}I", *[unit.number for unit in units]))
        rates = sum(zlib.crc32(struct.pack(f"={len(r)}d", *r)) for r in self._rates()) & 0xFFFFFFFF
        return struct.pack("=II", entered, zlib.crc32(struct.pack("=QQqI", steps, self._backwards, _run_step(), rates)))

    def compare(self, units: Collection[Unit], steps: int) -> None:
        """Find out what differs. A collective, once some rank's digest is another.

        Raises:
            CommunicationError: on every rank, with what rank 0 and the first other one have.
        """
        lines = [f"{steps} optimizer steps of this process", f"backward {self._backwards + 1} since the last of them"]
        lines += [f"step {_run_step()} of the run"] * JOURNAL.is_told
        lines += [f"learning rates {rates}" for rates in sorted(self._rates())]
        lines += [f"forward {number}: unit {unit.name!r}" for number, unit in enumerate(units)]
        check_agreement(self._mesh, lines, what=f"step {steps + 1} of this process", hint=_HINT)

    def _rates(self) -> list[list[float]]:
        """Of each optimizer, as they are now. Those that are on a device are not waited for."""
        found = []
        for optimizer in list(self.optimizers):
            rates = [group.get("lr") for group in optimizer.param_groups]
            on_host = [r for r in rates if not isinstance(r, torch.Tensor) or r.device.type == "cpu"]
            found.append([0.0 if rate is None else float(rate) for rate in on_host])  # None: its own rule
        return found


def _run_step() -> int:
    return -1 if JOURNAL.step is None or not JOURNAL.is_told else JOURNAL.step
