"""A CPU as a platform for verl, which only knows accelerators.

`VERL_USE_EXTERNAL_MODULES=verl_platform VERL_PLATFORM=cpu` selects it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

ANSWERS: dict[str, Any] = {
    **{"is_available": True, "current_device": "cpu", "device_count": 1, "get_device_capability": (None, None)},
    **{
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "is_ipc_supported": False,
    },
    **{"nvtx_range": nullcontext(), "ray_resource_name": "CPU", "ray_noset_envvars": []},
}


def _answer(name: str) -> Any:
    return lambda self, *_, **__: ANSWERS.get(name)


methods = {name: _answer(name) for name in PlatformBase.__abstractmethods__}
properties = {"device_name": "cpu", "vendor_name": "cpu", "device_module": torch.cpu}
PlatformRegistry.register(platform="cpu")(type("Cpu", (PlatformBase,), {**methods, **properties}))
