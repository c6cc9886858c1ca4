"""Optimizers that need whole matrices, and averages of weights: sharded as the model is."""

from fullshard.optim.adafactor import Adafactor, TransformersAdafactor
from fullshard.optim.average import EMA
from fullshard.optim.muon import Muon
from fullshard.optim.rule import MatrixRule
from fullshard.optim.shampoo import Shampoo
from fullshard.optim.soap import SOAP

__all__ = ["EMA", "SOAP", "Adafactor", "MatrixRule", "Muon", "Shampoo", "TransformersAdafactor"]
