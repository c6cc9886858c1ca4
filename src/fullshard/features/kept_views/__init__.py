"""Attributes of modules that are views of parameters: an error while their memory is gone."""

from fullshard.features.kept_views.views import KeptViews

__all__ = ["KeptViews"]
