"""Decides which modules are units and which unit owns which parameter. Uses `nn.Module`, but not the engine."""

from fullshard.core.requirements import require_torch

require_torch()
