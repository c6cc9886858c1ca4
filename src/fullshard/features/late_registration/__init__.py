"""Parameters that are put into a model after it was sharded are refused."""

from fullshard.features.late_registration.check import LateRegistration

__all__ = ["LateRegistration"]
