"""Training through PyTorch/XLA: its FSDPv2 with fullshard's settings. Requires the extra `fullshard[xla]`.

One process drives all devices of the host, and tensors are global: a batch is the batch of all devices, a norm is the
norm of the complete model, and a state dict contains unsharded tensors. fullshard's engine is not used. See
`docs/xla.md`.
"""

from fullshard.integrations.xla.checkpoint import load_checkpoint, save_checkpoint
from fullshard.integrations.xla.model import (
    batches,
    full_state_dict,
    load_full_state_dict,
    prepare,
    shard_batch,
    sharded_state_dict,
)
from fullshard.integrations.xla.settings import XlaSettings

__all__ = [
    "XlaSettings",
    "batches",
    "full_state_dict",
    "load_checkpoint",
    "load_full_state_dict",
    "prepare",
    "save_checkpoint",
    "shard_batch",
    "sharded_state_dict",
]
