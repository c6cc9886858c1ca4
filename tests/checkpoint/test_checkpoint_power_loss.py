"""What a save asks of the disk, and in which order: a power loss leaves the old checkpoint or the new one, whole.

pytest tests/checkpoint/test_checkpoint_power_loss.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint.save import prepare_parts
from fullshard.checkpoint.storage import replaced_directories
from fullshard.checkpoint.store import committed_directory


class Disk:
    """Keeps what the operating system was asked for, and at each request what is safe by then.

    Args:
        final: the directory that is saved to.
        is_whole: whether a directory holds a whole checkpoint.
    """

    def __init__(self, final: Path, is_whole: Callable[[Path], bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.final, self._is_whole = final, is_whole
        self.synced: dict[Path, object] = {}
        self.problems: list[str] = []
        self.names_are_safe = True
        self.commits = self.fsyncs = 0
        self._had_one = False
        real = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir")}

        def fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            real["fsync"](number)
            self._sync(Path(f"/proc/self/fd/{number}").readlink())

        def rename(source: Any, target: Any, **options: Any) -> None:
            self._look(f"renaming {Path(source).name}")
            self._before_rename(Path(source), Path(target))
            real["rename"](source, target, **options)
            self._after_rename(Path(source), Path(target))

        def removing(name: str) -> Callable[..., None]:
            def remove(path: Any, **options: Any) -> None:
                self._look(f"removing {path}")
                if not self.names_are_safe:
                    self.problems.append(f"{path} is removed before the new name is safe")
                real[name](path, **options)

            return remove

        def rmtree(path: Any, *arguments: Any, **options: Any) -> None:
            self._look(f"removing {path}")
            if not self.names_are_safe:
                self.problems.append(f"{path} is removed before the new name is safe")
            remove_tree(path, *arguments, **options)

        remove_tree = shutil.rmtree
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "replace", rename)
        monkeypatch.setattr(os, "unlink", removing("unlink"))
        monkeypatch.setattr(shutil, "rmtree", rmtree)

    def _state(self, path: Path) -> object:
        """What must be on the disk of a path: the names in a directory, the content of a file."""
        return (
            sorted(entry.name for entry in path.iterdir()) if path.is_dir() else (path.stat().st_ino, path.read_bytes())
        )

    def _sync(self, path: Path) -> None:
        self.fsyncs += 1
        self.synced[path] = self._state(path)
        if path == self.final.parent:
            self.names_are_safe = True

    def _look(self, when: str) -> None:
        """A power loss now: is there a whole checkpoint, if there was one before?"""
        there = any(self._is_whole(path) for path in (self.final, *replaced_directories(self.final)) if path.exists())
        if self._had_one and not there:
            self.problems.append(f"{when}: no whole checkpoint is left")
        self._had_one = self._had_one or there

    def _before_rename(self, source: Path, target: Path) -> None:
        places = [source, *source.rglob("*")] if source.is_dir() else [source]
        self.problems += [
            f"{place.relative_to(source.parent)} is not on the disk when it becomes {target.name}"
            for place in places
            if not target.name.startswith(".old-") and self.synced.get(place) != self._state(place)
        ]

    def _after_rename(self, source: Path, target: Path) -> None:
        moved = {place: state for place, state in self.synced.items() if place.is_relative_to(source)}
        self.synced |= {target / place.relative_to(source): state for place, state in moved.items()}
        self.commits += target == self.final
        if target.parent == self.final.parent and target.is_dir():
            self.names_are_safe = False


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _save(path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save_checkpoint(path, model=model, optimizer=optimizer, extra={"step": 1}, overwrite=True)


def _save_parts(path: Path) -> None:
    pending = prepare_parts(path, {"part_0": {"model": _model()}, "part_1": {"model": _model()}}, overwrite=True)
    pending.complete(pending.destination.ranks)


def _export(path: Path) -> None:
    checkpoint.export_hf(path, model=_model(), overwrite=True)


def _write(path: Path) -> None:
    with committed_directory(path, overwrite=True) as directory:
        (directory / "inside").mkdir()
        (directory / "inside" / "file").write_text("text")


_WRITERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], bool]]] = {
    "a checkpoint": (_save, lambda path: checkpoint.verify_checkpoint(path).is_valid),
    "several models": (
        _save_parts,
        lambda path: all(checkpoint.verify_checkpoint(path / f"part_{n}").is_valid for n in range(2)),
    ),
    "an export": (_export, lambda path: (path / "model.safetensors").is_file()),
    "a directory": (_write, lambda path: (path / "inside" / "file").is_file()),
}


@pytest.mark.parametrize("what", _WRITERS)
def test_a_power_loss_leaves_the_old_or_the_new(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_whole = _WRITERS[what]
    final = tmp_path / "out"
    disk = Disk(final, is_whole, monkeypatch)
    for commits in (1, 2):
        write(final)
        assert disk.problems == []
        assert disk.commits == commits, "it got its name by one rename"
        assert disk.names_are_safe, "the name is on the disk when the save returns"
        assert is_whole(final)
        assert not replaced_directories(final)
    assert disk.fsyncs > 4


def test_an_old_one_that_stepped_aside_comes_back(tmp_path: Path) -> None:
    final = tmp_path / "out"
    _save(final)
    final.rename(tmp_path / ".old-out-0123456789abcdef")
    assert checkpoint.latest_checkpoint(tmp_path) is not None
    _save(final)
    assert checkpoint.verify_checkpoint(final).is_valid
    assert not replaced_directories(final)
