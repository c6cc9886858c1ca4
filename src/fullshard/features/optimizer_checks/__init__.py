"""Checks that an optimizer can work with each rank's part of the parameters."""

from fullshard.features.optimizer_checks.check import NEEDS_WHOLE_TENSORS, OptimizerCheck

__all__ = ["NEEDS_WHOLE_TENSORS", "OptimizerCheck"]
