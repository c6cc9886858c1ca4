"""Collectives behind one small interface, and the mesh of process groups they run on."""

from fullshard.core.requirements import require_torch

require_torch()
