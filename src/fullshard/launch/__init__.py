"""Start a job's processes, and tell each process its rank.

The public names are imported on first use, because a launcher reads its flags before it loads torch.
"""

from fullshard.core.imports import on_demand

__all__, __getattr__, __dir__ = on_demand(__name__)
