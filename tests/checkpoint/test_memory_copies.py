"""Copies of the state in host memory: what is killed goes on from them, and no file on a disk is read.

pytest tests/checkpoint/test_memory_copies.py
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard import Accelerator
from fullshard.checkpoint import MemoryCopies, full_state_dict
from fullshard.checkpoint.copies import HostGrid, transfers
from fullshard.config.schema import CheckpointConfig, RunConfig
from fullshard.config.switches import COPIES_DIR
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.features import shard_model
from fullshard.launch import copies as places
from tests.distributed import run_ranks
from tests.launching import launch

STEPS = 12


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_every_host_gets_what_its_ranks_want(count: int, per_host: int, data: st.DataObject) -> None:
    size = count * per_host
    hosts = HostGrid(0, size, per_host)
    for rank in range(size):
        partner = hosts.partner_of(rank)
        assert partner is None if count == 1 else partner is not None and hosts.host_of(partner) != hosts.host_of(rank)
    held = {f"f{rank}": [host for host in range(count) if rank in hosts.kept_by(host)] for rank in range(size)}
    lost = data.draw(st.sets(st.integers(0, count - 1), max_size=1 if count > 1 else 0))
    held = {name: [host for host in there if host not in lost] for name, there in held.items()}
    assert all(held.values()), "one host can be lost"
    wanted = data.draw(st.lists(st.sets(st.sampled_from(sorted(held))), min_size=size, max_size=size))
    found = transfers(wanted, held, hosts)
    has = {host: {name for name, there in held.items() if host in there} for host in range(count)}
    for name, sender, receiver in found:
        assert name in has[hosts.host_of(sender)]
        assert name not in has[hosts.host_of(receiver)]
    for name, _, receiver in found:
        has[hosts.host_of(receiver)].add(name)
    assert all(wanted[rank] <= has[hosts.host_of(rank)] for rank in range(size))
    assert len({(name, hosts.host_of(receiver)) for name, _, receiver in found}) == len(found)


def test_what_a_killed_launcher_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MEMORY", tmp_path)
    hold = "import time; from pathlib import Path; from fullshard.launch import copies as c; c.MEMORY = Path({!r})\n"
    hold += "with c.copies_directory(): print('there', flush=True); time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", hold.format(str(tmp_path))], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (other,) = tmp_path.iterdir()
        with places.copies_directory() as own:
            assert set(tmp_path.iterdir()) == {other, Path(own[COPIES_DIR.name])}, "that of a living launcher stays"
        assert list(tmp_path.iterdir()) == [other]
        process.kill()
        process.wait()
        with places.copies_directory() as own:
            assert list(tmp_path.iterdir()) == [Path(own[COPIES_DIR.name])]


def test_refused_where_it_would_be_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="but this process was not started by it"):
        MemoryCopies(4)
    monkeypatch.setenv(COPIES_DIR.name, str(tmp_path))
    with pytest.raises(ConfigError, match="the launcher will not restart the processes"):
        MemoryCopies(4)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for none in (0, None):
        with pytest.raises(ConfigError, match="max_lost_steps is 0"):
            MemoryCopies(none)
    model = nn.Linear(4, 4)
    with MemoryCopies(4) as copies:
        monkeypatch.setattr("fullshard.checkpoint.copies.available_host_memory", lambda: 10)
        with pytest.raises(CheckpointError, match=r"have 10 B left, but copies of the state need \d+"):
            copies.after_step(1, model=model)


def test_an_accelerator_goes_on_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(COPIES_DIR.name, str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    config = RunConfig(checkpoint=CheckpointConfig(max_lost_steps=1))
    found: list[tuple[int | None, int, float, list[int]]] = []
    for read in (1, None):
        accelerator = Accelerator(fsdp_plugin=config)
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(4))))
        step = accelerator.load_copy()
        numbers = [number.item() for (number,) in itertools.islice(loader, read)]
        found.append((step, accelerator.step, full_state_dict(model)["weight"].item(), numbers))
        accelerator.step = 10
        for number in (1, 2):
            accelerator.keep_copy(number)
    assert "fullshard: copies in host memory: step 2 found, verified and loaded in " in capsys.readouterr().err
    (nothing, zero, weight, _), resumed = found
    assert (nothing, zero) == (None, 0) and resumed == (2, 10, weight, [1, 2, 3])
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="one model with one optimizer, but 2 are prepared"):
        accelerator.keep_copy(3)


class Net(nn.Module):
    """Dropout, so that the random numbers matter; a buffer; two units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(x))


