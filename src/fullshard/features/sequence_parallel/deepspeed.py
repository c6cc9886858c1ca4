"""DeepSpeed's attention for split sequences, without DeepSpeed's engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from fullshard.core.errors import ConfigError


def require_deepspeed() -> None:
    """Raise an error if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise ConfigError(
            'sp_backend = "deepspeed" (the default) needs the package deepspeed, which is not installed',
            hint='use fullshard.ParallelismConfig(sp_backend="fullshard", ...), or pip install deepspeed',
        )


def deepspeed_attention(
    inner: Any, group: dist.ProcessGroup, sequences: int, heads: int, head_size: int, key_heads: int
) -> Any:
    """Return DeepSpeed's `UlyssesSPAttentionHF` around an attention function of Transformers."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed(dist_init_required=False)
    return UlyssesSPAttentionHF(
        attn=inner,
        batch_size=sequences,
        attn_head_count=heads,
        attn_head_size=head_size,
        kv_head_count=key_heads,
        num_hidden_layers=0,  # it is read only by a mode for debugging
        process_group=group,
        seq_length_is_variable=True,
    )
