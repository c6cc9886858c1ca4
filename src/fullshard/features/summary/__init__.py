"""`describe(model)`: how a model is sharded; and the line at start-up."""

from fullshard.features.summary.sharding import Sharding, describe

__all__ = ["Sharding", "describe"]
