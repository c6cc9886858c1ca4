"""How a job ends when it is asked to at a bad moment, or when something that is not Python stands between.

pytest tests/launch/test_launch_ends.py. Real processes over Gloo.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.core.journal import read_journal
from fullshard.launch.failures import failure_report, what_others_said
from fullshard.launch.preemption import PREEMPTED
from fullshard.launch.scene import is_of_a_hang, is_of_a_loss
from tests.launching import LAUNCH, alive, free_port, read, started, started_into, wait_until

LOOP = """
import os, sys, time
from pathlib import Path
import torch
import fullshard
from fullshard.launch import init_process_group_from_environment

directory, late, fails = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fails"
rank = os.environ["RANK"]
(directory / f"pid{rank}").write_text(str(os.getpid()))
if rank == "1":
    time.sleep(late)
fullshard.should_stop()
(directory / f"listens{rank}").write_text("yes")
environment = init_process_group_from_environment(torch.device("cpu"))
fullshard.record_events(directory)
model = torch.nn.Linear(8, 1)
fullshard.fully_shard(model)
for step in range(10**6):
    model(torch.ones(4, 8)).square().mean().backward()
    if fullshard.should_stop():
        if fails and rank == "1":
            raise ValueError("the disk is full")
        (directory / f"saved{rank}").write_text(str(step))
        break
    (directory / f"steps{rank}").write_text(str(step))
    time.sleep(0.02)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def test_a_request_reaches_whoever_listens(job: Path) -> None:
    """Below a shell, while another rank does not listen yet, sent twice, and with nobody left to read the output."""
    (job / "run.sh").write_text('#!/bin/bash\npython loop.py "$@"\nexit $?\n')
    (job / "run.sh").chmod(0o755)
    reader, writer = os.pipe()
    command = [*LAUNCH, "--num_processes", "2", "--cpu", "--no_python", "./run.sh", str(job), "3", "saves"]
    path = f"{Path(LAUNCH[0]).parent}:{os.environ['PATH']}"
    with started_into(writer, *command, cwd=job, PATH=path) as launcher:
        os.close(writer)
        wait_until(lambda: bool(read(job / "listens0")), 60, "the start of rank 0")
        os.close(reader)
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        launcher.send_signal(signal.SIGTERM)
        assert not (job / "listens1").exists(), "rank 1 listens later"
        assert launcher.wait(timeout=60) == PREEMPTED
    assert read(job / "saved0") == read(job / "saved1") != ""
    said = [event["message"] for event in read_journal(job) if event["kind"] == "preemption"]
    assert said[-1] == "saved and stopped because of a signal"


def test_a_job_that_fails_when_it_was_asked_to_end_is_not_started_again(job: Path) -> None:
    command = [*LAUNCH, "--num_processes", "2", "--cpu", "--max_restarts", "1", "loop.py", str(job), "0", "fails"]
    with started(*command, cwd=job) as launcher:
        wait_until(lambda: bool(read(job / "steps1")), 60, "the first step")
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 1 and "ValueError: the disk is full" in output
    assert "restarting all processes" not in output


def test_signals_for_the_processes_before_there_are_any(job: Path) -> None:
    """While other hosts are waited for."""
    port = free_port()
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--machine_rank", "0"]
    command = [*LAUNCH, "--num_processes", "2", "--num_machines", "2", "--cpu", *where, "loop.py", str(job), "0", ""]
    with started(*command, cwd=job) as launcher:
        wait_until(lambda: _is_open(port), 60, "the start")
        time.sleep(1)  # it opens the port before it waits there
        launcher.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 143 and "Traceback" not in output


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


ORPHANS = """
import os, subprocess, sys, time
from pathlib import Path

directory, rank = Path(sys.argv[1]), os.environ["RANK"]
if rank == "0":
    for _ in range(40):
        subprocess.run("(sleep 0.1; true) &", shell=True)
(directory / f"there{rank}").touch()
time.sleep(600)
"""


