"""Periodic comparison of the ranks, to detect replicas with different weights and slow ranks."""

from fullshard.features.consistency.check import ConsistencyCheck, ConsistencyMethods

__all__ = ["ConsistencyCheck", "ConsistencyMethods"]
