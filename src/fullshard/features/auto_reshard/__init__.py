"""Units that stay unsharded between forward and backward while memory allows."""

from fullshard.features.auto_reshard.rule import available_host_memory, keep_head, keep_unsharded

__all__ = ["available_host_memory", "keep_head", "keep_unsharded"]
