"""A rank that does not go on, and one that is gone: the launcher names it, with its stack or with what others noticed.

pytest tests/features/watchdog/test_hung_ranks.py. Real processes over shared memory and Gloo.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from fullshard.core.journal import read_journal
from fullshard.core.process import StatusFile
from fullshard.launch import bootstrap
from fullshard.launch.bootstrap import PREEMPTION_DIR, STACK_SIGNAL
from fullshard.launch.scene import Scene
from tests.launching import LAUNCH, alive, free_port, read, started, wait_until

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import fullshard
import torch
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment

directory, how = Path(sys.argv[1]), sys.argv[2]
device, seconds = torch.device(sys.argv[3]), float(sys.argv[4])
environment = init_process_group_from_environment(device, timeout_seconds=seconds)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fullshard.record_events(directory)

def next_batch(step):
    if environment.rank == 1 and step == 3:
        (directory / "hangs").write_text(str(time.monotonic()))
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            sys.exit(0)
        while how == "loop":
            pass
        time.sleep(600)  # a data loader that waits for its disk
    return torch.ones(4, 8, device=device)

(directory / f"pid{environment.rank}").write_text(str(os.getpid()))
for step in range(10):
    model(next_batch(step)).square().mean().backward()
    optimizer.step()
"""


def end_of(tmp_path: Path, how: str, comm: str, ranks: int = 2) -> tuple[str, float]:
    """What the launcher says, and how long after the hang."""
    (tmp_path / "hang.py").write_text(SCRIPT)
    command = [*LAUNCH, "--num_processes", str(ranks), "--cpu", "hang.py", str(tmp_path), how, "cpu", "3"]
    with started(*command, cwd=tmp_path, FULLSHARD_COMM=comm) as launcher:
        output, _ = launcher.communicate(timeout=120)
        seconds = time.monotonic() - float(read(tmp_path / "hangs"))
        pids = [int(read(tmp_path / f"pid{rank}")) for rank in range(ranks)]
    assert launcher.returncode == (137 if how == "kill" else 1), output
    assert not any(map(alive, pids))
    return output, seconds


@pytest.mark.parametrize(
    ("how", "comm"),
    [
        ("stop", "auto"),
        *(
            pytest.param(how, comm, marks=pytest.mark.full)
            for how in ("stop", "loop", "sleep")
            for comm in ("auto", "gloo")
        ),
    ],
)
def test_a_hung_rank_is_named_with_its_stack(tmp_path: Path, how: str, comm: str) -> None:
    """The launcher's own end of it is never the cause, and no rank that waited is accused."""
    output, _ = end_of(tmp_path, how, comm, ranks=3)
    assert re.search(r"rank [02] of 3 .* failed with exit code 1 because of rank 1\n", output), output
    *_, end = read_journal(tmp_path)
    assert (end["kind"], end["cause_rank"]) == ("failure", 1) and end["rank"] != 1
    assert output.count("did not get that far") == 1, output
    assert "out of memory" not in output and "SIGKILL" not in output
    assert re.search(r"CommunicationError: rank [02], the outermost unit, .*\(step 4 of this process\)", output)
    # Half the time-out before, and again with the error: without the launcher's doing.
    assert (
        len(
            re.findall(
                r"rank 1 \(process \d+ on \S+\) (is running, at hang.py|(gives no|no longer gives a) sign of life)",
                output,
            )
        )
        > 1
    )
    state = "was stopped (SIGSTOP)" if how == "stop" else "was running"
    assert "rank 1 of 3 (process " in output, output
    last = output[output.index("rank 1 of 3 (process ") :]
    assert f"{state} and did not get that far. Its stack, with the innermost call first:" in last
    assert "in next_batch" in last
    assert len(last.splitlines()) < 12


LOADS = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment

environment = init_process_group_from_environment(torch.device("cpu"), timeout_seconds=4)
model = torch.nn.Linear(8, 8)
fully_shard(model)

class Hangs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        time.sleep(600 if environment.rank == 1 and number == 3 else 0)
        return torch.ones(8)

def train():
    for batch in DataLoader(Hangs(), num_workers=1):
        model(batch).sum().backward()

train()
"""


@pytest.mark.full
def test_of_a_rank_whose_loader_hangs_the_line_of_the_script_is_named(tmp_path: Path) -> None:
    """Deep in Python's own library, below more frames than the launcher prints."""
    (tmp_path / "load.py").write_text(LOADS)
    with started(*LAUNCH, "--num_processes", "2", "--cpu", "load.py", cwd=tmp_path) as launcher:
        output, _ = launcher.communicate(timeout=120)
    called = r"at load.py:\d+ in train, called from load.py:\d+ in <module>; its last wait was in step \d"
    waits = rf"rank 1 \(process \d+ on \S+\) waits for worker 0 \(process (\d+)\) of its data loader, {called}"
    assert (found := re.search(waits, output)), output
    assert not alive(int(found[1]))
    stack = output[output.index("the innermost call first:\n") :].splitlines()[1:]
    assert len(stack) <= 8 and stack[4] == "  ..." and "/site-packages/torch/" not in stack[0], stack
    assert [line.split("/")[-1].partition('"')[0] for line in stack[5:7]] == ["load.py", "load.py"], stack


