"""Decides which modules become units, and which unit owns each parameter. It does not use the engine."""

from fullshard.core.requirements import require_torch

require_torch()
