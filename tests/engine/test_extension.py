"""Extensions are called at the moments of a step, in their order, and go over from a part to the model around it.

pytest tests/engine/test_extension.py
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fullshard.engine import extension
from fullshard.engine.extension import Extension, Extensions, register
from fullshard.features import FEATURES, fully_shard, units_of
from fullshard.features.consistency import ConsistencyCheck
from fullshard.features.late_registration import LateRegistration
from fullshard.features.nonfinite import NonFiniteGuard
from fullshard.features.offload import ActivationOffload, Parking
from fullshard.features.submodule_entry import SubmoduleEntry
from fullshard.features.watchdog import DesyncDetection
from tests.distributed import run_ranks


def test_the_order_of_the_features() -> None:
    """Late registration refuses before anything is saved or gathered; a save is logged before replicas are compared."""
    order = (LateRegistration, SubmoduleEntry, ActivationOffload, DesyncDetection, ConsistencyCheck, NonFiniteGuard)
    assert [feature for feature in FEATURES if feature in order] == list(order)


class Recorder(Extension):
    """Write down every moment."""

    settings: ClassVar[dict[str, Any]] = {"label": "none"}
    said: ClassVar[list[str]] = []
    label: str


def _recording(name: str) -> Any:
    def method(self: Recorder, *args: Any, **options: Any) -> bytes:
        names = [arg.name or "model" for arg in args if hasattr(arg, "modules")]
        Recorder.said.append(" ".join([name, *names, *(key for key, value in options.items() if value is True)]))
        return b"said"

    return method


for moment in extension._MOMENTS:
    if moment not in ("postpones", "reduced", "doubts_gradients", "find"):
        setattr(Recorder, moment, _recording(moment))


def moments() -> list[str]:
    register(Recorder)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model[0])
        part = Recorder.of(units_of(model)[0].schedule)
        part.label = "set on a part"
        fully_shard(model)
        own = Recorder.of(units_of(model)[-1].schedule)
        assert own is not part and own.label == "set on a part"
        Recorder.said.clear()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        units_of(model)[-1].schedule.before_save()
        return Recorder.said
    finally:
        extension._registered.remove(Recorder)


STEP = """\
forward_begins
call_begins model
before_gather model
unsharded model
call_begins 0
before_gather 0
unsharded 0
unit_ran 0
call_ends 0
resharded 0
unit_ran model
call_ends model
forward_ends
backward_begins
unsharded model
before_gather 0
call_backward_begins model
resharded model
unsharded 0
call_backward_begins 0
resharded 0
message
heard
backward_ends
before_clipping
before_step"""


def test_the_moments_of_a_step() -> None:
    for said in run_ranks(moments, 2):
        first, _, rest = "\n".join(said).partition("\nbefore_forward\nstep_begins\n")
        once = STEP.replace("before_step", "check_optimizer\nbefore_step")
        assert first == f"before_forward\nbefore_first_use in_forward\n{once}"
        ahead = STEP.replace("call_begins 0\nbefore_gather 0", "before_gather 0\ncall_begins 0")
        assert rest == f"{ahead}\nbefore_save", "the second forward knows what comes next"


class Messenger(Extension):
    """Say this rank's number, and write down what was heard."""

    heard_so_far: ClassVar[list[tuple[bytes, bytes]]] = []

    def message(self) -> bytes:
        """Two bytes."""
        return bytes([self.model.mesh.rank, 255 - self.model.mesh.rank])

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Write it down."""
        self.heard_so_far.append((largest, smallest))


def what_was_heard() -> list[tuple[bytes, bytes]]:
    register(Messenger)
    try:
        model = nn.Linear(2, 2)
        fully_shard(model)
        Messenger.heard_so_far.clear()
        model(torch.ones(1, 2)).sum().backward()
        return Messenger.heard_so_far
    finally:
        extension._registered.remove(Messenger)


def test_what_is_heard_at_the_end_of_a_backward() -> None:
    assert run_ranks(what_was_heard, 3) == [[(bytes([2, 255]), bytes([0, 253]))]] * 3
    assert run_ranks(what_was_heard, 1) == [[(bytes([0, 255]), bytes([0, 255]))]]


def test_one_that_was_not_registered_is_not_found() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    with pytest.raises(LookupError, match="Recorder was not registered before the model was sharded"):
        Recorder.of(units_of(model)[0].schedule)


def test_only_parking_listens_to_a_gather() -> None:
    """Each listener takes time of the host, in every unit twice a step."""
    model = nn.Linear(2, 2)
    fully_shard(model)
    extensions: Extensions = units_of(model)[0].schedule.extensions
    assert [type(tell.__self__) for tell in extensions.before_gather] == [Parking]  # type: ignore[attr-defined]
    assert extensions.inspector is not None


def test_a_message_needs_who_hears_it() -> None:
    class Says(Extension):
        def message(self) -> bytes:
            return b"1"

    with pytest.raises(TypeError, match="Says must override both"):
        register(Says)
