"""Modules that hold parameters of a unit can be called on their own."""

from fullshard.features.submodule_entry.hooks import SubmoduleEntry

__all__ = ["SubmoduleEntry"]