@pytest.mark.full
@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_of_a_dead_rank_the_others_say_where_they_noticed(tmp_path: Path, comm: str) -> None:
    output, seconds = end_of(tmp_path, "kill", comm)
    assert re.search(r"rank 1 of 2 \(process \d+ on .+\) was ended by SIGKILL", output)
    assert re.search(
        r"its last action: step 3 of this process, after the outermost unit, after the last reshard", output
    )
    assert re.search(
        r"the others noticed it here: .*rank 0, the outermost unit, .*\(step 4 of this process\)", output
    ), output
    assert seconds < 15  # five, on a machine with nothing else to do


@pytest.mark.full
@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_a_rank_that_has_ended_well_before_the_others_is_named(tmp_path: Path, comm: str) -> None:
    output, seconds = end_of(tmp_path, "leave", comm)
    assert re.search(r"rank 0 of 2 .* failed with exit code 1", output)
    assert re.search(r"rank 1 of 2 \(process \d+ on .+\) had already ended with exit code 0", output), output
    assert output.splitlines()[-1].startswith("its last action: step 3 of this process, after the outermost unit")
    assert seconds < 15


WAITS = """
import signal, sys, threading, time
from fullshard.launch.bootstrap import STACK_SIGNAL, leave_stacks

leave_stacks()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])  # so that another thread gets it

def waits_here():
    print("there", flush=True)
    time.sleep(60)

waits_here()
"""


def test_the_stack_is_the_main_threads_whoever_got_the_signal(tmp_path: Path) -> None:
    with started(sys.executable, "-c", WAITS, cwd=tmp_path, **{PREEMPTION_DIR: str(tmp_path)}) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        scene = Scene(tmp_path)
        scene.look({0: process}, is_over=True)
        text = scene.missing({process.pid: 0}, 1)
        process.kill()
    assert "in waits_here" in text and "threading.py" not in text


EXITS = """
import faulthandler, os
from fullshard.launch.bootstrap import STACK_SIGNAL, leave_stacks

leave_stacks()
assert faulthandler.unregister(STACK_SIGNAL)  # as an interpreter does that exits
os.kill(os.getpid(), STACK_SIGNAL)
"""


def test_a_process_that_exits_is_not_ended_by_the_question_where_it_is(tmp_path: Path) -> None:
    with started(sys.executable, "-c", EXITS, cwd=tmp_path, **{PREEMPTION_DIR: str(tmp_path)}) as process:
        assert process.wait(timeout=30) == 0


LAST = '  File "b.py", line 2 in b\n'


