"""Deaths and full disks while a checkpoint is saved: what is accepted afterwards is whole, and the last one is there.

Run with `pytest test_checkpoint_faults.py`; 200 deaths and the cost of the checksums with `-m full -s`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import AsyncSaver, load_checkpoint, save_checkpoint, storage, tensor_file, verify_checkpoint
from fullshard.checkpoint.save import prepare_save
from fullshard.checkpoint.torch_format import with_torch_format
from fullshard.core.errors import CheckpointError
from fullshard.features import shard_model
from tests.distributed import run_ranks
from tests.launching import run_python

_DEATHS = Path(__file__).parents[1] / "scripts" / "deaths.py"


def _die(directory: Path, deaths: int) -> dict[str, int]:
    """Run the script, which checks everything itself; how often what happened."""
    seed = time.monotonic_ns()
    command = [sys.executable, str(_DEATHS), str(directory), str(deaths), str(seed)]
    done = run_python(command, Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"}, 30 + 5 * deaths)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(f"\nseed {seed}: {counts}")
    return counts


@pytest.mark.timeout(120)
def test_ranks_killed_while_they_save(tmp_path: Path) -> None:
    counts = _die(tmp_path, 10)
    assert counts["deaths"] == 10


@pytest.mark.full
@pytest.mark.timeout(1100)
def test_200_deaths(tmp_path: Path) -> None:
    """Of a random rank or of all, at a random moment of a save, waited for or in the background: no exception."""
    counts = _die(tmp_path, 200)
    assert counts["deaths"] == 200
    assert counts["in the middle of a save"] >= 100, "most deaths should hit a save"
    assert counts["committed nevertheless"] >= 1, "some deaths should come after the rename"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_checksums_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % of the time of a save, on a disk that takes 0.5 GiB/s; on a faster one of as much time."""
    model = nn.Linear(8192, 8192, bias=False)  # 256 MiB
    inside = [0.0]

    def timed(crc: int, data: Any) -> int:
        began = time.thread_time()  # not the time in which other programs had the processor
        value: int = google_crc32c.extend(crc, data)
        inside[0] += time.thread_time() - began
        return value

    monkeypatch.setattr(tensor_file, "google_crc32c", type("Timed", (), {"extend": staticmethod(timed)}))
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        for turn in range(4):
            save_checkpoint(Path(directory) / f"{turn}", model=model, total_limit=1)
        seconds = time.perf_counter() - began
    print(f"\nchecksums {inside[0]:.3f} s of {seconds:.3f} s: {inside[0] / seconds:.1%}")
    written_gib = 4 * 256 / 1024
    assert 0 < inside[0] <= 0.05 * max(seconds, written_gib / 0.5)


# -- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _message(function: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function()
    return str(caught.value)


def _saving(how: str) -> Callable[[Path, nn.Module], None]:
    """A save that waits, or one in the background whose end is waited for."""
    saver = AsyncSaver()

    def save(path: Path, model: nn.Module) -> None:
        if how == "waited":
            save_checkpoint(path, model=model, total_limit=1)
        else:
            saver.save(path, model=model, total_limit=1)
            saver.wait()

    return save


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return shard_model(nn.Linear(width, width, bias=False), unit_modules=[])