def test_nothing_that_is_left_to_a_launcher_stays_a_zombie(tmp_path: Path) -> None:
    (tmp_path / "orphans.py").write_text(ORPHANS)
    with started(*LAUNCH, "--num_processes", "2", "--cpu", "orphans.py", str(tmp_path), cwd=tmp_path) as launcher:
        wait_until(lambda: (tmp_path / "there0").exists() and (tmp_path / "there1").exists(), 60, "the start")
        time.sleep(0.5)
        wait_until(lambda: not _zombies_of(launcher.pid), 10, "the end of what was left to the launcher")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=15) == 143


def _zombies_of(pid: int) -> int:
    done = subprocess.run(["ps", "--ppid", str(pid), "-o", "stat="], capture_output=True, text=True, check=False)
    return sum(state.startswith("Z") for state in done.stdout.split())


SHARED = """
import os, sys, time
from multiprocessing import shared_memory
from pathlib import Path

if os.environ["RANK"] == "0":
    memory = [shared_memory.SharedMemory(create=True, size=1 << 20) for _ in range(5)]
    Path(sys.argv[1]).write_text(" ".join(each.name for each in memory))
    time.sleep(600)
while not Path(sys.argv[1]).exists() or not Path(sys.argv[1]).read_text():
    time.sleep(0.1)
os.kill(os.getpid(), 45)
"""


def test_shared_memory_of_processes_that_were_ended_is_removed(tmp_path: Path) -> None:
    """By Python's own process for that, which is not killed with the rest; here because of a signal without a name."""
    (tmp_path / "shared.py").write_text(SHARED)
    names = tmp_path / "names"
    with started(*LAUNCH, "--num_processes", "2", "--cpu", "shared.py", str(names), cwd=tmp_path) as launcher:
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + 45 and "rank 1 of 2" in output and "was ended by signal 45\n" in output
    left = [name for name in names.read_text().split() if Path("/dev/shm", name).exists()]
    for name in left:
        shared_memory.SharedMemory(name).unlink()
    assert not left


def test_words_in_lines_of_source_say_nothing() -> None:
    text = "Traceback (most recent call last):\n  File 'a.py', line 3\n    a(timeout=5)  # CommunicationError\n"
    for last, hang, loss in (
        ("ConnectionError: no such host", False, False),
        ("RuntimeError: Timed out waiting 3000ms for recv operation", True, True),
        ("RuntimeError: Connection closed by peer", False, True),
    ):
        assert (is_of_a_hang(text + last), is_of_a_loss(text + last)) == (hang, loss)


@pytest.mark.full
def test_processes_below_a_shell_end_with_the_launcher(tmp_path: Path) -> None:
    """Those that fullshard runs itself; they start although the launcher is not their parent."""
    code = "import time; from fullshard.launch.bootstrap import die_with_launcher; die_with_launcher(); {}"
    here = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); time.sleep(600)"
    (tmp_path / "run.sh").write_text(f'#!/bin/bash\n{LAUNCH[0]} -c "{code.format(here)}"\nexit $?\n')
    (tmp_path / "run.sh").chmod(0o755)
    with started(*LAUNCH, "--num_processes", "1", "--cpu", "--no_python", "./run.sh", cwd=tmp_path) as launcher:
        wait_until(lambda: bool(read(tmp_path / "pid")), 60, "the start")
        launcher.kill()
        wait_until(lambda: not alive(int(read(tmp_path / "pid"))), 5, "the end")


SLOW_END = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(sys.argv[1], f"up-{attempt}-{rank}-{sys.argv[2]}").touch()
if attempt == "0":
    if rank == "1":
        time.sleep(1)
        sys.exit(1)
    time.sleep(600)