def _job(strategy: str, shard_size: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    shard_model(net, unit_modules=[net.inner], strategy=strategy, shard_size=shard_size)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _as_hosts(root: Path, per_host: int) -> None:
    """Have this rank be one of several hosts, each with memory of its own."""
    rank = int(os.environ["RANK"])
    os.environ |= {
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "TORCHELASTIC_MAX_RESTARTS": "1",
        COPIES_DIR.name: str(root / f"host{rank // per_host}"),
    }
    Path(os.environ[COPIES_DIR.name]).mkdir(exist_ok=True)


def _train_and_go_on(root: Path, per_host: int, strategy: str, shard_size: int | None) -> tuple[list[float], Any]:
    """Two copies' worth of steps, and the losses of two more."""
    _as_hosts(root, per_host)
    model, optimizer = _job(strategy, shard_size)
    torch.manual_seed(int(os.environ["RANK"]))
    with MemoryCopies(2, say=lambda _: None) as copies:
        assert copies.load(model=model, optimizer=optimizer) is None
        for step in (1, 2):
            _step(model, optimizer)
            copies.after_step(step, model=model, optimizer=optimizer, extra={"loader": step * 4})
    weights = full_state_dict(model, rank0_only=False)
    return [_step(model, optimizer) for _ in range(2)], weights


def _resume(
    root: Path, per_host: int, strategy: str, shard_size: int | None
) -> tuple[Any, list[float], Any, list[str]]:
    _as_hosts(root, per_host)
    model, optimizer = _job(strategy, shard_size)
    said: list[str] = []
    with MemoryCopies(2, say=said.append) as copies:
        extra = copies.load(model=model, optimizer=optimizer)
        weights = full_state_dict(model, rank0_only=False)
        losses = [_step(model, optimizer) for _ in range(2)] if extra else []
        if extra:  # and the next copy is as good as the first
            copies.after_step(int(extra["step"]) + 1, model=model, optimizer=optimizer)
    return extra, losses, weights, said


def _check(before: list[Any], after: list[Any], *, same_size: bool) -> None:
    for rank, (extra, losses, weights, _) in enumerate(after):
        assert extra == {"step": 2, "loader": 8}
        for name, value in before[0][1].items():
            assert torch.equal(value, weights[name]), name
        if same_size:
            assert losses == before[rank][0], "random numbers go on, too"


def test_a_lost_host_is_made_good_by_its_partner(tmp_path: Path) -> None:
    before = run_ranks(_train_and_go_on, 2, tmp_path, 1, "FULL_SHARD", None)
    shutil.rmtree(tmp_path / "host1")
    _check(before, run_ranks(_resume, 2, tmp_path, 1, "FULL_SHARD", None), same_size=True)
    assert {path.name[:11] for path in tmp_path.glob("host*/*")} == {"step-000003"}, "older ones have gone"


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize(
    ("strategy", "shard_size"),
    [("FULL_SHARD", None), ("NO_SHARD", None), ("HYBRID_SHARD", 2), ("SHARD_OPTIMIZER", None)],
)
def test_any_host_can_be_lost(tmp_path: Path, strategy: str, shard_size: int | None, lost: int) -> None:
    """Of three with two ranks each; another one comes, or the two that are left go on, or one of them."""
    before = run_ranks(_train_and_go_on, 6, tmp_path, 2, strategy, shard_size)
    shutil.rmtree(tmp_path / f"host{lost}")
    for count in (3, 2):
        root = tmp_path / f"{count} hosts"
        for new, old in enumerate(host for host in range(3) if count == 3 or host != lost):
            if old != lost:
                shutil.copytree(tmp_path / f"host{old}", root / f"host{new}")
            else:
                root.mkdir(exist_ok=True)
        after = run_ranks(_resume, 2 * count, root, 2, strategy, shard_size)
        _check(before, after, same_size=count == 3)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _newest(host: Path, rank: int) -> Path:
    """A file of a rank's in the copy that counts."""
    (directory,) = [path for path in host.iterdir() if (path / "manifest.json").exists()]
    return directory / f"model-rank{rank:05d}.safetensors"


def test_a_damaged_copy_is_refused_and_the_partners_taken(tmp_path: Path) -> None:
    before = run_ranks(_train_and_go_on, 2, tmp_path, 1, "FULL_SHARD", None)
    own = _newest(tmp_path / "host0", 0)
    _flip(own)
    _check(before, run_ranks(_resume, 2, tmp_path, 1, "FULL_SHARD", None), same_size=True)
    for host in ("host0", "host1"):
        _flip(_newest(tmp_path / host, 0))
    for extra, _, _, said in run_ranks(_resume, 2, tmp_path, 1, "FULL_SHARD", None):
        assert extra is None
        assert not said or re.search(
            "skipping the copy .*no host has an intact copy of model-rank00000.*; .* is damaged between", said[0]
        )
    assert not list(tmp_path.glob("host*/*")), "it is of no use to anybody"


OWN = """
import json, os, signal, sys, time
from pathlib import Path

import torch

from fullshard import fully_shard
from fullshard.checkpoint import MemoryCopies
from fullshard.launch import init_process_group_from_environment
from fullshard.launch.journal import record_events

directory, steps, most, where = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
environment = init_process_group_from_environment(torch.device("cpu"))
record_events(directory)
is_first = not (directory / "killed").exists()


def die():
    (directory / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if is_first and where.partition(":")[0] in ("write", "send", "seal", "clear"):
    from fullshard.checkpoint import copies as module
    point, rank, nth = where.split(":")
    owner, name = {
        "write": (module.RankWriter, "_write"), "send": (module, "_send_to_partner"),
        "seal": (module, "_seal"), "clear": (module, "_remove_others"),
    }[point]
    original, count = getattr(owner, name), [0]

    def counted(*arguments):
        count[0] += 1
        if environment.rank == int(rank) and count[0] == int(nth):
            time.sleep(0.2)
            die()
        return original(*arguments)

    setattr(owner, name, counted)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(environment.rank)
with MemoryCopies(most) as copies:
    extra = copies.load(model=model, optimizer=optimizer)
    begin = extra["step"] if extra else 0
    for step in range(begin + 1, steps + 1):
        generator = torch.Generator().manual_seed(1000 * step + environment.rank)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with (directory / f"losses{environment.rank}").open("a") as file:
            file.write(json.dumps([step, float(loss), begin]) + "\\n")
        if is_first and where == f"step:{environment.rank}:{step}":
            die()
        copies.after_step(step, model=model, optimizer=optimizer)
        time.sleep(0.02)
"""
"""A loop of one's own, killed at a place of its first attempt; dropout, so that random numbers matter."""


def _run(directory: Path, where: str, *, most: int = 4, ranks: int = 2) -> tuple[dict[int, list[list[Any]]], str]:
    """Losses by rank, each with its step and the one that its attempt began after."""
    directory.mkdir()
    (directory / "own.py").write_text(OWN)
    before = set(places.MEMORY.glob("fullshard-copies-*"))
    words = ["--num_processes", str(ranks), "--cpu", "--max_restarts", "1", "own.py", str(directory), str(STEPS)]
    done = launch(*words, str(most), where, cwd=directory, timeout=280)
    assert done.returncode == 0, done.stderr
    new = set(places.MEMORY.glob("fullshard-copies-*")) - before
    assert all(map(_is_held, new)), "nothing is left; other jobs have a launcher"
    lines = {rank: (directory / f"losses{rank}").read_text().splitlines() for rank in range(ranks)}
    return {rank: [json.loads(line) for line in found] for rank, found in lines.items()}, done.stderr


def _is_held(directory: Path) -> bool:
    try:
        with (directory / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # gone meanwhile
        return not directory.exists()
    return False


def _lost(losses: dict[int, list[list[Any]]], undisturbed: dict[int, list[list[Any]]]) -> int:
    """Steps that were made twice; those that count have the very losses of a run in which nothing happened."""
    lost = 0
    for rank, lines in losses.items():
        (begin,) = {begin for _, _, begin in lines if begin}
        assert {step: loss for step, loss, _ in lines} == {step: loss for step, loss, _ in undisturbed[rank]}
        lost = max(lost, max(step for step, _, start in lines if not start) - begin)
    return lost


def test_a_killed_rank_goes_on_from_memory(tmp_path: Path) -> None:
    losses, said = _run(tmp_path / "out", "step:1:9")
    for rank, lines in losses.items():
        (begin,) = {begin for _, _, begin in lines if begin}
        assert max(step for step, _, start in lines if not start) - begin <= 4
        first = {step: loss for step, loss, start in lines if not start}
        again = {step: loss for step, loss, start in lines if start}
        assert set(first) & set(again) and all(first[step] == again[step] for step in set(first) & set(again)), rank
        assert max(again) == STEPS
    assert "a kill undoes at most 4 steps" in said
    files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"own.py", "killed", "losses0", "losses1", "events.jsonl"}, "nothing was written to the disk"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[Any]]]:
    return _run(tmp_path_factory.mktemp("copies") / "out", "never")[0]


