"""`torchacc.dist.fsdp`: what becomes of every rank's file."""

from fullshard.integrations.torchacc.saving import consolidate_sharded_model_checkpoints

__all__ = ["consolidate_sharded_model_checkpoints"]
