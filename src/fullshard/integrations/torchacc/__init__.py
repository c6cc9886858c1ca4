"""TorchAcc's interface on fullshard's engine. Scripts import it as `fullshard.torchacc`; see `docs/torchacc.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from fullshard.config import torchacc as config
from fullshard.config.torchacc import Config
from fullshard.integrations.torchacc import amp, dist
from fullshard.integrations.torchacc.eager import (
    fetch_gradients,
    is_lazy_device,
    is_lazy_tensor,
    lazy_device,
    mark_step,
    send_cpu_data_to_device,
    sync,
)
from fullshard.integrations.torchacc.entry import accelerate
from fullshard.integrations.torchacc.loader import AsyncLoader
from fullshard.integrations.torchacc.saving import save

__all__ = [
    "AsyncLoader",
    "Config",
    "accelerate",
    "amp",
    "config",
    "dist",
    "fetch_gradients",
    "is_lazy_device",
    "is_lazy_tensor",
    "lazy_device",
    "mark_step",
    "save",
    "send_cpu_data_to_device",
    "sync",
]

_ABSENT = {
    "mark_dynamic": "shapes may change freely; with torch.compile, use torch._dynamo.mark_dynamic",
    "accelerate_hf_trainer": "scripts with a Trainer run unchanged under `fullshard launch`",
    "patch": "nothing is patched",
    "patch_qwen_model": "nothing is patched",
    "decompose": "it belongs to XLA's compiler",
    "get_global_context": "there is no global state",
    "GlobalContext": "there is no global state",
    "ops": "use torch.nn.functional.scaled_dot_product_attention, which chooses the fastest kernel, or "
    "attn_implementation for Transformers models",
    "utils": "TorchAcc's Config has no field to offload activations; use fullshard.shard_model(..., "
    "offload_policy=OffloadPolicy(activations=True)), or config.memory.gc, which recomputes activations",
}


if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"fullshard.torchacc has no {name!r}{reason}")
