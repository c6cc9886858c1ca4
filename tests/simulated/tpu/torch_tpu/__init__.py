"""Stands for torch_tpu 0.2.0 on machines without a TPU: what it says of itself, on the simulated device.

With this folder in PYTHONPATH torch imports it by itself, as it does torch_tpu. What is like a TPU:

* device `tpu`, of which a process has one, backend `tpu_dist`; a host has as many as SIMULATED_TPUS says
* streams are stubs, work is over when it is issued, `wait` does nothing, memory is not counted
* no float16; of reductions the sum and the maximum; no objects, no `reduce`, no `gather`
* ranks find one another by TORCH_TPU_SLICEBUILDER_ADDRESSES, which `set_tpu_launch_env` sets before they start
* a process that is forked from one that has used it ends
"""

from __future__ import annotations

import os
from importlib import import_module


def load() -> None:
    """Called by torch when it is imported."""
    if not int(os.environ.get("SIMULATED_TPUS", "0")):
        return
    os.environ["SIMULATED_DEVICE"] = "tpu"
    import_module("torch_tpu.distributed")  # makes the device the accelerator
