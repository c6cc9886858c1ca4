"""Ranks that do not go on, in nine ways, one after another in one job: each is named, with its stack and in time.

pytest test_named_hangs.py. Real processes over shared memory, Gloo, and two hosts in network namespaces.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.launching import LAUNCH, lines_of_each
from tests.namespaces import can_have_namespaces, namespaces

HANGS = list(product(("stop", "loop", "sleep"), ("data", "forward", "backward")))
"""How, and where: a data loader that waits for its disk sleeps in `data`, a hook in `backward`."""
TIMEOUT = 4
SECONDS = 30
"""To be named within, after the time-out; two on a machine with nothing else to do."""

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment

directory, hangs = Path(sys.argv[1]), [hang.split("-") for hang in sys.argv[2].split(",")]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
how, at = hangs[attempt] if attempt < len(hangs) else ("", "")
environment = init_process_group_from_environment(torch.device("cpu"))
is_victim = environment.rank == (attempt + 1) % environment.world_size
step = 0

def come_to(where):
    if is_victim and where == at and step == 3:
        (directory / f"hang{attempt}").write_text(str(time.monotonic()))
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while how == "loop":
            pass
        time.sleep(600)

class Layer(torch.nn.Linear):
    def forward(self, x):
        come_to("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: come_to("backward"))
        return super().forward(x)

model = torch.nn.Sequential(Layer(8, 8), Layer(8, 8), Layer(8, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 5):
    come_to("data")
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def hang_again_and_again(commands: Sequence[list[str]], cwd: Path, world_size: int, **variables: str) -> list[float]:
    """Seconds from the end of each time-out to the report."""
    output = lines_of_each(commands, cwd, 300 + 60 * len(HANGS), **variables)
    hosts = ["".join(line for _, line in lines) for lines in output]
    assert not any(word in text for text in hosts for word in ("SIGKILL", "out of memory")), "the launcher's own doing"
    screens = [re.split(r"restarting all processes \(\d+ of \d+ restarts\)\n", text) for text in hosts]
    assert {len(parts) for parts in screens} == {len(HANGS) + 1}, hosts[0][-5000:]
    errors = [
        moment for moment, line in output[0] if re.match(r".*fullshard\.core\.errors\.CommunicationError: rank", line)
    ]
    assert len(errors) == len(HANGS)
    for number, (how, where) in enumerate(HANGS):
        victim = (number + 1) % world_size
        case = f"{how} in {where}, rank {victim}"
        own = screens[victim * len(commands) // world_size][number]  # what the host of the missing rank says
        for text in (own, screens[0][number]):
            at = r"(unit '.*'|the outermost unit), .*\(step [34] of this process\)"
            waiting = re.search(rf"CommunicationError: rank (\d+), {at}", text)
            assert waiting is not None and int(waiting[1]) != victim, (case, text)
            seen = (
                "(gives no|no longer gives a) sign of life"
                if how == "stop"
                else r"is running, at train.py:\d+ in come_to"
            )
            assert re.search(rf"rank {victim} \(process \d+ on \S+\) {seen}", text), (case, text)
        state = r"was stopped \(SIGSTOP\)" if how == "stop" else "was running"
        place = rf"rank {victim} of {world_size} \(process \d+ on \S+\) {state} and did not get that far"
        assert len(re.findall(place, own)) == 1, (case, own)
        stack = own[re.search(place, own).end() :]  # type: ignore[union-attr]
        assert 'train.py", line' in stack and "in come_to" in stack, (case, own)
    begun = [float((cwd / f"hang{number}").read_text()) for number in range(len(HANGS))]
    return [moment - begin - TIMEOUT for moment, begin in zip(errors, begun, strict=True)]


def command(directory: Path, *flags: str) -> list[str]:
    given = ["--cpu", "--timeout", str(TIMEOUT), "--max_restarts", str(len(HANGS)), *flags]
    return [*LAUNCH, *given, "train.py", str(directory), ",".join(map("-".join, HANGS))]


def check(name: str, seconds: list[float]) -> None:
    print(f"{name}: {len(seconds)} hangs, {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s")
    assert max(seconds) < SECONDS


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_each_hang_is_named(comm: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    one = command(tmp_path, "--num_processes", "2")
    check(comm, hang_again_and_again([one], tmp_path, 2, FULLSHARD_COMM=comm))


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not can_have_namespaces(), reason="network namespaces need root and `ip`")
def test_each_hang_is_named_on_both_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.77.0.1")
    with namespaces(2) as hosts:
        commands = [
            ["ip", "netns", "exec", name, *command(tmp_path, *flags, "--machine_rank", str(rank))]
            for rank, name in enumerate(hosts)
        ]
        check("two hosts", hang_again_and_again(commands, tmp_path, 4))
