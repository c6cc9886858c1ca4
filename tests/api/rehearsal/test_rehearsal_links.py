"""The time of a rehearsed step, beside two real ranks on a link of 1 Gbit/s. Each rank has one processor.

pytest -m full -s tests/api/rehearsal/test_rehearsal_links.py, on a machine that does nothing else
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import cable_of, can_have_namespaces, namespaces

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "scripts" / "rehearsed_links.py"
RATE = 1e9 / 8 * 1448 / 1538  # a frame of 1,538 bytes carries 1,448 bytes of a message
TURNS = 3

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not can_have_namespaces() or shutil.which("tc") is None or len(os.sched_getaffinity(0)) < 2,
        reason="slow links need root, two processors, and the programs `ip` and `tc`",
    ),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="no other test may run beside one that times steps"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces with a link of 1 Gbit/s."""
    with namespaces(2) as names:
        for host, name in enumerate(names):
            limit = ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", cable_of(host), "root", *limit], check=True)
        yield names


def _alone(processor: int, *words: str) -> list[str]:
    own = sorted(os.sched_getaffinity(0))[processor]
    return ["taskset", "-c", str(own), sys.executable, *words]


def _real(hosts: list[str], kind: str) -> float:
    """Return the seconds of a step of two ranks."""
    common = {"OMP_NUM_THREADS": "1", "FULLSHARD_COMM": "gloo", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    common |= {"LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, name in enumerate(hosts):
            environ = {**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": cable_of(rank)}
            command = ["ip", "netns", "exec", name, *_alone(rank, str(SCRIPT), kind, "10")]
            ranks.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)))
            stack.callback(ranks[-1].kill)
        said = [process.communicate(timeout=120)[0] for process in ranks]
    return float(re.findall(r"a step takes (\S+) s", said[0])[0])


def _rehearsed(kind: str, links: Path) -> float:
    """Return the seconds of a step of a rehearsed rank."""
    words = ["rehearse", "--json", "--as", f"2x{links}", "--", "--cpu", str(SCRIPT), kind, "18"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = _alone(0, "-m", "fullshard", *words)
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=True)
    return float(json.loads(done.stdout)["step_seconds"])


@pytest.mark.parametrize("kind", ["wide", "deep", "layers"])
def test_a_step_takes_the_time_of_real_ranks(hosts: list[str], tmp_path: Path, kind: str) -> None:
    """Within 15 %, in the median of a few turns."""
    device = {"name": "CPU", "memory": 10**11, "flops": 1e11, "flops_fp32": 1e11, "memory_bandwidth": 1e10,
              "link": RATE, "network": RATE, "per_host": 1, "source": "a test", "link_efficiency": 1.0,
              "framework": 0}  # fmt: skip
    (tmp_path / "links.json").write_text(json.dumps(device))
    pairs = [(_rehearsed(kind, tmp_path / "links.json"), _real(hosts, kind)) for _ in range(TURNS)]
    print(f"{kind}: " + ", ".join(f"{rehearsed:.3f} s rehearsed, {real:.3f} s real" for rehearsed, real in pairs))
    assert statistics.median(rehearsed / real for rehearsed, real in pairs) == pytest.approx(1, rel=0.15)
