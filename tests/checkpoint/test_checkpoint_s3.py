"""Checkpoints in S3, on a real server: whole or not there, whoever is killed and whatever the store answers.

pytest tests/checkpoint/test_checkpoint_s3.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fullshard.checkpoint import (
    AsyncSaver,
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from fullshard.checkpoint import objects as objects_module
from fullshard.checkpoint.lease import hold_folder, hold_name, let_go
from fullshard.checkpoint.objects import location
from fullshard.checkpoint.save import prepare_parts
from fullshard.checkpoint.store import remove_checkpoint
from fullshard.cli.main import app
from fullshard.core.errors import CheckpointError, ConfigError, StoreError
from fullshard.features import shard_model
from tests.distributed import run_ranks
from tests.stored import job, loaded, same, state_of

pytest.importorskip("moto", reason="needs the packages of fullshard[dev]")
pytest.importorskip("s3fs")

from tests.object_server import Asked, ObjectServer, running

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with running() as server:
        before = dict(os.environ)
        os.environ.update(server.environment)  # the client, which is kept for all tests, reads it when it is made
        yield server
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def bucket(server: ObjectServer, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"bucket-{abs(hash(request.node.name))}"
    server.bucket(name)
    server.behave()
    yield name
    server.behave()
    let_go()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that asks once."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"total_max_attempts": 1}}})
    objects_module._file_system.cache_clear()
    yield
    objects_module._file_system.cache_clear()


def test_s3_and_back_to_a_directory(server: ObjectServer, bucket: str, tmp_path: Path) -> None:
    """What any tool copies out of a bucket is a checkpoint on disk, and the other way round, bit by bit."""
    model, optimizer = job()
    there = save_checkpoint(f"s3://{bucket}/run/a", model=model, optimizer=optimizer)
    here = save_checkpoint(tmp_path / "b", model=model, optimizer=optimizer)
    files = fsspec.filesystem("s3")
    files.get(f"{bucket}/run/a/", f"{tmp_path}/a/", recursive=True)
    files.put(f"{here}/", f"{bucket}/run/b/", recursive=True)
    for path in (tmp_path / "a", location(f"s3://{bucket}/run/b")):
        verify_checkpoint(path).raise_if_damaged()
        assert same(loaded(path)[1], state_of(model, optimizer))
    save_checkpoint(there, model=model, optimizer=optimizer, overwrite=True)
    files.get(f"{bucket}/run/a/", f"{tmp_path}/again/", recursive=True)
    verify_checkpoint(tmp_path / "again").raise_if_damaged()
    for name in ("model", "optimizer"):
        (found,) = (tmp_path / "again").glob(f"{name}-rank*")
        # The header says of which save a file is, and is as long.
        assert found.read_bytes()[-400:] == (tmp_path / "b" / f"{name}-rank00000.safetensors").read_bytes()[-400:]


def test_answers_that_fail_are_asked_for_again(server: ObjectServer, bucket: str) -> None:
    """Every request is refused once."""
    seen: set[Asked] = set()

    def first(asked: Asked) -> bool:
        is_first = asked not in seen
        seen.add(asked)
        return is_first and asked.changes

    server.refuses = first
    model, optimizer = job()
    saved = save_checkpoint(f"s3://{bucket}/a", model=model, optimizer=optimizer)
    assert len(seen) > 5
    assert same(loaded(saved)[1], state_of(model, optimizer))


def test_a_manifest_whose_answer_is_lost_counts(server: ObjectServer, bucket: str) -> None:
    """It is asked for again, is there already, and is one's own."""
    lost: list[Asked] = []

    def loses(asked: Asked) -> bool:
        is_it = asked.method == "PUT" and asked.path.endswith("manifest.json") and not lost
        lost.extend([asked] * is_it)
        return is_it

    server.loses = loses
    saved = save_checkpoint(f"s3://{bucket}/a", model=job()[0])
    assert lost
    verify_checkpoint(saved).raise_if_damaged()


