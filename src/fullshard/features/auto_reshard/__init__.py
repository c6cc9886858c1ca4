"""Units that stay unsharded between forward and backward as far as memory allows."""

from fullshard.features.auto_reshard.rule import available_host_memory, keep_head, keep_unsharded

__all__ = ["available_host_memory", "keep_head", "keep_unsharded"]
