"""Predict the memory, traffic and time of a run before you pay for it, and recommend settings.

The modules in this package do not import torch. The package itself can be called with a model object:
`fullshard.plan(model, devices="8xH100", micro_batch=4)`.
"""

import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    def __call__(self, model: Any, devices: str, **settings: Any) -> Any:
        """Call `fullshard.plan_model`, so that users can write `fullshard.plan(...)`."""
        import fullshard

        return fullshard.plan_model(model, devices, **settings)


sys.modules[__name__].__class__ = _Plan