time.sleep(15)
"""


@pytest.mark.full
def test_a_request_while_processes_are_started_again_is_heard(tmp_path: Path) -> None:
    """Of two launchers the one whose process takes its time to end."""
    (tmp_path / "slow.py").write_text(SLOW_END)
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--max_restarts", "1"]
    command = [*LAUNCH, "--num_processes", "2", "--num_machines", "2", "--cpu", *where, "slow.py", str(tmp_path)]
    with started(*command, "a", cwd=tmp_path) as first, started(*command, "b", cwd=tmp_path) as second:
        wait_until(lambda: len(list(tmp_path.glob("up-0-*"))) == 2, 60, "the start")
        time.sleep(1 + 2.5)  # the failure, and half of the seconds until the other is killed
        asked = first if (tmp_path / "up-0-0-a").exists() else second
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(timeout=12) == 143
        assert not (tmp_path / "up-1-0-a").exists() and not (tmp_path / "up-1-0-b").exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_host_that_is_replaced_before_the_first_copy(tmp_path: Path) -> None:
    """Its processes know of no attempt before, and the others do: all make the same model nevertheless."""
    (tmp_path / "data.txt").write_text("".join(f"line {i} is {i * i % 17} long\n" for i in range(1500)))
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--max_restarts", "2"]
    train = ["-m", "fullshard", "train", "--steps", "4", "--output-dir", "out", "--max-lost-steps", "4", "--seq-len"]
    train += ["32", "--batch-size", "4", "--data", "data.txt", "--no-export", "--no-plot"]
    command = [*LAUNCH, "--num_processes", "2", "--num_machines", "2", "--cpu", *where, "--timeout", "40", *train]
    with started(*command, cwd=tmp_path) as first:
        assert first.stdout is not None
        with started(*command, cwd=tmp_path) as second:
            said: list[str] = []
            while not said or not said[-1].startswith("data:"):
                said.append(first.stdout.readline())
                assert said[-1], "".join(said)
            os.killpg(second.pid, signal.SIGKILL)
        with started(*command, cwd=tmp_path) as third:
            output, _ = first.communicate(timeout=200)
            third.communicate(timeout=60)
    assert (first.returncode, third.returncode) == (0, 0), output
    assert sum(event["kind"] == "restart" for event in read_journal(tmp_path / "out")) == 1, output


FAILS = """
import atexit, os, sys, types, weakref

class Aborts:
    def __del__(self):
        os.abort()  # as a thread of Gloo does that comes back to an interpreter which is ending

held, other = Aborts(), set()
weakref.finalize(other, print, "finalized")
atexit.register(print, "at exit", end="")
# NCCL waits then for what others do not come to, until its watchdog does this.
sys.modules["torch.distributed"] = types.SimpleNamespace(is_initialized=lambda: True, destroy_process_group=os.abort)
raise ValueError("the cause")
"""


def test_nothing_that_happens_as_a_failed_script_ends_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    with started(*LAUNCH, "--num_processes", "1", "--cpu", "fails.py", cwd=tmp_path) as launcher:
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "ended by SIGABRT" not in output
    assert "at exit" in output and "finalized" in output and "ValueError: the cause" in output


def test_what_ends_a_rank_that_has_failed_is_not_the_cause(tmp_path: Path) -> None:
    """NCCL's watchdog, say."""
    path = tmp_path / "error.json"
    report = {"message": "ValueError: one", "extraInfo": {"py_callstack": "ValueError: one", "timestamp": "1"}}
    path.write_text(json.dumps({"message": report}))
    for said in ("failed\nValueError: one\n", "was ended by SIGABRT\n"):
        failure = ProcessFailure(local_rank=0, pid=7, exitcode=-signal.SIGABRT, error_file=str(path))
        assert failure_report(0, failure, world_size=2).endswith(f"(process 7 on {socket.gethostname()}) {said}")
        path.unlink(missing_ok=True)


def test_of_a_killed_rank_others_are_quoted_if_they_name_it(tmp_path: Path) -> None:
    """They may first have noticed the end of processes that ended because of it."""
    failures = {rank: ProcessFailure(0, pid=rank + 70, exitcode=-9, error_file="") for rank in range(3)}
    for rank, gone in ((0, 1), (1, 2)):
        path = tmp_path / f"{rank}.json"
        message = f"CommunicationError: rank {rank}, unit 'a': rank {gone} of the group (process {gone + 70}) has ended"
        report = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": "1"}}
        path.write_text(json.dumps({"message": report}))
        failures[rank].error_file = str(path)
    said = what_others_said(2, failures)
    assert said.startswith("the others noticed it here: CommunicationError: rank 1, ") and said.count("\n") == 1
