"""What `describe(model)` says of a sharded model, and the line at start-up."""

from fullshard.features.summary.sharding import Sharding, describe

__all__ = ["Sharding", "describe"]
