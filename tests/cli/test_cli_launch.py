"""Starting processes on this host: environment, exit codes, the first failure last, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fullshard.core.errors import ConfigError
from fullshard.launch import RankEnvironment, device, rank_device, read_rank_environment
from fullshard.launch.failures import exit_code
from fullshard.launch.local import launch_local, worker_variables

WORKER = """
import os, sys, time
from pathlib import Path
from fullshard.core.errors import DataError, MissingExtraError
from fullshard.launch import init_process_group_from_environment, run_on_main
from fullshard.launch.worker import run_worker
import torch
import torch.distributed as dist

def main():
    mode, directory = sys.argv[1], Path(sys.argv[2])
    environment = init_process_group_from_environment(torch.device("cpu"))
    (directory / f"rank{environment.rank}").write_text(f"{os.getpid()} {environment} {os.environ['OMP_NUM_THREADS']}")
    dist.barrier()
    (directory / f"ready{environment.rank}").touch()
    if mode == "main":
        assert run_on_main(environment, lambda: environment.rank + 10) == 10
        def fail(): raise MissingExtraError("nothing", extra="none", purpose="this")
        try:
            run_on_main(environment, fail)
        except Exception as error:
            assert "this needs the package 'nothing'" in str(error), error
        else:
            raise AssertionError("nothing was raised")
    if environment.rank == 1:
        if mode == "raise": raise ValueError("the cause")
        if mode == "data": raise DataError("line 7 is empty")
        if mode == "kill": os.kill(os.getpid(), 9)
        if mode == "code": os._exit(7)
        if mode == "hang": time.sleep(600)
    if mode != "main":
        dist.barrier()

run_worker(main)
"""

LAUNCH = """
import gc, sys
from fullshard.launch.local import launch_local
code = launch_local("worker", sys.argv[1:], nproc=2)
gc.collect()
sys.exit(code)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield tmp_path
    for path in tmp_path.glob("rank*"):
        assert not _alive(int(path.read_text().split()[0])), "a worker outlived its launcher"


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _run(mode: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", LAUNCH, mode, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_success_and_shared_threads(job: Path) -> None:
    """Ranks see a torchrun-like environment and share the cores; rank 0's result and error reach every rank.

    The launcher leaves no file open.
    """
    done = _run("main", job)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        text = (job / f"rank{rank}").read_text()
        assert f"rank={rank}, world_size=2, local_rank={rank}, local_world_size=2, launched=True" in text
        assert text.endswith(f" {threads}")


BESIDE = """
import subprocess, sys
from fullshard.launch.local import launch_local
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
code = launch_local("worker", sys.argv[1:], nproc=2)
print("launched", code, "other", other.poll())
other.terminate()
print("ended", other.wait())
"""


@pytest.mark.full
def test_processes_that_are_not_of_the_job_are_left_alone(job: Path) -> None:
    """A notebook or a test that launches a job has children of its own, and waits for them itself."""
    command = [sys.executable, "-c", BESIDE, "raise", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "launched 1 other None\nended -15\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_first_failure_is_reported_last_in_full(job: Path) -> None:
    """Rank 0 fails too, of the lost connection; the report is of rank 1, which was first."""
    done = _run("raise", job)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: the cause"
    assert done.stderr.count("Traceback") == 1
    assert any(line.startswith("rank 1 of 2") and "failed with exit code 1" in line for line in lines)
    assert any("in main" in line for line in lines)


@pytest.mark.full
def test_a_users_mistake_is_a_message_without_traceback(job: Path) -> None:
    done = _run("data", job)
    assert (done.returncode, done.stderr) == (2, "DataError: line 7 is empty\n")


@pytest.mark.full
@pytest.mark.parametrize(("mode", "code", "words"), [("kill", 137, "was ended by SIGKILL"), ("code", 7, "exit code 7")])
def test_exit_code_of_the_failed_rank(job: Path, mode: str, code: int, words: str) -> None:
    done = _run(mode, job)
    assert done.returncode == code
    assert "rank 1 of 2" in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full),
        (signal.SIGKILL, -9),
    ],
)
def test_signal_ends_every_process_within_5_seconds(job: Path, number: signal.Signals, code: int) -> None:
    """Also if the launcher itself is killed; the workers hang in a collective at that moment."""
    command = [sys.executable, "-c", LAUNCH, "hang", str(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        try:
            _wait_for(job / "ready0", job / "ready1", launcher=launcher)
            pids = [int((job / f"rank{rank}").read_text().split()[0]) for rank in (0, 1)]
            assert all(_alive(pid) for pid in pids)
            launcher.send_signal(number)
            begin = time.monotonic()
            assert launcher.wait(timeout=5) == code
            while any(_alive(pid) for pid in pids):
                assert time.monotonic() - begin < 5, "a worker is still running"
                time.sleep(0.05)
        finally:
            launcher.kill()


def _wait_for(*paths: Path, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not all(path.exists() for path in paths):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)


def test_settings_of_the_user_are_kept() -> None:
    assert "OMP_NUM_THREADS" not in worker_variables(2, {"OMP_NUM_THREADS": "3"})
    assert worker_variables(10_000, {})["OMP_NUM_THREADS"] == "1"


def test_exit_codes_and_count() -> None:
    assert (exit_code(3), exit_code(-9)) == (3, 137)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        launch_local("worker", [], nproc=0)


def test_a_size_that_is_overwritten_later_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU sets it to the number of its own ranks."""
    for name, value in {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    first = read_rank_environment()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert read_rank_environment() == first == RankEnvironment(13, 16, 5, 8, launched=True)


def test_environment_is_read_or_refused() -> None:
    assert read_rank_environment({}) == RankEnvironment()
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_rank_environment(environ) == RankEnvironment(5, 8, 1, 4, launched=True)
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number, got None"):
        read_rank_environment({"RANK": "0"})
    with pytest.raises(ConfigError, match="RANK must be a whole number, got 'one'"):
        read_rank_environment({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK=2, WORLD_SIZE=2"):
        read_rank_environment({"RANK": "2", "WORLD_SIZE": "2"})


def test_device_of_a_rank() -> None:
    assert rank_device(RankEnvironment(), "cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="unknown device 'npu'"):
        rank_device(RankEnvironment(), "npu")
    if not torch.cuda.is_available():
        assert rank_device(RankEnvironment(), "auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="local rank 0 has no CUDA device: this host has 0"):
            rank_device(RankEnvironment(), "cuda")


def test_a_tpu_is_left_to_pytorch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "tpu")
    with pytest.raises(ConfigError, match="fullshard does not start TPU jobs"):
        device.kind_of("auto")
