"""What holds where torchrun starts the processes: a killed, hung or odd rank, NaN, a signal.

pytest tests/launch/test_torchrun.py. Real processes over shared memory.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import alive, read, started, wait_until

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
TORCHRUN += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import fullshard
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment

directory, how = Path(sys.argv[1]), sys.argv[2]
environment = init_process_group_from_environment(torch.device("cpu"))
(directory / f"pid{environment.rank}").write_text(str(os.getpid()))
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
odd = environment.rank == 1

def next_batch(step):
    if odd and step == 3:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while how == "loop":
            pass
    return torch.full((4, 8), float("nan") if odd and step == 3 and how == "nan" else 1.0)


for step in range(10_000 if how == "signal" else 6):
    x = next_batch(step)
    if odd and step == 3 and how == "order":
        optimizer.param_groups[0]["lr"] = 0.2
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    (directory / f"step{environment.rank}").write_text(str(step))
    if how == "signal":
        time.sleep(0.05)
        if fullshard.should_stop():
            (directory / f"stopped{environment.rank}").write_text(str(step))
            break
"""
SAID = {
    # torchrun's own words: it ends the others before they can say where they noticed.
    "kill": r"host *: \S+ +rank *: 1 \(local_rank: 1\) +exitcode *: -9 \(pid: \d+\)  \(SIGKILL\)",
    "stop": r"rank 0, (unit '.*'|the outermost unit), .*no answer from another rank for 4 s: rank 1 "
    r"\(process \d+ on \S+\) (gives no|no longer gives a) sign of life.*\(step 4 of this process\)",
    "loop": r"rank 0, (unit '.*'|the outermost unit), .*no answer from another rank for 4 s: rank 1 "
    r"\(process \d+ on \S+\) is running, at train.py:\d+ in next_batch.*\(step 4 of this process\)",
    "order": r"ranks disagree about step 4 of this process: rank 0 has \[learning rates \[0.1\]\], but rank 1 has "
    r"\[learning rates \[0.2\]\]",
    "nan": r"rank 0, step 4 of this process: gradients are not finite: .*they came from rank 1",
}


@pytest.mark.full
@pytest.mark.parametrize("how", [*SAID, "signal"])
def test_under_torchrun(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"FULLSHARD_TIMEOUT": "4"} if how in ("stop", "loop") else {}
    with started(*TORCHRUN, "train.py", str(tmp_path), how, cwd=tmp_path, **variables) as launcher:
        if how == "signal":
            # It listens from the first call of `should_stop` on.
            wait_until(lambda: all(int(read(tmp_path / f"step{rank}") or 0) > 1 for rank in (0, 1)), 120, "two steps")
            os.kill(int(read(tmp_path / "pid1")), signal.SIGTERM)
        output, _ = launcher.communicate(timeout=200)
        pids = [int(read(tmp_path / f"pid{rank}")) for rank in (0, 1)]
    if how == "signal":
        assert launcher.returncode == 0, output
        assert read(tmp_path / "stopped0") == read(tmp_path / "stopped1") != ""
        return
    assert launcher.returncode == 1, output
    assert re.search(SAID[how], output.replace("\n", " ")), output
    wait_until(lambda: not any(map(alive, pids)), 60, "the end of every process")