def _fails(root: str, how: str, width: int, fault: str) -> list[str]:
    """One good save, then one under a fault; what every rank is told."""
    small, large, save = _model(100), _model(width), _saving(how)
    save(Path(root) / "good", small)
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    effective = os.geteuid()
    target = Path(root)
    if fault.startswith("quota on rank") and dist.get_rank() == int(fault[-1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    elif fault == "permission":
        if dist.get_rank() == 0:
            target.chmod(0o555)
        dist.barrier()
        os.seteuid(65534)
    elif fault == "no directory":
        target = Path(root) / "good" / "manifest.json" / "below"
    try:
        message = _message(lambda: save(target / "bad", large))
    finally:
        os.seteuid(effective)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(root).chmod(0o755)
    load_checkpoint(Path(root) / "good", model=small)
    return [message]


def _check(root: Path, messages: list[list[str]], *parts: str) -> None:
    """The same typed error everywhere, the old checkpoint whole, nothing of the new one left."""
    assert messages[0] == messages[1]
    for part in parts:
        assert part in messages[0][0]
    verify_checkpoint(root / "good").raise_if_damaged()
    assert sorted(path.name for path in root.iterdir()) == ["good"]


@pytest.mark.parametrize("how", ["waited", "background"])
def test_disk_full(disk: Path, how: str) -> None:
    """Said before a byte is written."""
    _check(disk, run_ranks(_fails, 2, str(disk), how, 2000, "full"), "needs 15.29 MiB", "is free")


def _fills_up(root: str, how: str) -> list[str]:
    good, bad, save = _model(100), _model(600), _saving(how)  # 1.4 MiB, for which there is room when it begins
    save(Path(root) / "good", good)
    dist.barrier()
    taken = False

    def fill(event: str, args: tuple[Any, ...]) -> None:
        nonlocal taken
        if event == "open" and str(args[0]).endswith("model-rank00000.safetensors") and not taken:
            taken = True
            with (Path(root) / "other").open("wb") as file:
                file.write(bytes(1_200_000))

    if dist.get_rank() == 0:
        sys.addaudithook(fill)
    message = _message(lambda: save(Path(root) / "bad", bad))
    taken = True
    return [message]


@pytest.mark.parametrize("how", ["waited", "background"])
def test_a_disk_that_fills_up_meanwhile(disk: Path, how: str) -> None:
    messages = run_ranks(_fills_up, 2, str(disk), how)
    (disk / "other").unlink()
    _check(disk, messages, "cannot write model-rank0000", "No space left on device")


def _no_torchs_format(root: str, how: str, quota: int) -> list[str]:
    model, saver = _model(540), AsyncSaver()  # 1.1 MiB, half of it in each rank's file
    pending = with_torch_format(prepare_save(Path(root) / "good", saver.memory, model=model))

    def complete() -> None:
        if how == "waited":
            pending.complete(pending.destination.ranks)
        else:
            saver.begin(pending.destination, pending.complete)
            saver.wait()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if quota:
        resource.setrlimit(resource.RLIMIT_FSIZE, (quota, hard))
    try:
        return [_message(complete)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("how", ["waited", "background"])
def test_no_room_for_torchs_format_besides(disk: Path, how: str) -> None:
    """Seen beforehand; all ranks are told, and the checkpoint itself is whole."""
    messages = run_ranks(_no_torchs_format, 2, str(disk), how, 0)
    _check(disk, messages, "good is saved; writing torch's format into it failed", "needs 1.11 MiB")


@pytest.mark.parametrize("how", ["waited", "background"])
def test_torchs_format_fails_in_the_middle(tmp_path: Path, how: str) -> None:
    """torch raises what is no `Exception` then, which must not leave the other ranks waiting."""
    messages = run_ranks(_no_torchs_format, 2, str(tmp_path), how, 800_000)
    _check(tmp_path, messages, "good is saved; writing torch's format", "rank 0: cannot write pytorch_model_fsdp_0")


@pytest.mark.parametrize("how", ["waited", "background"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_quota_of_no_bytes(tmp_path: Path, how: str, rank: int) -> None:
    messages = run_ranks(_fails, 2, str(tmp_path), how, 100, f"quota on rank {rank}")
    _check(tmp_path, messages, f"rank {rank}: cannot write model-rank0000{rank}.safetensors: File too large")


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    messages = run_ranks(_fails, 2, str(tmp_path), "waited", 100, "no directory")
    _check(tmp_path, messages, "cannot create a directory", "Not a directory")


def test_permission_lost() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change to another user and back")
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        messages = run_ranks(_fails, 2, str(root), "waited", 100, "permission")
        _check(root, messages, "cannot create a directory", "Permission denied")
    finally:
        shutil.rmtree(root)


def test_a_read_only_disk(disk: Path) -> None:
    model = nn.Linear(10, 10)
    save_checkpoint(disk / "good", model=model)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert "Read-only file system" in _message(lambda: save_checkpoint(disk / "bad", model=model))
    verify_checkpoint(disk / "good").raise_if_damaged()


# -- leftovers -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_save_under_way_is_nobodys_leftover(tmp_path: Path) -> None:
    """Another job beside it removes what dead saves left, never what a living one writes."""
    final = tmp_path / "a"
    storage.make_temp_directory(final, "0123456789abcdef", overwrite=False)
    dead = storage.temp_directory(tmp_path / "b", "fedcba9876543210")
    dead.mkdir()
    script = (
        "import sys, torch; from fullshard.checkpoint import save_checkpoint\n"
        "try: save_checkpoint(sys.argv[1], model=torch.nn.Linear(2, 2), overwrite=True)\n"
        "except Exception as error: print(error)"
    )
    said = {
        name: subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for name in ("a", "c")
    }
    assert "another process is saving to" in said["a"]
    assert said["c"] == ""
    assert not dead.exists()
    assert storage.temp_directory(final, "0123456789abcdef").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-a-0123456789abcdef", "c"]
    storage.discard_directory(storage.temp_directory(final, "0123456789abcdef"))