class _Breaks:
    """Counts changes up to a certain one."""

    def __init__(self, number: int) -> None:
        self._number, self.count = number, 0

    def from_it_on(self, asked: Asked) -> bool:
        self.count += asked.changes
        return asked.changes and self.count >= self._number

    def at_it(self, asked: Asked) -> bool:
        self.count += asked.changes and self.count < self._number
        return asked.changes and self.count == self._number

    def after_it(self, asked: Asked) -> bool:
        return asked.changes and self.count == self._number


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces"])
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer-lost"])
def test_a_store_that_fails_at_any_request(server: ObjectServer, bucket: str, replaces: bool, lost: bool) -> None:
    """From the n-th change on, every one: the old checkpoint is whole or the new one is, and the error says so."""
    model, optimizer = job()
    old = state_of(model, optimizer)
    failed = 0
    for number in range(1, 100):
        path = f"s3://{bucket}/{number}"
        if replaces:
            save_checkpoint(path, model=model, optimizer=optimizer, extra={"is": "old"})
        newer, newer_optimizer = job(seed=1)
        server.behave()
        breaks = _Breaks(number)
        if lost:
            server.loses, server.refuses = breaks.at_it, breaks.after_it
        else:
            server.refuses = breaks.from_it_on
        try:
            save_checkpoint(path, model=newer, optimizer=newer_optimizer, extra={"is": "new"}, overwrite=replaces)
            is_saved = True
        except (CheckpointError, StoreError) as error:
            assert f"s3://{bucket}" in str(error)
            is_saved = False
            failed += 1
        is_over = breaks.count < number
        server.behave()
        let_go()
        present = latest_checkpoint(f"s3://{bucket}")
        if str(present) == path:
            extra, state = loaded(path)
            assert same(state, state_of(newer, newer_optimizer) if extra["is"] == "new" else old)
            assert extra["is"] == "new" or not is_saved
        else:
            assert not is_saved
            assert not replaces
        # The next save there is as any other.
        save_checkpoint(path, model=newer, optimizer=newer_optimizer, extra={"is": "again"}, overwrite=True)
        assert loaded(path)[0] == {"is": "again"}
        remove_checkpoint(location(path))
        if is_over:
            break
    assert failed > 5


_SAVES = """
import sys, torch
from tests.stored import job
from fullshard.checkpoint import save_checkpoint
model, optimizer = job(seed=1)
save_checkpoint(sys.argv[1], model=model, optimizer=optimizer, extra={"is": "new"}, overwrite=True)
"""


def _killed(server: ObjectServer, path: str, method: str, ending: str) -> None:
    """Save in another process, which is killed when it asks for this."""
    server.release.clear()
    server.holds = lambda asked: asked.method == method and ending in asked.path
    process = subprocess.Popen([sys.executable, "-c", _SAVES, path])
    assert server.reached.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    server.release.set()


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces"])
@pytest.mark.parametrize("at", ["model-rank", "optimizer-rank", "manifest.json"])
def test_a_process_that_is_killed(server: ObjectServer, bucket: str, at: str, replaces: bool) -> None:
    path = f"s3://{bucket}/run/a"
    model, optimizer = job()
    if replaces:
        save_checkpoint(path, model=model, optimizer=optimizer, extra={"is": "old"})
    _killed(server, path, "PUT", at)
    server.behave()
    present = latest_checkpoint(f"s3://{bucket}/run")
    if replaces:
        verify = verify_checkpoint(path)
        assert not [problem for problem in verify.problems if "is not part of the checkpoint" not in problem]
        assert loaded(present)[0] == {"is": "old"}
    else:
        assert present is None
    newer, newer_optimizer = job(seed=2)
    save_checkpoint(path, model=newer, optimizer=newer_optimizer, extra={"is": "next"}, overwrite=True)
    verify_checkpoint(path).raise_if_damaged()
    assert loaded(path)[0] == {"is": "next"}


def test_a_store_that_does_not_answer_is_not_an_empty_one(server: ObjectServer, bucket: str, impatient: None) -> None:
    model, optimizer = job()
    saved = save_checkpoint(f"s3://{bucket}/run/a", model=model, optimizer=optimizer)
    for method in ("GET", "HEAD"):
        server.refuses = lambda asked, method=method: asked.method == method  # type: ignore[misc]
        for question in (latest_checkpoint, verify_checkpoint):
            with pytest.raises(StoreError, match=f"s3://{bucket}/run.* cannot be "):
                question(f"s3://{bucket}/run" if question is latest_checkpoint else saved)
        with pytest.raises(CheckpointError, match="cannot be ") as caught:
            load_checkpoint(saved, model=model, optimizer=optimizer)
        assert type(caught.value) is CheckpointError  # and not damaged


