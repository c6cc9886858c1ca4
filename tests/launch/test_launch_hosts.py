"""Two hosts of two ranks each, in network namespaces, train together under `fullshard launch`.

Run: pytest tests/launch/test_launch_hosts.py. Needs root and `ip` (package iproute2) for the namespaces.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.core.journal import read_journal
from tests.launching import LAUNCH, TRAIN, alive, listening, norms, read, started, wait_until
from tests.namespaces import cable_of, can_have_namespaces, ip, namespaces

pytestmark = pytest.mark.skipif(not can_have_namespaces(), reason="network namespaces need root and the program `ip`")

RECORD = "fullshard.record_events(directory / f'events{environment.rank // 2}')"
GONE_SECONDS = 20
"""Within this time after the end of one host the other has ended too."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces: 10.77.0.1 and 10.77.0.2."""
    with namespaces(2) as names:
        yield names


def _command(namespace: str, directory: Path, steps: int, pause: float, *flags: str) -> list[str]:
    command = ["ip", "netns", "exec", namespace, *LAUNCH, "--num_processes", "4", "--num_machines", "2"]
    command += ["--main_process_ip", "10.77.0.1", *flags, "train.py", str(directory), str(steps), str(pause)]
    return command


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("static", [False, True])
def test_two_hosts_train_together_and_listen_on_one_address(hosts: list[str], job: Path, *, static: bool) -> None:
    """By arrival and by machine rank; while they run, nothing listens on every interface."""
    flags = [["--machine_rank", str(rank)] if static else [] for rank in (0, 1)]
    first = started(*_command(hosts[0], job, 15, 0.2, *flags[0]), cwd=job)
    second = started(*_command(hosts[1], job, 15, 0.2, *flags[1]), cwd=job)
    with first as a, second as b:
        wait_until(lambda: all(read(job / f"step{rank}") for rank in range(4)), 90, "the first step")
        pids = {int(read(job / f"pid{rank}")) for rank in range(4)}
        for launcher, own in ((a, {0, 1}), (b, {2, 3})):
            processes = {launcher.pid, *(int(read(job / f"pid{rank}")) for rank in own)}
            addresses = listening(processes)
            assert addresses, "the ranks of Gloo listen, so this finds something"
            assert not [address for address in addresses if set(address) == {"0"}], addresses
        outputs = [process.communicate(timeout=90)[0] for process in (a, b)]
        assert (a.returncode, b.returncode) == (0, 0), outputs
    assert "trained rank 0 of 4" in outputs[0]
    assert "[rank 3] trained rank 3 of 4" in outputs[1]
    assert len(norms("\n".join(outputs))) == 1
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.full
@pytest.mark.parametrize("killed", [1, 0])
def test_a_host_that_is_gone_ends_the_other(hosts: list[str], job: Path, killed: int) -> None:
    (job / "train.py").write_text(f"import fullshard\n{TRAIN}".replace("torch.manual", f"{RECORD}\ntorch.manual"))
    first = started(*_command(hosts[0], job, 1000, 0.1), cwd=job)
    second = started(*_command(hosts[1], job, 1000, 0.1), cwd=job)
    with first as a, second as b:
        wait_until(lambda: all(read(job / f"step{rank}") for rank in range(4)), 90, "the first step")
        pids = [int(read(job / f"pid{rank}")) for rank in range(4)]
        gone, left = (a, b) if killed == 0 else (b, a)
        os.killpg(gone.pid, signal.SIGKILL)
        output, _ = left.communicate(timeout=GONE_SECONDS)
        assert left.returncode == 1, output
        wait_until(lambda: not any(alive(pid) for pid in pids), 5, "the end of every rank")
    last = output.strip().splitlines()[-1]
    assert "is gone: " in last
    assert ("10.77.0.2" if killed == 1 else "10.77.0.1") in last
    assert "because of another host" in output
    *_, event = read_journal(job / f"events{1 - killed}")
    assert event["kind"] == "failure" and ("10.77.0.2" if killed else "10.77.0.1") in event["host"], event
    assert event["message"] == last


@pytest.mark.full
def test_both_hosts_restart_when_the_lost_one_comes_back(hosts: list[str], job: Path) -> None:
    """The first waits for the second, whose launcher is started again, and then all ranks begin anew."""
    restarts = ("--max_restarts", "1")
    with started(*_command(hosts[0], job, 25, 0.1, *restarts), cwd=job) as a:
        with started(*_command(hosts[1], job, 25, 0.1, *restarts), cwd=job) as b:
            wait_until(lambda: all(read(job / f"step{rank}") for rank in range(4)), 90, "the first step")
            os.killpg(b.pid, signal.SIGKILL)
        with started(*_command(hosts[1], job, 25, 0.1, *restarts), cwd=job) as again:
            outputs = [process.communicate(timeout=120)[0] for process in (a, again)]
            assert (a.returncode, again.returncode) == (0, 0), outputs
    assert "is gone: its launcher was killed" in outputs[0]
    assert "restarting all processes (1 of 1 restarts)" in outputs[0]
    assert len(norms("\n".join(outputs))) == 1
    assert read(job / "step0") == "24 1", "the first host counts one restart"


