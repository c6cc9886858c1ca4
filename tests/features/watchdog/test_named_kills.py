"""Ranks that are killed, in six phases of a step, again and again in one job: each is named, with what it did last.

pytest test_named_kills.py. Real processes over shared memory, Gloo, and two hosts in network namespaces.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import LAUNCH, lines_of_each
from tests.namespaces import can_have_namespaces, namespaces

PHASES = ("start", "data", "forward", "backward", "step", "save")
UNIT = "(unit '.*'|the outermost unit)"
LAST = {
    "start": f"making process groups|exchanging metadata|{UNIT}.*",
    "data": f"{UNIT}, after the last reshard",
    "forward": f"{UNIT}, unshard",
    "backward": f"{UNIT}, (unshard|reduce)",
    "step": f"{UNIT}, after the last reshard",
    "save": "a checkpoint, .*",
}
"""What each did last, from other ranks' point of view."""
SECONDS = 50
"""To be named within; five on a machine with nothing else to do."""

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from fullshard import fully_shard
from fullshard.checkpoint import save_checkpoint
from fullshard.launch import init_process_group_from_environment

directory, kills, phases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
phase = phases[attempt % len(phases)] if attempt < kills else ""
environment = init_process_group_from_environment(torch.device("cpu"))
is_victim = environment.rank == attempt // len(phases) % environment.world_size
step = 0

def come_to(where):
    if is_victim and where == phase and (step == 3 or where == "start"):
        (directory / f"kill{attempt}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

class Layer(torch.nn.Linear):
    def forward(self, x):
        come_to("start")
        come_to("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: come_to("backward"))
        return super().forward(x)

model = torch.nn.Sequential(Layer(8, 8), Layer(8, 8), Layer(8, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: come_to("step"))
sync = os.fsync
def fsync(file):
    come_to("save")
    sync(file)
os.fsync = fsync
for step in range(1, 5):
    come_to("data")
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        save_checkpoint(directory / f"saved{attempt}", model=model)
print(f"trained rank {environment.rank}", flush=True)
"""


def kill_again_and_again(commands: Sequence[list[str]], cwd: Path, kills: int, **variables: str) -> list[float]:
    """Seconds from each kill to its report, on the first host."""
    output = lines_of_each(commands, cwd, 200 + 100 * kills, **variables)
    text = "".join(line for _, line in output[0])
    reports = [(moment, line) for moment, line in output[0] if "was ended by SIGKILL" in line]
    lasts = [line for _, line in output[0] if line.startswith("its last action: ")]
    assert len(reports) == len(lasts) == kills, text[-5000:]
    world_size = 2 * len(commands)
    for number, ((_, report), last) in enumerate(zip(reports, lasts, strict=True)):
        phase, victim = PHASES[number % len(PHASES)], number // len(PHASES) % world_size
        assert re.search(rf"rank {victim} of {world_size} \(process \d+ on \S+\) was ended by SIGKILL", report), number
        step = "" if phase in ("start", "save") else "step [234] of this process, "
        assert re.match(rf"its last action: .*{step}(after|waiting in) ({LAST[phase]})\n", last), (phase, last)
    kill_times = [float((cwd / f"kill{number}").read_text()) for number in range(kills)]
    return [moment - kill for (moment, _), kill in zip(reports, kill_times, strict=True)]


def command(directory: Path, kills: int, *flags: str) -> list[str]:
    arguments = [str(directory), str(kills), ",".join(PHASES)]
    return [*LAUNCH, "--cpu", "--max_restarts", str(kills), *flags, "train.py", *arguments]


@pytest.mark.full
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(("comm", "kills"), [("auto", 36), ("gloo", 36)])
def test_each_kill_is_named(comm: str, kills: int, tmp_path: Path) -> None:
    kills = int(os.environ.get("KILLS", kills))
    (tmp_path / "train.py").write_text(SCRIPT)
    one = command(tmp_path, kills, "--num_processes", "2")
    seconds = kill_again_and_again([one], tmp_path, kills, FULLSHARD_COMM=comm)
    print(f"{comm}: {kills} kills, {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s")
    assert max(seconds) < SECONDS


@pytest.mark.full
@pytest.mark.timeout(4000)
@pytest.mark.skipif(not can_have_namespaces(), reason="network namespaces need root and `ip`")
def test_each_kill_is_named_on_both_hosts(tmp_path: Path) -> None:
    kills = int(os.environ.get("KILLS", 28))
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.77.0.1")
    with namespaces(2) as hosts:
        commands = [
            ["ip", "netns", "exec", name, *command(tmp_path, kills, *flags, "--machine_rank", str(rank))]
            for rank, name in enumerate(hosts)
        ]
        seconds = kill_again_and_again(commands, tmp_path, kills)
    print(f"two hosts: {kills} kills, {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s")
    assert max(seconds) < SECONDS
