"""Have this machine measured for the planner, by processes as training has them (`api.calibration_ranks`)."""

from __future__ import annotations

from pathlib import Path

import torch

from fullshard.comm.device import current
from fullshard.core.errors import CommunicationError
from fullshard.core.paths import local_path
from fullshard.launch.local import launch_local
from fullshard.launch.scratch import scratch_directory
from fullshard.plan.hardware import Device, read_calibration, write_calibration


def calibrate(path: Path) -> Device:
    """Measure this machine with one process per device (on a CPU: two) and write the figures to `path`.

    Args:
        path: a `.json` file; an existing one is replaced.
    """
    path = local_path(path)
    device = current()
    nproc = 2 if device.type == "cpu" else torch.accelerator.device_count()
    with scratch_directory("fullshard-calibration-") as directory:
        measured = directory / "device.json"
        code = launch_local("fullshard.api.calibration_ranks", [str(measured)], nproc=nproc)
        if code:
            raise CommunicationError(
                f"calibration failed: its processes ended with code {code}", hint="see above what they said"
            )
        found = read_calibration(measured)
    write_calibration(found, path)
    return found
