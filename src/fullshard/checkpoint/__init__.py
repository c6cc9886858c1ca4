"""Save checkpoints at any world size, load them at any other, verify every byte, and export to Hugging Face.

The public names of this package are imported on first use, so that programs can read and write the format without
importing the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.core.imports import on_demand
from fullshard.core.requirements import require_torch

if TYPE_CHECKING:
    from fullshard.checkpoint.background import AsyncSaver
    from fullshard.checkpoint.catalog import latest_checkpoint, whole_checkpoints
    from fullshard.checkpoint.copies import MemoryCopies
    from fullshard.checkpoint.export import export_hf, is_exported_as_it_is
    from fullshard.checkpoint.full_state import full_state_dict, load_full_state_dict, local_state_dict
    from fullshard.checkpoint.load import load_checkpoint, prove_checkpoint
    from fullshard.checkpoint.pretrained import from_pretrained, load_pretrained
    from fullshard.checkpoint.save import save_checkpoint
    from fullshard.checkpoint.stream import stream_weights
    from fullshard.checkpoint.verify import Verification, verify_checkpoint

__all__ = [
    "AsyncSaver",
    "MemoryCopies",
    "Verification",
    "export_hf",
    "from_pretrained",
    "full_state_dict",
    "is_exported_as_it_is",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_state_dict",
    "load_pretrained",
    "local_state_dict",
    "prove_checkpoint",
    "save_checkpoint",
    "stream_weights",
    "verify_checkpoint",
    "whole_checkpoints",
]

require_torch()

_NAMES = {
    "background": ["AsyncSaver"],
    "catalog": ["latest_checkpoint", "whole_checkpoints"],
    "copies": ["MemoryCopies"],
    "export": ["export_hf", "is_exported_as_it_is"],
    "full_state": ["full_state_dict", "load_full_state_dict", "local_state_dict"],
    "load": ["load_checkpoint", "prove_checkpoint"],
    "pretrained": ["from_pretrained", "load_pretrained"],
    "save": ["save_checkpoint"],
    "stream": ["stream_weights"],
    "verify": ["Verification", "verify_checkpoint"],
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_demand(
        __name__, {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names}
    )
