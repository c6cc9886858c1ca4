"""Save checkpoints at any world size, load them at any other, verify every byte, and export to Hugging Face.

The public names of this package are imported on first use, so that programs can read and write the format without
importing the engine.
"""

from fullshard.core.imports import on_demand
from fullshard.core.requirements import require_torch

require_torch()
__all__, __getattr__, __dir__ = on_demand(__name__)
