"""A disk that is too full for the checkpoints of a run is said before the run begins.

pytest tests/api/test_room.py
"""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.checkpoint.objects import location
from fullshard.core.errors import CheckpointError
from fullshard.features import shard_model
from tests.trainers import arguments, build, trainer

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "count", "said"),
    [(400, 4, ""), (399, 4, "only 3 of the 4 checkpoints to keep will fit"), (99, 1, None), (99, 0, "")],
)
def test_room_for_checkpoints(
    free: int, count: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def disk_usage(path: Path) -> Usage:
        looked.append(path)
        return Usage(1000, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    told: list[str] = []
    if said is None:
        with pytest.raises(
            CheckpointError, match=r"99 B are available .* a checkpoint of this run takes 100 B\nhint: remove"
        ):
            check_room(tmp_path / "not" / "yet", 100, count, told.append)
    else:
        check_room(tmp_path / "not" / "yet", 100, count, told.append)
    assert ("".join(told) == "") == (not said) and (said or "") in "".join(told)
    assert looked == [tmp_path] * (count > 0)


def test_what_has_no_room_of_its_own_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))  # a file system that does not say
    check_room(tmp_path, 100, 4, print)
    check_room(location("s3://bucket/run"), 100, 4, print)


def test_a_checkpoint_has_weights_and_the_state_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    shard_model(model, unit_modules=[])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert checkpoint_nbytes(model, torch.optim.AdamW(trained)) == 4 * (128 + 2 * 64)
    assert checkpoint_nbytes(model, torch.optim.SGD(trained)) == checkpoint_nbytes(model, None) == 4 * 128


def test_a_trainer_that_could_save_nothing_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 1000))
    made = trainer(build(), arguments(tmp_path, save_strategy="steps", save_steps=2))
    with pytest.raises(CheckpointError, match=r"1000 B are available in .*, but a checkpoint of this run takes"):
        made.train()
    assert made.state.global_step == 0
