"""Predict memory, traffic and time of a run before anyone pays for it, and recommend what to run. Imports no torch.

The package itself can be called, for a model object: `fullshard.plan(model, devices="8xH100", micro_batch=4)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    def __call__(self, model: Any, devices: str, **settings: Any) -> Any:
        """Call `fullshard.plan_model`, under the name people look for."""
        import fullshard

        return fullshard.plan_model(model, devices, **settings)


sys.modules[__name__].__class__ = _Plan
