"""`torchacc.dist.fsdp`: the function that combines the checkpoint files of all ranks into one."""

from fullshard.integrations.torchacc.saving import consolidate_sharded_model_checkpoints

__all__ = ["consolidate_sharded_model_checkpoints"]
