"""Saving in the background: the same bytes, errors that cannot get lost, and a whole checkpoint after any death.

Run with `pytest tests/checkpoint/test_checkpoint_background.py`; the measurement with `-m full`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import AsyncSaver, latest_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.save import Pending
from fullshard.config.switches import COPIES_DIR
from fullshard.core.errors import CheckpointError
from fullshard.features import shard_model
from tests.distributed import run_ranks


class _Job:
    """A small model in training, with everything that a checkpoint holds."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 7))
        shard_model(self.model, unit_modules=[])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.width = width

    def step(self) -> float:
        loss = self.model(torch.randn(8, self.width)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


class _Gate:
    """Holds the writing of every save of this process back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._complete = Pending.complete

    def __enter__(self) -> _Gate:
        complete, opened = self._complete, self.opened

        def wait_and_complete(pending: Pending, ranks: Any) -> Any:
            assert opened.wait(60)
            return complete(pending, ranks)

        Pending.complete = wait_and_complete  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        Pending.complete = self._complete  # type: ignore[method-assign]


def _files(directory: Path) -> dict[str, bytes]:
    """Contents of the data files, without the id of the save in their headers."""
    save_id = read_manifest(directory).save_id.encode()
    return {p.name: p.read_bytes().replace(save_id, b"") for p in directory.iterdir() if p.name != "manifest.json"}


def _message(function: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function()
    return str(caught.value)


def _same_bytes(directory: str) -> tuple[list[float], list[float]]:
    root, job = Path(directory), _Job()
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        job.step()
    save_checkpoint(root / "waited", **job.state, extra={"at": torch.tensor(2)})
    with AsyncSaver() as saver:
        with _Gate() as gate:
            saver.save(root / "meanwhile", **job.state, extra={"at": torch.tensor(2)})
            (block,) = saver.memory._used
            # Everything that was saved changes before a byte of it is written.
            expected = [job.step() for _ in range(3)]
            assert saver.is_saving
            assert saver.check() is None
            assert not (root / "meanwhile").exists()
            gate.opened.set()
            assert saver.wait() == root / "meanwhile"
        assert not saver.is_saving
        # The memory is used again, for another state.
        saver.save(root / "later", **job.state)
        assert saver.memory._used[0] is block and not saver.memory._free
    other = _Job(seed=1)
    assert load_checkpoint(root / "meanwhile", **other.state) == {"at": 2}
    return expected, [other.step() for _ in range(3)]


def test_the_same_bytes_as_a_save_that_waits(tmp_path: Path) -> None:
    """Although training goes on before they are written; and training resumes from them bit by bit."""
    for expected, got in run_ranks(_same_bytes, 2, str(tmp_path)):
        assert got == expected
    assert _files(tmp_path / "meanwhile") == _files(tmp_path / "waited")
    assert _files(tmp_path / "later") != _files(tmp_path / "waited")
    for name in ("waited", "meanwhile", "later"):
        verify_checkpoint(tmp_path / name).raise_if_damaged()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["later", "meanwhile", "waited"]


def _changed_by_hand(directory: str) -> None:
    root, job = Path(directory), _Job()
    job.step()
    tensors = [*job.model.parameters(), *(state["exp_avg"] for state in job.optimizer.state.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    saver = AsyncSaver()
    with _Gate() as gate:
        saver.save(root / "a", **job.state)
        for tensor in tensors:
            tensor.data.add_(1.0)  # which leaves no trace, and scripts that average weights do
        gate.opened.set()
        saver.wait()
    other = _Job(seed=1)
    load_checkpoint(root / "a", **other.state)
    loaded = [*other.model.parameters(), *(state["exp_avg"] for state in other.optimizer.state.values())]
    assert all(torch.equal(tensor, saved) for tensor, saved in zip(loaded, before, strict=True))


def test_what_is_changed_by_hand_is_saved_as_it_was(tmp_path: Path) -> None:
    run_ranks(_changed_by_hand, 2, str(tmp_path))


def _second_save(directory: str) -> bool:
    root, job, saver = Path(directory), _Job(), AsyncSaver()
    job.step()
    with _Gate() as gate:
        saver.save(root / "c", **job.state)
        threading.Timer(0.3, gate.opened.set).start()
        saver.save(root / "d", **job.state, total_limit=2)
        waited = (root / "c").exists()
        saver.wait()
    return waited


def test_a_second_save_waits(tmp_path: Path) -> None:
    assert run_ranks(_second_save, 2, str(tmp_path)) == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "d"]


def _disk_full(directory: str, seen_by: str) -> tuple[str, int]:
    root, job = Path(directory), _Job(width=256)
    job.step()
    saver = AsyncSaver()
    saver.save(root / "a", **job.state)
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    steps = 0
    try:
        saver.save(root / "b", **job.state, total_limit=1)
        if seen_by == "check":

            def train() -> None:
                nonlocal steps
                while True:
                    saver.check()
                    steps += 1
                    # Ranks are never at the same place at the same time; and the writing thread gets its turn.
                    time.sleep(0.02 if dist.get_rank() == 0 else 0.01)
                    job.step()

            message = _message(train)
        elif seen_by == "save":
            message = _message(lambda: saver.save(root / "c", **job.state))
        else:
            message = _message(saver.wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    job.step()
    saver.save(root / "d", **job.state)  # it was raised once, and the saver is as good as new
    saver.wait()
    return message, steps


@pytest.mark.parametrize("seen_by", ["check", "save", "wait"])
def test_an_error_surfaces_on_every_rank_at_the_same_step(tmp_path: Path, seen_by: str) -> None:
    first, second = run_ranks(_disk_full, 2, str(tmp_path), seen_by)
    assert first == second
    assert "rank 1: cannot write" in first[0]
    assert "File too large" in first[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "d"]
    assert verify_checkpoint(tmp_path / "a").is_valid


_ENDS = """
import sys, pathlib, resource, torch
from torch import nn
from fullshard.checkpoint import AsyncSaver, MemoryCopies
saver = AsyncSaver()
model = nn.Linear(300, 300)
saver.save(pathlib.Path(sys.argv[1]) / "a", model=model)
if sys.argv[2] != "succeeds":
    saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
if sys.argv[2] == "fails":
    saver.save(pathlib.Path(sys.argv[1]) / "b", model=model)
if sys.argv[2] == "copy fails":
    MemoryCopies(4).after_step(1, model=model)
print("the script is through")
"""


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.full) for how in ("succeeds", "copy fails")), "fails"]
)
def test_a_process_that_ends_waits_and_does_not_hide_an_error(tmp_path: Path, how: str) -> None:
    (tmp_path / "copies").mkdir()
    environ = {**os.environ, COPIES_DIR.name: str(tmp_path / "copies"), "TORCHELASTIC_MAX_RESTARTS": "1"}
    words = [sys.executable, "-c", _ENDS, str(tmp_path), how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=environ)
    assert "the script is through" in done.stdout
    assert verify_checkpoint(tmp_path / "a").is_valid
    if how == "succeeds":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        what = f"the checkpoint {tmp_path / 'b'}" if how == "fails" else "the next copy in host memory"
        assert f"fullshard: {what} was not saved: cannot write model-rank00000" in done.stderr
        assert "hint: check the disk, its quota, and the limit on the size of files (ulimit -f)" in done.stderr


def _die_meanwhile(rank: int, directory: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    path, job, saver = Path(directory) / "out", _Job(), AsyncSaver()
    job.step()
    saver.save(path / "a", **job.state)
    saver.wait()

    def kill(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith("optimizer-rank00001.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        sys.addaudithook(kill)
    saver.save(path / "b", **job.state, total_limit=1)
    message = _message(saver.wait)
    (Path(directory) / "message").write_text(message)
    os._exit(0)  # the process group cannot be left in order without its other member


def test_a_rank_killed_in_the_middle_leaves_the_previous_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_die_meanwhile, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    assert "lost the other ranks while" in (tmp_path / "message").read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".lease.json", "a"]
    assert latest_checkpoint(tmp_path / "out", thorough=True) == tmp_path / "out" / "a"


def _blocked_seconds(directory: str) -> tuple[list[float], list[float]]:
    """Seconds that training stands still for a save, in turn waited for and in the background."""
    torch.manual_seed(0)
    # 125 million parameters: 1.5 GB with Adam's state
    model = nn.Sequential(*(nn.Linear(2236, 2236, bias=False) for _ in range(25)))
    shard_model(model, unit_modules=list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(64, 2236)
    model(rows).square().mean().backward()
    optimizer.step()
    waited, blocked, saver = [], [], AsyncSaver()
    for turn in range(7):
        dist.barrier()
        began = time.perf_counter()
        save_checkpoint(Path(directory) / "a", model=model, optimizer=optimizer, overwrite=True)
        waited.append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        saver.save(Path(directory) / "b", model=model, optimizer=optimizer, overwrite=turn > 0)
        blocked.append(time.perf_counter() - began)
        saver.wait()
    return waited, blocked


@pytest.mark.full
@pytest.mark.timeout(500)
def test_training_waits_for_a_fraction_of_a_save() -> None:
    """At most 30 % of the save it would else wait for, at 125 million parameters with Adam's state on two ranks.

    Each background save is compared with the save right before it, and the median counts: other programs slow both.
    """
    with tempfile.TemporaryDirectory() as directory:
        waited, blocked = run_ranks(_blocked_seconds, 2, directory, timeout=480)[0]
    share = statistics.median(one / other for one, other in zip(blocked, waited, strict=True))
    print(f"\nwaited {waited} s, blocked {blocked} s: {share:.1%}")
    assert share <= 0.3
