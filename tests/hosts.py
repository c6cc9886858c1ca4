"""Runs a function on ranks of several hosts: each in a process namespace of its own, so that they share no memory.

Namespaces need root, or a kernel that lets everyone make them; see `are_possible`.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.02


def _unshare() -> list[str]:
    own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own_user, "--pid", "--fork", "--kill-child", "--mount-proc"]


@cache
def are_possible() -> bool:
    """Whether this process may make namespaces."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_unshare(), "true"], check=False, capture_output=True, timeout=20).returncode == 0


def run_hosts(
    function: Callable[..., Any],
    ranks_per_host: Sequence[int],
    *args: Any,
    dies: int | None = None,
    timeout: float = 120.0,
) -> list[Any]:
    """Call `function(*args)` on every rank of every host and return the results in rank order.

    Args:
        function: a function at module level.
        ranks_per_host: how many ranks each host has.
        args: passed on; must be picklable.
        dies: a rank that will not return; its result is None.
        timeout: seconds until all processes are ended and the test fails.

    Raises:
        RuntimeError: a rank raised (the message holds all tracebacks, the first one first), died, or the time is over.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "task").write_bytes(pickle.dumps((function, args, sum(ranks_per_host))))
        hosts, first = [], 0
        for host, count in enumerate(ranks_per_host):
            command = [*_unshare(), sys.executable, "-m", "tests.hosts", name, str(first), str(count)]
            first += count
            with (directory / f"log{host}").open("wb") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
                hosts.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        try:
            deadline = time.monotonic() + timeout
            while any(host.poll() is None for host in hosts):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not finished in time: {_logs(directory)}")
                time.sleep(_POLL_SECONDS)
            return _results(directory, [rank for rank in range(first) if rank != dies], first)
        finally:
            for process in hosts:
                process.kill()
                process.wait()


def _results(directory: Path, ranks: Sequence[int], world_size: int) -> list[Any]:
    values: list[Any] = [None] * world_size
    problems = []
    for rank in ranks:
        path = directory / f"result{rank}"
        if not path.exists():
            problems.append((time.time(), f"rank {rank} died"))
            continue
        succeeded, values[rank] = pickle.loads(path.read_bytes())  # noqa: S301 -- our own
        if not succeeded:
            problems.append((path.stat().st_mtime, f"rank {rank} raised:\n{values[rank]}"))
    if problems:  # the first of them may have led to the others
        raise RuntimeError("\n".join([*(text for _, text in sorted(problems)), _logs(directory)]))
    return values


def _logs(directory: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(directory.glob("log*")))


def _run_host(directory: Path, first: int, count: int) -> None:
    """Import once, which takes seconds, and fork the ranks. This is process 1 of its namespace, so no rank itself."""
    task = pickle.loads((directory / "task").read_bytes())  # noqa: S301 -- our own
    ranks = []
    for local_rank in range(count):
        ranks.append(os.fork())
        if not ranks[-1]:
            _run_rank(directory, task, first + local_rank, local_rank, count)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)


def _run_rank(directory: Path, task: Any, rank: int, local_rank: int, local_world_size: int) -> None:
    function, args, world_size = task
    own = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    os.environ.update({key: str(value) for key, value in own.items()})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    store = f"file://{directory / 'store'}"
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        result = (True, function(*args))
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    (directory / f"part{rank}").write_bytes(pickle.dumps(result))
    (directory / f"part{rank}").rename(directory / f"result{rank}")


if __name__ == "__main__":
    _run_host(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