def test_a_stack_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """It is written in pieces, and a process that has just gone on after a stop is slow."""
    code = f"import signal, time; signal.signal({int(STACK_SIGNAL)}, signal.SIG_IGN); print('there', flush=True)"
    with started(sys.executable, "-c", f"{code}; time.sleep(60)", cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        file = tmp_path / f"stack-{process.pid}"
        file.touch()

        def write() -> None:
            for piece in ("Thread 0x01:\n", '  File "a.py"', ", line 1 in a\n\nCurrent thread", " 0x02:\n", LAST):
                time.sleep(0.05)
                with file.open("a") as out:
                    out.write(piece)

        writer = threading.Thread(target=write)
        writer.start()
        scene = Scene(tmp_path)
        scene.look({0: process}, is_over=True)
        writer.join()
        process.kill()
    assert scene.missing({process.pid: 0}, 1).endswith(f"the innermost call first:\n{LAST}")


def test_a_rank_whose_script_has_ended_well_was_not_waited_for(tmp_path: Path) -> None:
    """Its process is still there, because a machine is busy or an exit handler is slow."""
    script = tmp_path / "script.py"
    script.write_text("import atexit, time\natexit.register(time.sleep, 60)\n")
    command = (sys.executable, bootstrap.__file__, "script", str(script))
    with started(*command, cwd=tmp_path, **{PREEMPTION_DIR: str(tmp_path)}) as process:
        wait_until(lambda: (tmp_path / f"finished-{process.pid}").is_file(), 60, "the end of the script")
        scene = Scene(tmp_path)
        scene.look({0: process}, is_over=True)
        process.kill()
    assert scene.missing({process.pid: 0}, 1) == ""
    assert "had already ended with exit code 0" in scene.done_early({process.pid: 0}, 1)


LISTENS = SCRIPT.replace(
    "(directory / f", "fullshard.record_events(directory)\nfullshard.should_stop()\n(directory / f", 1
)


@pytest.mark.parametrize(
    ("script", "seconds"),
    [
        (LISTENS, 1),
        pytest.param(LISTENS, 60, marks=pytest.mark.full),
        pytest.param(SCRIPT, 60, marks=pytest.mark.full),
    ],
)
def test_a_signal_that_ends_a_job_names_the_rank_that_hangs(tmp_path: Path, script: str, seconds: int) -> None:
    """At the end of the grace period, at a second signal, and at the first if the script does not listen."""
    (tmp_path / "hang.py").write_text(script)
    command = [*LAUNCH, "--num_processes", "3", "--cpu", "--grace_period", str(seconds), "hang.py", str(tmp_path)]
    with started(*command, "sleep", "cpu", "60", cwd=tmp_path) as launcher:
        wait_until((tmp_path / "hangs").is_file, 60, "the hang")
        time.sleep(6 if script == SCRIPT else 0.5)
        launcher.terminate()
        if seconds == 60 and script == LISTENS:
            time.sleep(2)
            launcher.terminate()
        begin = time.monotonic()
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 143 and time.monotonic() - begin < seconds + 15
    assert re.search(
        r"rank 1 of 3 \(process \d+ on \S+\) was running and kept others waiting for \d+ s. Its stack", output
    )
    assert 'hang.py", line 28 in next_batch' in output and "bootstrap.py" not in output, output
    assert "rank 0 of 3" not in output and "rank 2 of 3" not in output
    *_, asked, end = read_journal(tmp_path)
    assert end["kind"] == "preemption" and end["cause_rank"] == 1 and "in next_batch" in end["message"]
    if script == LISTENS:
        assert "asked to save" in asked["message"]
    else:
        assert end["message"].startswith("SIGTERM ended the run without a save\n")


EARLY = """
import sys, time
from pathlib import Path
import torch
import fullshard

accelerator = fullshard.Accelerator(cpu=True, project_dir=sys.argv[1])

def read_alone():
    Path(sys.argv[1], "hangs").touch()
    time.sleep(600)

if accelerator.process_index == 1:
    read_alone()
accelerator.prepare(torch.nn.Linear(8, 8))
"""


@pytest.mark.full
@pytest.mark.parametrize("ends", ["timeout", "signal"])
def test_a_rank_that_hangs_before_prepare_is_named(tmp_path: Path, ends: str) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    command = [*LAUNCH, "--num_processes", "3", "--cpu", "--timeout", "8" if ends == "timeout" else "60"]
    with started(*command, "early.py", str(tmp_path), cwd=tmp_path) as launcher:
        wait_until((tmp_path / "hangs").is_file, 60, "the hang")
        if ends == "signal":
            time.sleep(20)
            launcher.terminate()
        output, _ = launcher.communicate(timeout=60)
    assert re.search(r"rank 1 of 3 \(process \d+ on \S+\) was running and .* Its stack", output), output
    assert 'early.py", line 11 in read_alone' in output and "rank 0 of 3 (process" not in output.split("Its stack")[1]
    *_, event = read_journal(tmp_path)
    assert event["cause_rank"] == 1, event
    if ends == "timeout":
        assert re.search(r"rank 1 .* at early.py:11 in read_alone.*; rank 0 has waited .*making process groups", output)
        assert "no answer from another rank for 8 s: rank 1" in event["message"]


def test_a_rank_that_waited_is_not_accused(tmp_path: Path) -> None:
    """Also if it has no stack any more, because its own wait has failed, too, and it is ending."""
    with started(sys.executable, "-c", "import time; time.sleep(60)", cwd=tmp_path) as process:

        def is_accused() -> bool:
            scene = Scene(tmp_path)
            scene.look({0: process}, is_over=True)
            return "did not get that far" in scene.missing({process.pid: 0}, 1)

        status = StatusFile(tmp_path / f"status-{process.pid}")
        status.write("step 3 of this process, waiting in unit 'a', unshard")
        assert not is_accused()
        status.write("step 3 of this process, after unit 'a', unshard")
        assert is_accused()
        (tmp_path / f"failed-{process.pid}").touch()
        assert not is_accused()
        process.kill()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["stop", "sleep", "kill"])
def test_on_a_gpu_too(tmp_path: Path, how: str) -> None:
    """Over NCCL, whose collectives no host waits for; two hosts of one rank each share the GPU.

    Ten seconds: before the first step each rank starts the device, and NCCL connects them.
    """
    (tmp_path / "hang.py").write_text(SCRIPT)
    port = str(free_port())
    with ExitStack() as stack:
        launchers = []
        for host in ("0", "1"):
            words = ["--num_processes", "2", "--num_machines", "2", "--machine_rank", host, "--main_process_port", port]
            words += ["--main_process_ip", "127.0.0.1", "hang.py", str(tmp_path), how, "cuda:0", "10"]
            apart = {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}
            launchers.append(stack.enter_context(started(*LAUNCH, *words, cwd=tmp_path, **apart)))
        output = "".join(launcher.communicate(timeout=120)[0] for launcher in launchers)
    print(output)
    assert [launcher.returncode for launcher in launchers] == [1, 137 if how == "kill" else 1]
    assert not any(alive(int(read(tmp_path / f"pid{rank}"))) for rank in (0, 1))
    if how == "kill":
        assert re.search(r"rank 1 of 2 \(process \d+ on .+\) was ended by SIGKILL", output)
    else:
        assert re.search(r"rank 0, the outermost unit, .*\(step 4 of this process\)", output)
        assert "in next_batch" in output and "SIGABRT" not in output