def test_a_bucket_that_is_not_there(server: ObjectServer) -> None:
    with pytest.raises((ConfigError, CheckpointError), match="s3://no-such-bucket"):
        save_checkpoint("s3://no-such-bucket/a", model=job()[0])
    assert latest_checkpoint("s3://no-such-bucket/run") is None


def test_one_job_at_a_time(server: ObjectServer, bucket: str) -> None:
    """A second job is refused, and one that has ended is not in the way."""
    folder = f"s3://{bucket}/run"
    code = (
        "import sys, os\nfrom fullshard.checkpoint.lease import hold_folder\n"
        "from fullshard.checkpoint.objects import location\n"
        "hold_folder(location(sys.argv[1])); print('held', flush=True); sys.stdin.read(); os._exit(9)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"run is in use: process {other.pid} on "):
        hold_folder(location(folder))
    with pytest.raises(CheckpointError, match="run is in use"):
        save_checkpoint(f"{folder}/a", model=job()[0])
    other.communicate("")
    assert hold_folder(location(folder))
    assert not hold_folder(location(folder))
    let_go()
    assert hold_name(location(f"{folder}/a"))
    assert [name.startswith("run/.a.lease.json.") for name in server.names(bucket)] == [True]
    let_go()
    assert server.names(bucket) == []


def test_a_background_save_and_parts(server: ObjectServer, bucket: str) -> None:
    model, optimizer = job()
    with AsyncSaver() as saver:
        path = saver.save(f"s3://{bucket}/run/a", model=model, optimizer=optimizer)
        expected = state_of(model, optimizer)
        optimizer.step()
        assert saver.wait() == path
    assert same(loaded(path)[1], expected)
    parts: Any = {f"part_{n}": {"model": job(n)[0]} for n in range(2)}
    both = f"s3://{bucket}/run/both"
    server.refuses = lambda asked: asked.method == "PUT" and asked.path.endswith("part_1/manifest.json")
    pending = prepare_parts(both, parts)
    with pytest.raises(CheckpointError, match="part_1"):
        pending.complete(pending.destination.ranks)
    server.behave()
    assert latest_checkpoint(f"s3://{bucket}/run") == path
    pending = prepare_parts(both, parts)
    pending.complete(pending.destination.ranks)
    assert str(latest_checkpoint(f"s3://{bucket}/run")) == both
    with pytest.raises(CheckpointError, match="an object store cannot replace several models at the same time"):
        prepare_parts(both, parts, overwrite=True)


_LARGE = """
import resource, sys, torch
from torch import nn
from typer.testing import CliRunner
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from tests.stored import job
save_checkpoint(sys.argv[1] + "/small", model=job()[0])  # what the client needs for itself
model = nn.Linear(6000, 8000, bias=False)
before = model.weight.detach().sum()
peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
save_checkpoint(sys.argv[1] + "/large", model=model)
peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
model.weight.data.zero_()
load_checkpoint(sys.argv[1] + "/large", model=model)
peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
assert torch.equal(model.weight.sum(), before)
print(*(peak - peaks[0] for peak in peaks[1:]))
"""


def test_parts_are_sent_and_ranges_are_read(server: ObjectServer, bucket: str) -> None:
    """Neither holds a file of 192 MB."""
    done = subprocess.run(
        [sys.executable, "-c", _LARGE, f"s3://{bucket}"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    saving, loading = map(int, done.stdout.split())
    print(f"peaks beyond the model: save {saving / 1024:.0f} MiB, load {loading / 1024:.0f} MiB")
    assert saving < 80 * 1024
    assert loading < 100 * 1024
    sent = [asked for asked in server.asked if "partNumber" in asked.query and "large/model-rank" in asked.path]
    assert len(sent) == 12
    assert max(asked.nbytes for asked in server.asked) == 4 * 2**20


def _save(path: str) -> None:
    model, optimizer = _sharded(seed=0)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer, total_limit=1)


def _load(path: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(seed=1)
    load_checkpoint(path, model=model, optimizer=optimizer)
    state = {k: optimizer.state[model.weight][k].full_tensor() for k in ("exp_avg", "exp_avg_sq")}  # type: ignore[index]
    return state | full_state_dict(model, rank0_only=False)


def _sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(300, 500)
    shard_model(model, unit_modules=[])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_any_world_size_into_any_other(server: ObjectServer, bucket: str) -> None:
    path = f"s3://{bucket}/run/a"
    run_ranks(_save, 3, path)
    verify_checkpoint(path).raise_if_damaged()
    found = [run_ranks(_load, size, path)[0] for size in (1, 2, 3)]
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


_ACCELERATOR = """
import sys, torch
import fullshard
from tests.stored import job, same, state_of
accelerator = fullshard.Accelerator()
model, optimizer = accelerator.prepare(*job())
for _ in range(2):  # the second replaces the first
    print(accelerator.save_state(sys.argv[1]), flush=True)
before = state_of(model, optimizer.optimizer)
model(torch.ones(2, 7)).sum().backward()
optimizer.step()
assert not same(before, state_of(model, optimizer.optimizer))
accelerator.load_state(sys.argv[1])
assert same(before, state_of(model, optimizer.optimizer))
accelerator.save_state(sys.argv[1] + "-later", wait=False)  # the process ends while it is written
"""


def test_commands_of_users(server: ObjectServer, bucket: str, tmp_path: Path) -> None:
    """The Accelerator in a process that ends while it saves; then every command of `fullshard ckpt` with a URL."""
    path = f"s3://{bucket}/run/a"
    done = subprocess.run(
        [sys.executable, "-c", _ACCELERATOR, path], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path}\n{path}\n"
    assert not [name for name in server.names(bucket) if "lease" in name], "they were let go"
    for words in (
        f"verify {path}",
        f"verify {path}-later",
        f"inspect {path}",
        f"diff {path} {path}-later",
        f"reshard {path} s3://{bucket}/run/b --world-size 3",
        f"diff {path} s3://{bucket}/run/b",
        f"reshard s3://{bucket}/run/b {path} --world-size 2 --overwrite",
        f"export {path} {tmp_path}/whole --to safetensors",
        f"import {tmp_path}/whole s3://{bucket}/run/c",
        f"diff {path} s3://{bucket}/run/c --model-only",
        f"prune s3://{bucket}/run --keep 1",
    ):
        done_here = CliRunner().invoke(app, ["ckpt", *words.split()])
        assert done_here.exit_code == 0, f"{words}: {done_here.output} {done_here.exception}"
    assert not any(name.startswith(("run/a/", "run/b/")) for name in server.names(bucket))


_LATE = """
import sys, time
from fullshard.checkpoint import AsyncSaver
from fullshard.checkpoint.save import Pending
from tests.stored import job
complete = Pending.complete
def late(pending, ranks):
    time.sleep(14)  # until connections and looked up names are forgotten
    return complete(pending, ranks)
Pending.complete = late
model, optimizer = job()
AsyncSaver().save(sys.argv[1], model=model, optimizer=optimizer)
"""


def test_a_process_that_ends_waits_for_its_save(server: ObjectServer, bucket: str) -> None:
    path = f"s3://{bucket}/a"
    done = subprocess.run([sys.executable, "-c", _LATE, path], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    verify_checkpoint(path).raise_if_damaged()
    assert not [name for name in server.names(bucket) if "lease" in name]


def _train(output: Path, data: Path, path: str, *more: str) -> subprocess.Popen[str]:
    words = (
        f"train --nproc 2 --device cpu --data {data} --output-dir {output} --checkpoint-dir {path} --save-every 2 "
        "--batch-size 2 --seq-len 16 --vocab-size 300 --no-plot --no-export --log-every 1"
    )
    code = "from fullshard.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words.split(), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_train_goes_on_from_the_bucket(server: ObjectServer, bucket: str, tmp_path: Path) -> None:
    """A run whose processes are all killed while they save goes on from the bucket, with another output directory."""
    (tmp_path / "data.txt").write_text("one and two make three. " * 2000)
    path = f"s3://{bucket}/run"
    server.release.clear()
    server.holds = lambda asked: asked.method == "PUT" and "step-000006/manifest.json" in asked.path
    first = _train(tmp_path / "one", tmp_path / "data.txt", path, "--steps", "8")
    assert server.reached.wait(200), first.communicate(timeout=10)[0]
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    server.release.set()
    server.behave()
    assert str(latest_checkpoint(path)) == f"{path}/step-000004"
    second = _train(tmp_path / "two", tmp_path / "data.txt", path, "--steps", "8")
    said, _ = second.communicate(timeout=250)
    assert second.returncode == 0, said
    assert f"resume: from {path}/step-000004, after step 4" in said
    assert sorted({name.split("/")[1] for name in server.names(bucket)}) == ["step-000006", "step-000008"]
    verify_checkpoint(f"{path}/step-000008").raise_if_damaged()
