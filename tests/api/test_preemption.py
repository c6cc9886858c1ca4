"""A signal to any process of a job: all ranks save at the same step and end, or everything ends at the second.

pytest tests/api/test_preemption.py. Real processes over Gloo.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from fullshard.core.stopping import STOPPING
from fullshard.launch.preemption import AGAIN_SECONDS, PREEMPTED, listening
from tests.distributed import end_workers, run_ranks
from tests.launching import LAUNCH, alive, read, started, wait_until
from tests.trainers import arguments, build, trainer

OWN_LOOP = """
import os, sys, time
from pathlib import Path
import torch
import fullshard
from fullshard.launch import init_process_group_from_environment

directory, save = Path(sys.argv[1]), float(sys.argv[2])
environment = init_process_group_from_environment(torch.device("cpu"))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
fullshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**6):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if fullshard.should_stop():
        (directory / f"saving{environment.rank}").write_text(str(step))
        time.sleep(save)
        (directory / f"saved{environment.rank}").write_text(str(step))
        break
    (directory / f"listens{environment.rank}").write_text(str(os.getpid()))
    time.sleep(0.02 * environment.rank)
"""


@pytest.mark.parametrize(
    ("number", "to", "grace", "second", "code"),
    [
        (signal.SIGTERM, "launcher", 30, False, PREEMPTED),
        pytest.param(signal.SIGTERM, "launcher", 30, True, 143, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "launcher", 1, False, 143, marks=pytest.mark.full),
        *(
            pytest.param(number, to, 30, False, PREEMPTED, marks=pytest.mark.full)
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
            for to in ("launcher", "rank", "everybody")
        ),
    ],
)
def test_a_signal(tmp_path: Path, number: signal.Signals, to: str, grace: int, second: bool, code: int) -> None:
    """To the launcher, to one rank or to all of them: one step, one exit code. A save that takes too long is ended."""
    (tmp_path / "own.py").write_text(OWN_LOOP)
    save = "0" if code == PREEMPTED else "600"
    flags = ["--num_processes", "2", "--cpu", "--grace_period", str(grace)]
    with started(*LAUNCH, *flags, "own.py", str(tmp_path), save, cwd=tmp_path) as launcher:
        wait_until(lambda: all(read(tmp_path / f"listens{rank}") for rank in (0, 1)), 60, "the start")
        pids = [int(read(tmp_path / f"listens{rank}")) for rank in (0, 1)]
        targets = {"launcher": [launcher.pid], "rank": pids[1:], "everybody": [pids[0], launcher.pid, pids[1]]}[to]
        for pid in targets:
            os.kill(pid, number)
        wait_until(lambda: all(read(tmp_path / f"saving{rank}") for rank in (0, 1)), 20, "the save")
        if second:
            time.sleep(AGAIN_SECONDS)  # what comes sooner is the same request
            launcher.send_signal(number)
            wait_until(lambda: not any(map(alive, pids)), 2, "the end")
        assert launcher.wait(timeout=20) == code
        assert not any(map(alive, pids))
        assert launcher.stdout is not None
        said = launcher.stdout.read()
    assert read(tmp_path / "saving0") == read(tmp_path / "saving1")
    if code == PREEMPTED:
        assert read(tmp_path / "saved0") == read(tmp_path / "saved1") == read(tmp_path / "saving0")
        assert "the 2 processes on this host stopped because of a signal; restart the job to continue" in said
    if not second and code != PREEMPTED:
        assert "the grace period of 1 s ended before a new checkpoint was saved" in said


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_20_signals_that_come_apart(tmp_path: Path) -> None:
    """To every process, up to half a second between the first and the last: each is one request, of one step."""
    (tmp_path / "own.py").write_text(OWN_LOOP)
    asked_steps = []
    for case in range(cases := int(os.environ.get("SIGNALS", 20))):
        number, skew = PASSED_ON[case % 4], 0.5 * case / 19
        directory = tmp_path / str(case)
        directory.mkdir()
        with started(*LAUNCH, "--num_processes", "3", "--cpu", "own.py", str(directory), "0", cwd=tmp_path) as launcher:
            wait_until(lambda: len(list(directory.glob("listens*"))) == 3, 200, "the start")  # noqa: B023
            targets = [launcher.pid, *(int(read(directory / f"listens{rank}")) for rank in range(3))]
            targets = targets[case % 3 :] + targets[: case % 3]
            for target in targets:
                with contextlib.suppress(ProcessLookupError):  # it has saved and ended meanwhile
                    os.kill(target, number)
                time.sleep(skew / (len(targets) - 1))
            assert launcher.wait(timeout=60) == PREEMPTED, (case, launcher.communicate()[0])
        saved = {read(directory / f"saved{rank}") for rank in range(3)}
        assert len(saved) == 1 and "" not in saved, (case, saved)
        asked_steps.append(int(saved.pop()))
    print(f"{cases} signals: one step each, {asked_steps}")


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class _Signal(TrainerCallback):
    """Rank 1 gets a signal in the middle of its second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def stopped(output: str) -> tuple[list[str], list[str], bool]:
    def run(steps: int) -> list[str]:
        made = trainer(build(), arguments(output, max_steps=steps, gradient_accumulation_steps=2))
        made.add_callback(_Signal())
        made.train()
        return sorted(path.name for path in Path(output).glob("checkpoint-*"))

    with listening():
        try:
            return run(5), run(5), STOPPING.is_agreed
        finally:
            STOPPING.is_agreed = STOPPING.is_wanted = STOPPING.is_listened_to = False


def test_a_trainer_saves_and_stops(tmp_path: Path) -> None:
    """After the same step on both ranks; and it does not go on when it is called again."""
    try:
        first, second, is_agreed = run_ranks(stopped, 2, str(tmp_path / "out"))[0]
    finally:
        end_workers()
    assert (first, is_agreed) == (["checkpoint-2"], True)
    assert second == ["checkpoint-1", "checkpoint-2"]


ENDING = """
import atexit, os, signal
from fullshard.core.stopping import STOPPING
from fullshard.launch import preemption

def late():  # runs after what is registered later
    print(signal.getsignal(signal.SIGUSR2).name, flush=True)
    os.kill(os.getpid(), signal.SIGUSR2)

atexit.register(late)
preemption.listen()
STOPPING.is_agreed = True
"""


def test_a_signal_that_comes_while_the_process_ends_is_of_the_same_request() -> None:
    """The interpreter takes handlers away as it ends, but none that says that a signal is to be ignored."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["SIG_IGN"]), done.stderr
