"""Optimizers that need whole matrices, and averages of weights: sharded as the model is."""

from fullshard.optim.adafactor import Adafactor, TransformersAdafactor
from fullshard.optim.average import EMA
from fullshard.optim.muon import Muon
from fullshard.optim.on_owners import OnOwners
from fullshard.optim.rule import MatrixRule

__all__ = ["EMA", "Adafactor", "MatrixRule", "Muon", "OnOwners", "TransformersAdafactor"]
