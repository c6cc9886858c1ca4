"""Fully Sharded Data Parallel training for PyTorch.

The public names are imported on first use, so `import fullshard` and `fullshard --help` do not load torch.
"""

import importlib
from typing import Any

from fullshard.core.imports import on_demand
from fullshard.core.version import __version__ as __version__

_PACKAGES = ("optim", "plan")  # of which the second can be called


def _otherwise(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fullshard.{name}")
    return importlib.import_module("fullshard.api.refused").from_accelerate(name)


__all__, __getattr__, __dir__ = on_demand(__name__, _otherwise, packages=_PACKAGES)
