"""A comparison of the ranks every few steps: whether replicas hold the same weights, and which rank is slow."""

from fullshard.features.consistency.check import ConsistencyCheck, ConsistencyMethods

__all__ = ["ConsistencyCheck", "ConsistencyMethods"]
