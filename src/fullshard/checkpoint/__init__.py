"""Checkpoints: saved by any number of ranks, loaded by any other, proved byte by byte, exported to Hugging Face."""

from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.catalog import latest_checkpoint, whole_checkpoints
from fullshard.checkpoint.export import export_hf, is_exported_as_it_is
from fullshard.checkpoint.full_state import full_state_dict, load_full_state_dict, local_state_dict
from fullshard.checkpoint.load import load_checkpoint, prove_checkpoint
from fullshard.checkpoint.pretrained import from_pretrained, load_pretrained
from fullshard.checkpoint.save import save_checkpoint
from fullshard.checkpoint.stream import stream_weights
from fullshard.checkpoint.verify import Verification, verify_checkpoint

__all__ = [
    "AsyncSaver",
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
