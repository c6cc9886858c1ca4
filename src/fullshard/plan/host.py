"""The host's time to issue a step to an accelerator: the same for a plan and for a step in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.plan.hardware import Device


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host, assumed: PyTorch's eager mode in Python, the dispatcher, autograd and the driver.

    Attributes:
        launch: of an operation with a kernel. The calibrations of two CPUs have 5 and 9 microseconds for a nearly empty
            one, without a driver.
        view: of one without.
        collective: of launching one.
        message: of a message between hosts that all ranks wait for, per doubling of their number.
    """

    launch: float = 8e-6
    view: float = 2e-6
    collective: float = 25e-6
    message: float = 30e-6

    @classmethod
    def of(cls, device: Device) -> HostCosts:
        """Return the host's costs; all 0 if the host itself computes, where an operation takes `op_seconds`."""
        return cls(0.0, 0.0, 0.0, 0.0) if device.is_cpu else cls()

    def seconds(self, kernels: float, views: float) -> float:
        """Return the seconds of that many operations with a kernel, and without."""
        return kernels * self.launch + views * self.view