@pytest.mark.full
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("where", ["step:0:7", "step:1:10"])
def test_no_more_steps_are_lost_than_allowed(tmp_path: Path, undisturbed: Any, where: str, most: int) -> None:
    losses, _ = _run(tmp_path / "out", where, most=most)
    assert _lost(losses, undisturbed) <= most


@pytest.mark.full
@pytest.mark.parametrize("where", ["write:0", "write:1", "send:0", "send:1", "seal:0", "seal:1", "clear:0"])
def test_killed_while_a_copy_is_made(tmp_path: Path, undisturbed: Any, where: str) -> None:
    """The third one: before its files, before it counts on this host, and before the one before is removed."""
    losses, _ = _run(tmp_path / "out", f"{where}:3")
    assert _lost(losses, undisturbed) <= 4


SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch

import fullshard

directory = Path(sys.argv[1])
accelerator = fullshard.Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.arange(192.0).reshape(48, 4) / 192)
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=12)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
step = begin = accelerator.load_copy() or 0
for (batch,) in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    step += 1
    with (directory / f"losses{accelerator.process_index}").open("a") as file:
        file.write(json.dumps([step, float(loss.detach()), begin]) + "\\n")
    if step == 8 and not begin and accelerator.process_index == 1 and sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.keep_copy(step)
    time.sleep(0.02)
accelerator.end_training()
"""
"""With an `Accelerator`: 12 steps, data in an order of its own, a schedule."""


@pytest.mark.full
def test_a_script_with_an_accelerator(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = {}
    for what in ("train", "kill"):
        (tmp_path / what).mkdir()
        flags = ["--num_processes", "2", "--cpu", "--max_restarts", "1", "--max_lost_steps", "4"]
        done = launch(*flags, "script.py", str(tmp_path / what), what, cwd=tmp_path, timeout=280)
        assert done.returncode == 0, done.stderr
        lines = {rank: (tmp_path / what / f"losses{rank}").read_text().splitlines() for rank in (0, 1)}
        found[what] = {rank: [json.loads(line) for line in lines[rank]] for rank in lines}
    assert 0 < _lost(found["kill"], found["train"]) <= 4
    (tmp_path / "other.py").write_text(
        "import torch, fullshard\nfullshard.Accelerator().prepare(torch.nn.Linear(2, 2))\n"
    )
    done = launch(*flags, "other.py", cwd=tmp_path, timeout=280)
    assert "max_lost_steps had no effect" in done.stderr
