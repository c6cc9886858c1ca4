"""Collectives behind one small interface, and the mesh of process groups on which they run."""

from fullshard.core.requirements import require_torch

require_torch()
