"""Sharded optimizers that update whole matrices, and moving averages of weights."""

from fullshard.features.averages import EMA
from fullshard.optim.muon import Muon
from fullshard.optim.on_owners import OnOwners
from fullshard.optim.rule import MatrixRule

__all__ = ["EMA", "MatrixRule", "Muon", "OnOwners"]
