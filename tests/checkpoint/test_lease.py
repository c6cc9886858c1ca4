"""A folder is one job's at a time: the second is refused by name, and a job that has ended is no obstacle.

pytest tests/checkpoint/test_lease.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from torch import nn

from fullshard import Accelerator
from fullshard.api.options import ProjectConfiguration
from fullshard.checkpoint import lease as leases
from fullshard.checkpoint import save_checkpoint
from fullshard.checkpoint.lease import LEASE_NAME, hold_folder, lease, let_go, require_free
from fullshard.checkpoint.objects import ObjectPath, location
from fullshard.core.errors import CheckpointError, ConfigError
from tests.launching import wait_until

HOLDER = """
import sys, time
from pathlib import Path
from fullshard.checkpoint.lease import hold_folder, hold_name
{"folder": hold_folder, "name": hold_name}[sys.argv[1]](Path(sys.argv[2]))
print("has it", flush=True)
time.sleep(600)
"""


@contextmanager
def another_job(kind: str, path: Path) -> Iterator[str]:
    """That has a folder or a name; what it is refused with. It is killed at the end."""
    command = [sys.executable, "-c", HOLDER, kind, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
            yield rf"{path} is in use: process {holder.pid} on .* reserved it \d+ s ago\nhint"
        finally:
            holder.kill()


def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with (
        another_job("folder", tmp_path) as refused,
        pytest.raises(ConfigError, match=refused),
        lease(tmp_path),
    ):
        pass
    assert (tmp_path / LEASE_NAME).exists()
    with lease(tmp_path), lease(tmp_path):  # a killed one has left it; within a process it is one's own
        assert json.loads((tmp_path / LEASE_NAME).read_text())["pid"] == os.getpid()
        hold_folder(tmp_path / "checkpoints")  # as a save there does
    (tmp_path / "checkpoints").rmdir()
    assert not list(tmp_path.iterdir())


def test_a_lease_in_an_object_store_lasts_as_long_as_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another host only that tells, whatever its clock says. One that stays as it is goes."""
    monkeypatch.setattr(leases, "LASTS_SECONDS", 0.3)
    monkeypatch.setattr(leases, "RENEWED_EVERY_SECONDS", 0.05)
    folder = cast("ObjectPath", location(f"memory://bucket/{tmp_path.name}"))
    theirs, path = {"host": "node7", "pid": 1, "born": "x", "since": time.time() - 500}, folder / f"{LEASE_NAME}.1"
    path.write_bytes(json.dumps(theirs).encode())
    with lease(folder):
        (own,) = folder.beneath()
        assert own.startswith(f"{LEASE_NAME}.") and own != path.name
    assert not folder.beneath()
    path.write_bytes(json.dumps(theirs).encode())
    read = leases._read
    monkeypatch.setattr(leases, "_read", lambda found: read(found) | {"renewed": time.time()})  # by that job
    with pytest.raises(ConfigError, match=r"process 1 on node7 reserved it 500 s ago\nhint"), lease(folder):
        pass
    assert [*folder.beneath()] == [path.name]


def test_of_two_that_begin_together_at_most_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has seen the other's when it writes its own, and both look afterwards."""
    folder = cast("ObjectPath", location(f"memory://bucket/{tmp_path.name}"))
    theirs = json.dumps({"host": "node7", "pid": os.getppid(), "born": leases._born(os.getppid())}).encode()
    write = ObjectPath.write_bytes

    def meanwhile(path: ObjectPath, data: bytes) -> None:
        write(path.with_name(f"{LEASE_NAME}.7"), theirs)
        write(path, data)

    monkeypatch.setattr(ObjectPath, "write_bytes", meanwhile)
    with pytest.raises(ConfigError, match=r"process \d+ on node7"), lease(folder):
        pass
    assert [*folder.beneath()] == [f"{LEASE_NAME}.7"]


