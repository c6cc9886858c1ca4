"""Check that all ranks do the same in each step, and report a rank that does something different.

Before the first forward, the ranks compare the model and the loaded weights. During that forward, they compare which
unit they are at before each unit is unsharded. The message that ends a backward carries a digest of what the rank has
done since the last step: loads, units in order, backwards, failures, optimizer steps, the step of the run, learning
rates and data orders. If a script catches an error on one rank and continues, the ranks that wait for it are told of
the error (`watchdog`).
"""

import struct
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from fullshard.core.errors import CommunicationError, plural
from fullshard.core.journal import JOURNAL
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState
from fullshard.features.watchdog.data_order import HINT, ORDERS, difference
from fullshard.features.watchdog.watchdog import WATCHDOG

_HINT = "give every rank the same number of batches, and use the same units, steps and learning rates on all ranks"
_MODEL_HINT = (
    "build the same model from the same configuration, and load the same weights, on every rank; if sharding failed on "
    "some ranks, create a new process group"
)
_ORDER_HINT = (
    "run the same units in the same order on every rank: do not make a unit of a module that runs only for some inputs "
    "(for experts, use their block as the unit), and build the same model"
)


class DesyncDetection(Extension):
    """Compares what the ranks of one model do in each step."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._mesh = model.mesh
        self._loads = self._backwards = self._failures = 0  # a rank with fewer loads has other weights
        self._has_gathered = self.is_order_verified = False  # the order of units in a complete forward
        self._forward: list[Unit] = []
        self._ran: list[Unit] = []
        self._compared: set[tuple[int, int]] = set()  # loader orders that have already been compared
        self._told: set[tuple[int, int | None]] = set()
        self._stepped: list[tuple[weakref.ref[torch.optim.Optimizer], list[dict[str, Any]]]] = []

    def absorbed(self, earlier: Extension) -> None:
        """Add the load count of a model that became part of this one."""
        self._loads += cast("DesyncDetection", earlier)._loads

    def loaded(self, unit: Unit) -> None:
        """Count that weights were loaded into a unit."""
        self._loads += 1

    def before_first_use(self, *, in_forward: bool) -> None:
        """Check that the model is the same on every rank. This is a collective."""
        if in_forward:
            self._compare_model([f"weights loaded into {plural(self._loads, 'unit')}"])
            WATCHDOG.forget_failures(self._mesh.groups)
        elif self._mesh.gather.size > 1:
            self._compare_model([])

    def _compare_model(self, further: Sequence[str]) -> None:
        units = self.model.units[::-1]
        lines = [*_describe_structure(units), *further]
        for unit in units:  # last: if the models themselves differ, report that
            places = [] if unit.stand_ins is not None else [bucket.buffer.shared_number for bucket in unit.buckets]
            if any(place is not None for place in places):  # places also depend on earlier models and failures
                lines.append(f"{unit} has its buckets at {places} in the memory that ranks share")
        self._mesh.check_agreement(lines, what="the sharded model", hint=_MODEL_HINT)

    def step_begins(self) -> None:
        """Tell the watchdog that a step begins, so that it can measure how long steps take."""
        WATCHDOG.begin_step(time.monotonic())

    def forward_begins(self) -> None:
        """Clear the list of units that ran in the previous forward."""
        self._forward = []

    def call_begins(self, unit: Unit) -> None:
        """In the first forward, check that all ranks have reached the same unit, before this rank waits for them."""
        if not self.is_order_verified:
            self._compare_first(str(unit))
        elif unit.state is UnitState.SHARDED or unit.state is UnitState.GATHERING:
            self._has_gathered |= self._mesh.gather.size > 1
        self._forward.append(unit)

    def _compare_first(self, at: str) -> None:
        line = f"forward {len(self._forward)}: {at}"
        self._mesh.check_agreement([line], what="the order in which units run", hint=_ORDER_HINT)

    def forward_ends(self, *, failed: bool) -> None:
        """Count a failed forward that has communicated, and check that the first complete one ended on all ranks."""
        if failed:
            error = sys.exc_info()[1]  # None if the forward was interrupted earlier
            if error is not None and (self._has_gathered or not self.is_order_verified):
                self._fail("a forward", error)
        elif not self.is_order_verified:
            self._compare_first("its end")
            self.is_order_verified = True
        self._has_gathered = False

    def backward_fails(self) -> None:
        """Count a failed backward. The error itself is passed to the watchdog later, in `features.torch_tools`."""
        self._fail("a backward", None)

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Count a backward that has ended on all ranks."""
        self._backwards += 1

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Record that this optimizer steps, so that its learning rates can be compared."""
        if self._backwards:
            self._stepped.clear()
        if all(groups is not optimizer.param_groups for _, groups in self._stepped):
            # Keep the groups, so that a discarded optimizer is handled the same before and after garbage collection.
            self._stepped.append((weakref.ref(optimizer), optimizer.param_groups))
        self._backwards = 0

    def _fail(self, what: str, error: BaseException | None) -> None:
        self._failures += 1
        WATCHDOG.failed([self._mesh.control_group], what, error)

    def forget_failures(self) -> None:
        """Reset the count of failures, because all ranks start again from the same point."""
        self._failures = 0
        WATCHDOG.forget_failures(self._mesh.groups)

    def message(self) -> bytes:
        """Return nine bytes that summarize what this rank has done since the last optimizer step."""
        launched = set(self.model.backward.reducer.order.launched)
        self._ran = [u for u in dict.fromkeys(self._forward) if any(bucket in launched for bucket in u.buckets)]
        entered = zlib.crc32(struct.pack(f"={len(self._ran)}I", *[unit.number for unit in self._ran]))
        rates = sum(zlib.crc32(struct.pack(f"={len(r)}d", *r)) for r in self._rates()) & 0xFFFFFFFF
        read = sorted({(number, order) for (number, _), order in list(ORDERS.items())} - self._compared)
        orders = zlib.crc32(repr(read).encode())
        steps = self.model.optimizer_steps
        done = struct.pack("=QQQqII", steps, self._backwards, self._failures, _run_step(), rates, orders)
        return struct.pack("=BII", self._loads % 256, entered, zlib.crc32(done))

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Compare the messages of all ranks, and raise an error that describes the difference if they are not equal."""
        if largest[0] != smallest[0]:
            raise CommunicationError(
                f"rank {self._mesh.rank}: load_state_dict has loaded {plural(self._loads, 'unit')} on this rank and a "
                "different number on other ranks, so the model is only partly loaded",
                hint=(
                    "call load_state_dict on every rank, or use fullshard.checkpoint.load_full_state_dict, which "
                    "distributes the state dict of one rank"
                ),
            )
        if largest != smallest:
            self.compare()

    def compare(self) -> None:
        """Compare what all ranks have done since the last step. Raise an error, or warn once of orders of a loader."""
        steps = self.model.optimizer_steps
        lines = [f"errors in forward or backward: {self._failures}", f"optimizer steps of this process: {steps}"]
        lines += [f"backward {self._backwards + 1} since the last of them"]
        lines += [f"step {_run_step()} of the run"] * JOURNAL.is_told
        lines += [f"learning rates {rates}" for rates in sorted(self._rates())]
        lines += [f"forward {number}: {unit}" for number, unit in enumerate(self._ran)]
        self._mesh.check_agreement(lines, what=f"step {steps + 1} of this process", hint=_HINT)
        own = dict(ORDERS)  # the script's threads may also read loaders
        of_all = dict(zip(self._mesh.ranks, self._mesh.all_gather_object(own), strict=True))
        self._compared = {(number, order) for (number, _), order in own.items()}
        for loader in sorted(set().union(*of_all.values()) - self._told, key=str):
            found = difference((rank, orders.get(loader)) for rank, orders in of_all.items())
            if found is not None:
                self._told.add(loader)
                warnings.warn(f"{found}\nhint: {HINT}", stacklevel=2)

    def _rates(self) -> list[list[float]]:
        """Return the learning rates of each optimizer that ran in the last step, except rates stored on a device."""
        found = []
        for _, groups in self._stepped:
            rates = [group.get("lr") for group in groups]
            on_host = [r for r in rates if not isinstance(r, torch.Tensor) or r.device.type == "cpu"]
            found.append([0.0 if rate is None else float(rate) for rate in on_host])  # None: the optimizer decides
        return found


def _run_step() -> int:
    return -1 if JOURNAL.step is None or not JOURNAL.is_told else JOURNAL.step


def _describe_structure(units: Sequence[Unit]) -> list[str]:
    """Return one line per parameter, which contains every property that affects the layout or the communication."""
    lines = []
    for unit in units:
        if unit.stand_ins is not None:
            lines.append(f"{unit} is on the meta device")
            continue
        for number, bucket in enumerate(unit.buckets):
            reduce = bucket.gradient.dtype if bucket.has_gradient else "frozen"
            where = f"{unit}, bucket {number} ({bucket.dtype}, compute {bucket.compute_dtype}, reduce {reduce}"
            where += "".join(f", {what} {dtype}" for what, dtype in unit.policy.dtypes_of().sent.items())
            for parameter in bucket.sharded_parameters:
                shape, grad = tuple(parameter.shape), parameter.requires_grad
                lines.append(f"{where}): {parameter.name} {shape} requires_grad={grad}")
    return lines
