"""Which modules a script makes units: by a policy, and the embeddings if asked."""

from fullshard.features.unit_selection.modules import embedding_modules, embeddings_of
from fullshard.features.unit_selection.root import unit_modules

__all__ = ["embedding_modules", "embeddings_of", "unit_modules"]
