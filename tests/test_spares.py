"""Processes that wait with their imports done take the place of ranks that are started again, and are as new ones.

pytest tests/test_spares.py
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.core.errors import ConfigError
from fullshard.launch import bootstrap
from fullshard.launch.local import Hosts, LaunchJob
from fullshard.launch.processes import descendants
from fullshard.launch.spares import Spares
from tests.launching import LAUNCH, alive, environment, launch, started, wait_until

IT_WAITS = """
def spares():
    here = [Path("/proc", p, "cmdline") for p in os.listdir("/proc") if p.isdigit()]
    ours = [p for p in here if p.exists() and f"\\nPPid:\\t{os.getppid()}\\n" in (p.parent / "status").read_text()]
    return [p.parent for p in ours if "fullshard.launch.spare" in p.read_text()]

def are_idle(found):
    looks = []
    for _ in range(2):
        looks.append([(p / "stat").read_text().rpartition(")")[2].split() for p in found])
        time.sleep(0.5)
    return all(a[0] == b[0] == "S" and a[11:13] == b[11:13] for a, b in zip(*looks))

for step in range(2000):
    make_a_step()
    time.sleep(0.05)
    if rank == "0" and attempt == 0 and len(found := spares()) == 2 and are_idle(found):
        Path(sys.argv[1], "own.py").write_text("VALUE = 2")
        AT_LAST
    if attempt == 1 and step == 3 and rank == "1":
        raise ValueError("on purpose")
    if attempt == 2:
        break
"""

SCRIPT = """
import json, os, sys, time
from pathlib import Path

command, place = Path("/proc/self/cmdline").read_text(), Path(os.environ["FULLSHARD_PREEMPTION_DIR"])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
begin = time.monotonic()
os.environ["SET_BY_THE_SCRIPT"] = "yes"
import torch
TRAINER
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment
import own  # beside the script

main = sys.modules["__main__"]
found = {
    "spare": "fullshard.launch.spare" in command, "argv": sys.argv, "path": sys.path, "name": __name__,
    "file": __file__, "spec": __spec__ and __spec__.name, "package": __package__, "same": vars(main) is globals(),
    "trainer": "Trainer" in globals() and Trainer.__mro__[1].__module__,
    "environment": dict(os.environ), "imports": time.monotonic() - begin,
    "stdin": os.fstat(0).st_ino, "own": own.VALUE,
}
Path(sys.argv[1], f"{attempt}-{rank}.json").write_text(json.dumps(found))
print(f"rank {rank} speaks, attempt {attempt}", flush=True)
environment = init_process_group_from_environment(torch.device("cpu"))
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def make_a_step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""" + IT_WAITS.replace("AT_LAST", "os.kill(os.getpid(), 9)")

WITHOUT_TORCH = (
    """
import os, sys, time
from pathlib import Path
from fullshard.core.place import PLACE

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
is_spare = "fullshard.launch.spare" in Path("/proc/self/cmdline").read_text()
Path(sys.argv[1], f"{attempt}-{rank}-{is_spare}").touch()

def make_a_step():
    PLACE.begin_step(time.monotonic())
"""
    + IT_WAITS
)
"""Their imports take no time: for what becomes of processes."""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["script", "module"])
def test_it_is_as_a_new_process(tmp_path: Path, kind: str) -> None:
    """Names, arguments, search path, environment, streams, errors, Trainer's class; the script is read anew."""
    trainer = "" if kind == "script" else "from transformers import Trainer"
    (tmp_path / "train_it.py").write_text(SCRIPT.replace("TRAINER", trainer))
    (tmp_path / "own.py").write_text("VALUE = 1")
    target = ["train_it.py"] if kind == "script" else ["-m", "train_it"]
    flags = ["--cpu", "--num_processes", "2", "--max_restarts", "1", "--warm_spares"]
    done = launch(*flags, *target, str(tmp_path), "--a flag", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    ranks = {
        (attempt, rank): json.loads((tmp_path / f"{attempt}-{rank}.json").read_text())
        for attempt in range(2)
        for rank in range(2)
    }
    for rank in range(2):
        cold, warm = ranks[0, rank], ranks[1, rank]
        assert (cold.pop("spare"), warm.pop("spare")) == (False, True), done.stderr
        assert warm.pop("imports") < cold.pop("imports") / 4
        assert (cold.pop("own"), warm.pop("own")) == (1, 2)
        before, now = cold.pop("environment"), warm.pop("environment")
        assert {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)} <= {
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_ERROR_FILE",
            "MASTER_PORT",
            "TORCHINDUCTOR_CACHE_DIR",  # which torch sets when it is imported, to its default
        }
        assert warm == cold
        assert not trainer or cold["trainer"].startswith("fullshard")
        assert f"rank {rank} speaks, attempt 1" in done.stdout
    assert "[rank 1] rank 1 speaks, attempt 1" in done.stdout
    report = done.stderr[done.stderr.index("failed with exit code 1") :]
    assert report.index("Traceback") < report.index("train_it.py") < report.index("ValueError: on purpose")
    assert "launch/" not in report[: report.index("ValueError")], "only the script's own lines"