@pytest.mark.full
def test_a_host_that_falls_silent_is_gone_on_without(hosts: list[str], job: Path) -> None:
    """Of one to two: the cable between them is cut, and the first goes on alone; the script listens to nothing."""
    flags = ["--nnodes", "1:2", "--nproc_per_node", "2", "--main_process_ip", "10.77.0.1", "train.py", str(job)]
    commands = [["ip", "netns", "exec", name, *LAUNCH, *flags, "60", "0.2"] for name in hosts]
    cable = cable_of(1)
    with started(*commands[0], cwd=job) as a, started(*commands[1], cwd=job) as b:
        wait_until(lambda: all(read(job / f"step{rank}") for rank in range(4)), 90, "the first step")
        ip("-n", hosts[1], "link", "set", cable, "down")
        try:
            outputs = [process.communicate(timeout=120)[0] for process in (a, b)]
        finally:
            ip("-n", hosts[1], "link", "set", cable, "up")
    assert (a.returncode, b.returncode) == (0, 1), outputs
    assert "continuing with the remaining hosts" in outputs[0]
    assert "has sent nothing for 30 seconds" in outputs[0]
    assert "trained rank 0 of 2" in outputs[0] and "trained rank 1 of 2" in outputs[0]
    assert "the launcher at 10.77.0.1:29500 is gone" in outputs[1]


@pytest.mark.full
def test_a_cable_that_is_out_for_seconds_ends_nothing(hosts: list[str], job: Path) -> None:
    """Twice, and shorter than a silence that is the end: every step is made, and nothing starts again."""
    with (
        started(*_command(hosts[0], job, 60, 0.2), cwd=job) as a,
        started(*_command(hosts[1], job, 60, 0.2), cwd=job) as b,
    ):
        wait_until(lambda: all(read(job / f"step{rank}") for rank in range(4)), 90, "the first step")
        for _ in range(2):
            ip("-n", hosts[1], "link", "set", cable_of(1), "down")
            time.sleep(10)
            ip("-n", hosts[1], "link", "set", cable_of(1), "up")
            time.sleep(6)
        outputs = [process.communicate(timeout=120)[0] for process in (a, b)]
    assert (a.returncode, b.returncode) == (0, 0), outputs
    assert len(norms("\n".join(outputs))) == 1
    assert read(job / "step0") == "59 0", "no restart"


@pytest.mark.full
def test_the_first_failure_is_last_on_every_host(hosts: list[str], job: Path) -> None:
    (job / "train.py").write_text(TRAIN.replace("    time.sleep(pause)", FAILING))
    first = started(*_command(hosts[0], job, 20, 0.1), cwd=job)
    second = started(*_command(hosts[1], job, 20, 0.1), cwd=job)
    with first as a, second as b:
        outputs = [process.communicate(timeout=120)[0] for process in (a, b)]
    assert (a.returncode, b.returncode) == (1, 1)
    for output in outputs:
        assert output.strip().endswith("ValueError: the cause")
        assert "rank 3 of 4" in output


FAILING = """
    if environment.rank == 3 and step == 5: raise ValueError("the cause")
    time.sleep(pause)
"""


@pytest.mark.full
def test_hosts_with_other_settings_are_told(hosts: list[str], job: Path) -> None:
    first = started(*_command(hosts[0], job, 1, 0.1), cwd=job)
    second = started(*_command(hosts[1], job, 1, 0.1, "--strategy", "SHARD_GRAD_OP"), cwd=job)
    with first as a, second as b:
        outputs = [process.communicate(timeout=60)[0] for process in (a, b)]
    assert (a.returncode, b.returncode) == (2, 2), outputs
    for output in outputs:
        assert "sharding.strategy: " in output
        assert "SHARD_GRAD_OP" in output
        assert "Traceback" not in output


@pytest.mark.full
def test_a_host_that_stays_alone_says_what_it_waits_for(hosts: list[str], job: Path) -> None:
    for name, words in (
        (hosts[0], "did not join at 10.77.0.1:29500"),
        (hosts[1], "no launcher answered at 10.77.0.1"),
    ):
        with started(*_command(name, job, 1, 0.1, "--rdzv_conf", "join_timeout=7"), cwd=job) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert words in output
        assert "waiting " in output
        assert "Traceback" not in output
