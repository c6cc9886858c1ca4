"""Periodic comparison of the ranks, which detects replicas whose weights differ and ranks that are slow."""

from fullshard.features.consistency.check import ConsistencyCheck, ConsistencyMethods

__all__ = ["ConsistencyCheck", "ConsistencyMethods"]
