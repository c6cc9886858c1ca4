"""Saves of a rehearsal end at every rank, although rank 0 does not exist.

pytest tests/api/rehearsal/test_rehearsed_saves.py
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fullshard
from fullshard.checkpoint import AsyncSaver, save_checkpoint
from fullshard.checkpoint.load import read_manifest
from tests.api.rehearsal.test_rehearsal_group import rehearsed

RANKS, RANK = 4, 3


def test_saves_end_at_a_rank_that_leads_no_other(tmp_path: Path) -> None:
    """In this package's format, also in the background, and in torch's. Each has this rank's part."""
    with rehearsed(RANK, RANKS):
        model = nn.Linear(64, 64)
        fullshard.fully_shard(model)
        save_checkpoint(tmp_path / "now", model=model)
        with AsyncSaver() as saver:
            saver.save(tmp_path / "later", model=model)
        for name in ("now", "later"):
            assert read_manifest(tmp_path / name).world_size == RANKS
            assert (tmp_path / name / f"model-rank0000{RANK}.safetensors").stat().st_size > model.weight.numel()
        theirs = nn.Linear(64, 64)
        fully_shard(theirs)
        dcp.save(dict(theirs.state_dict()), checkpoint_id=tmp_path / "dcp")
        assert (tmp_path / "dcp" / ".metadata").is_file()
        assert (tmp_path / "dcp" / f"__{RANK}_0.distcp").is_file()