def test_one_that_fails_is_started_again(tmp_path: Path) -> None:
    """Without another spare by then, as a new process."""
    (tmp_path / "train_it.py").write_text(WITHOUT_TORCH.replace("AT_LAST", "os.kill(os.getpid(), 9)"))
    flags = ["--cpu", "--num_processes", "2", "--max_restarts", "2", "--warm_spares"]
    done = launch(*flags, "train_it.py", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.rpartition("-")[::2] for path in tmp_path.glob("?-?-*")}
    assert {(name, is_spare) for name, is_spare in found if name[0] in "01"} == {
        *((f"0-{rank}", "False") for rank in range(2)),
        *((f"1-{rank}", "True") for rank in range(2)),
    }
    assert {name for name, _ in found} == {f"{attempt}-{rank}" for attempt in range(3) for rank in range(2)}


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """When the launcher is killed."""
    (tmp_path / "train_it.py").write_text(WITHOUT_TORCH.replace("AT_LAST", "Path('there').touch()"))
    flags = ["--cpu", "--num_processes", "2", "--max_restarts", "1", "--warm_spares"]
    with started(*LAUNCH, *flags, "train_it.py", str(tmp_path), cwd=tmp_path) as process:
        wait_until((tmp_path / "there").exists, 100, "spares")
        spares = [pid for pid in descendants() if "launch.spare" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(spares) == 2
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in spares), 10, "their end")


@pytest.fixture
def spares() -> Iterator[Spares]:
    made = Spares()
    yield made
    made.end()
    assert not made.pids


def _leave(directory: Path, *modules: str, pid: int = 1) -> None:
    left = {"modules": modules, "environment": {**environment(), "WHILE_IT_IMPORTS": "1"}}
    (directory / f"{bootstrap.IMPORTS}-{pid}").write_text(json.dumps(left))


def test_one_that_has_done_its_imports_is_taken(spares: Spares, tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv, sys.orig_argv[2:], 'WHILE_IT_IMPORTS' in os.environ); sys.exit(3)"
    (tmp_path / "it.py").write_text(text)
    _leave(tmp_path, "no_such_module", "json.decoder")
    spares.look(tmp_path, {0: 1})
    assert not list(tmp_path.glob("imports-*")), "with the environment of the rank, secrets too"
    (spare,) = spares._spares.values()
    wait_until(lambda: spare.is_ready, 30, "its imports")
    command = [sys.executable, bootstrap.__file__, "script", str(tmp_path / "it.py"), "a b"]
    with (tmp_path / "out").open("w") as out:
        process: Any = spares.take(0, command, environment(), (out, None))
    assert process is spare.process and process.wait(30) == 3
    words = [str(tmp_path / "it.py"), "a b"]
    assert (tmp_path / "out").read_text() == f"{words} {['script', *words]} False\n"
    assert spares.take(0, command, environment(), (None, None)) is None


def test_one_that_still_imports_is_not_taken(spares: Spares, tmp_path: Path) -> None:
    """It may hang there. The launcher knows what the import has started, too."""
    (tmp_path / "slow.py").write_text("import subprocess; subprocess.run(['sleep', '600'])")
    left = {"modules": ["slow"], "environment": {**environment(), "PYTHONPATH": str(tmp_path)}}
    (tmp_path / f"{bootstrap.IMPORTS}-1").write_text(json.dumps(left))
    spares.look(tmp_path, {0: 1})
    (pid,) = spares.pids
    wait_until(lambda: len(spares.processes) == 2, 30, "the import")
    (below,) = spares.processes - {pid}
    command = [sys.executable, bootstrap.__file__, "script", "it.py"]
    assert spares.take(0, command, environment(), (None, None)) is None
    assert not alive(pid)
    os.kill(below, signal.SIGKILL)


def test_one_that_cannot_be_started_is_left_out(spares: Spares, tmp_path: Path) -> None:
    left = {"modules": [], "environment": {"TOO_LONG": "x" * (1 << 20)}}
    (tmp_path / f"{bootstrap.IMPORTS}-1").write_text(json.dumps(left))
    spares.look(tmp_path, {0: 1})
    assert not spares.pids and not list(tmp_path.iterdir())


def _has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_they_come_one_after_the_other(spares: Spares, tmp_path: Path) -> None:
    for rank in range(2):
        _leave(tmp_path, "json", pid=rank)
    spares.look(tmp_path, {0: 0, 1: 1, 2: 2})
    assert len(spares.pids) == 1
    spares.look(tmp_path, {0: 0, 1: 1, 2: 2})
    assert len(spares.pids) == 1, "the first has only begun"
    end = time.monotonic() + 30
    while len(spares.pids) < 2 and time.monotonic() < end:
        time.sleep(0.05)
        spares.look(tmp_path, {0: 0, 1: 1, 2: 2})
    assert len(spares.pids) == 2, "the third has left nothing"


def test_what_cannot_be_taken_is_ended(spares: Spares, tmp_path: Path) -> None:
    """Another program, and one that has ended."""
    python = [sys.executable, "-m", "json"]
    for command, is_killed in ((["numactl", *python], False), ([sys.executable, "it.py"], False), (python, True)):
        _leave(tmp_path, "json")
        spares.look(tmp_path, {0: 1})
        (pid,) = spares.pids
        if is_killed:
            os.kill(pid, 9)
            wait_until(functools.partial(_has_ended, pid), 10, "its end")
        assert spares.take(0, command, environment(), (None, None)) is None
        assert not Path(f"/proc/{pid}").exists() and not spares.pids


def test_without_restarts_there_is_no_use_for_them() -> None:
    with pytest.raises(ConfigError, match="no process would be started again"):
        LaunchJob(("python",), 2, warm_spares=True)
    done = CliRunner().invoke(app, ["train", "--nproc", "1", "--warm-spares"])
    assert isinstance(done.exception, ConfigError) and "no process would be started again" in str(done.exception)
    LaunchJob(("python",), 2, warm_spares=True, max_restarts=1)
    LaunchJob(("python",), 2, Hosts(count=2, least=1), warm_spares=True)


@pytest.mark.parametrize("flags", [["--warm-spares"], ["--max-restarts", "2"]])
def test_where_others_start_processes_it_is_theirs(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    done = CliRunner().invoke(app, ["train", *flags])
    assert isinstance(done.exception, ConfigError) and f"{flags[0]} has no effect here" in str(done.exception)