def test_a_forked_process_does_not_keep_the_lease(tmp_path: Path) -> None:
    """Or workers of a data loader that outlive their parent would keep the next run out."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom fullshard.checkpoint.lease import hold_folder\n"
        "hold_folder(Path(sys.argv[1]))\n"
        "os.fork() or time.sleep(60)\nprint(flush=True)\nos._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"\n"
        assert parent.wait(30) == 0
        with lease(tmp_path):
            pass
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path).encode() in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["sparse", "deep", "other types"])
def test_what_is_no_lease_keeps_nobody_out_or_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / LEASE_NAME
    if kind == "sparse":
        with path.open("wb") as file:
            file.truncate(6 * 10**9)  # takes no room
    else:
        process = {"host": "x", "pid": "self", "begun": 1, "machine": "m", "since": 1}
        path.write_text("[" * 60_000 if kind == "deep" else json.dumps(process))
    began = time.monotonic()
    with lease(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < 5 and not list(tmp_path.iterdir())


def test_two_that_look_do_not_take_each_other_for_a_holder(tmp_path: Path) -> None:
    with (tmp_path / LEASE_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        require_free(tmp_path / "a")


def test_a_name_in_a_lease_does_not_steer_a_terminal(tmp_path: Path) -> None:
    theirs = {"host": "\x1b[2J" + "n" * 50_000, "pid": 1, "since": time.time()}
    with another_job("folder", tmp_path):
        (tmp_path / LEASE_NAME).write_text(json.dumps(theirs))
        with pytest.raises(ConfigError, match=r"process 1 on \\x1b\[2Jn+ \[\.\.\. ") as error, lease(tmp_path):
            pass
    assert len(str(error.value)) < 1000


def test_a_lease_is_renewed_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another host would take a job that runs for one that has ended."""
    monkeypatch.setattr(leases, "RENEWED_EVERY_SECONDS", 0.01)
    folder = location(f"memory://bucket/{tmp_path.name}")
    with lease(folder):
        (path,) = folder.iterdir()
        text = json.loads(path.read_bytes()) | {"renewed": 0.0}
        path.write_bytes(json.dumps(text).encode())
        wait_until(lambda: json.loads(path.read_bytes())["renewed"] > text["since"], 10, "a renewal")
        assert json.loads(path.read_bytes()) | {"renewed": 0.0} == text


def test_a_save_that_replaces_or_removes_is_kept_from_anothers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with another_job("folder", tmp_path) as refused:
        for options in ({}, {"overwrite": True}, {"total_limit": 1}):
            with pytest.raises(CheckpointError, match=refused):
                save_checkpoint(tmp_path / "a", model=model, **options)
    save_checkpoint(tmp_path / "a", model=model, overwrite=True)
    let_go()
    with another_job("name", tmp_path / "a") as refused:
        for options in ({"overwrite": True}, {"total_limit": 1}):
            with pytest.raises(CheckpointError, match=refused):
                save_checkpoint(tmp_path / "a", model=model, **options)
        save_checkpoint(tmp_path / "b", model=model, overwrite=True)  # another name is another's to use
        assert {path.name for path in tmp_path.iterdir()} == {".a.lease.json", ".b.lease.json", "a", "b"}
    save_checkpoint(tmp_path / "c", model=model, total_limit=1)
    let_go()
    assert {path.name for path in tmp_path.iterdir()} == {".a.lease.json", "c"}  # which the killed one left


def test_a_folder_that_cannot_be_made_is_an_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (("file", "File exists"), ("file/x", "Not a directory")):
        with pytest.raises(ConfigError, match=f"cannot create a directory at {tmp_path}/{folder}: {reason}"):
            lease(tmp_path / folder).__enter__()


def test_numbered_checkpoints_are_one_jobs(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    accelerator.prepare(nn.Linear(4, 4))
    with another_job("folder", tmp_path / "checkpoints") as refused, pytest.raises(ConfigError, match=refused):
        accelerator.save_state()
    accelerator.save_state()
    accelerator.end_training()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_0"}


@pytest.mark.full
def test_sft_is_refused_before_it_reads_anything(tmp_path: Path) -> None:
    from fullshard.recipes.sft import run
    from fullshard.recipes.sft_arguments import read_arguments

    words = ["--model_name_or_path", "nowhere", "--dataset_name", "none", "--output_dir", str(tmp_path)]
    with another_job("folder", tmp_path) as refused, pytest.raises(ConfigError, match=refused):
        run(read_arguments([*words, "--report_to", "none"], print))


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lease_that_is_let_go_while_it_is_opened_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    """A lock on a file without a name, or on one that is not the lease any more, keeps nobody out."""
    path, lock, times = tmp_path / LEASE_NAME, fcntl.flock, [0]

    def flock(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        times[0] += 1
        if times[0] == 1:
            path.unlink()
            if is_made_again:
                path.touch()

    monkeypatch.setattr("fcntl.flock", flock)
    descriptor = leases._take_file(path)
    try:
        assert os.path.samestat(os.fstat(descriptor), path.stat()) and times == [2]
    finally:
        os.close(descriptor)
