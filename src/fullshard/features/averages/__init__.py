"""Moving averages of the weights, sharded as they are."""

from fullshard.features.averages.average import EMA

__all__ = ["EMA"]
