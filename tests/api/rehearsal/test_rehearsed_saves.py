"""Saves of a rehearsal end at every rank, although rank 0 does not exist, and are measured.

pytest tests/api/rehearsal/test_rehearsed_saves.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fullshard
from fullshard.api.rehearsal.saves import done
from fullshard.checkpoint import AsyncSaver
from fullshard.checkpoint import save as fullshards
from fullshard.checkpoint.load import read_manifest
from tests.api.rehearsal.test_rehearsal_group import rehearsed
from tests.api.rehearsal.test_rehearse import EXAMPLES, rehearse

RANKS, RANK, WIDTH = 4, 3, 512


def test_saves_end_at_a_rank_that_leads_no_other(tmp_path: Path) -> None:
    """In this package's format, also in the background, and in torch's. Each has this rank's part."""
    done.clear()
    part = 4 * WIDTH**2 // RANKS
    with rehearsed(RANK, RANKS):
        model = nn.Linear(WIDTH, WIDTH)
        fullshard.fully_shard(model)
        fullshards.save_checkpoint(tmp_path / "now", model=model)
        once = dict(done["fullshard"])
        assert once["count"] == 1
        files = sum(file.stat().st_size for file in (tmp_path / "now").iterdir())
        assert once["nbytes"] == pytest.approx(files, rel=0.03)
        assert once["seconds"] > once["background_seconds"] == 0
        with AsyncSaver() as saver:
            saver.save(tmp_path / "later", model=model)
        for name in ("now", "later"):
            assert read_manifest(tmp_path / name).world_size == RANKS
            assert (tmp_path / name / f"model-rank0000{RANK}.safetensors").stat().st_size > part


def test_torchs_saves_write_what_a_real_rank_writes(tmp_path: Path) -> None:
    """All of its parts, and a share of what all ranks have."""
    done.clear()
    with rehearsed(RANK, RANKS):
        model, same = nn.Linear(WIDTH, WIDTH), {f"same{i}": torch.ones(WIDTH, WIDTH) for i in range(RANKS)}
        fully_shard(model)
        dcp.state_dict_saver.save({**model.state_dict(), **same}, checkpoint_id=tmp_path)
    assert (tmp_path / ".metadata").is_file()
    size = (tmp_path / f"__{RANK}_0.distcp").stat().st_size
    assert size == pytest.approx(4 * WIDTH**2 * (1 / RANKS + 1), rel=0.03)
    assert done["torch.distributed.checkpoint"]["count"] == 1
    assert done["torch.distributed.checkpoint"]["nbytes"] == pytest.approx(size, rel=0.03)


@pytest.mark.full
def test_the_answer_has_saves_and_the_wait_for_data(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The Trainer's, and those of an Accelerator, whose rank 0 would say where they go."""
    runs: list[tuple[str, int, list[str]]] = [
        ("trainer.py", 1, ["--output_dir", str(tmp_path / "a"), "--max_steps", "4"]),
        ("resume.py", 2, ["--output", str(tmp_path / "b"), "--steps", "4", "--save-every", "2"]),
    ]
    for name, saves, words in runs:
        found, _ = rehearse(capfd, "--as", "8xH100", "--rank", "3", "--", "--cpu", str(EXAMPLES / name), *words)
        made = found["saves"]["fullshard"]
        assert made["count"] == saves
        assert min(made["seconds"], made["nbytes"] - saves * 150_000) > 0
        assert 0 < found["data_seconds"] < found["step_seconds"]
