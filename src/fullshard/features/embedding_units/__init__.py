"""The input embedding and the head as units of their own."""

from fullshard.features.embedding_units.modules import embedding_modules

__all__ = ["embedding_modules"]
