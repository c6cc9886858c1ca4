"""`torchacc.dist.fsdp`: consolidation of the files that every rank has written."""

from fullshard.integrations.torchacc.saving import consolidate_sharded_model_checkpoints

__all__ = ["consolidate_sharded_model_checkpoints"]
