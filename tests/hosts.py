"""Runs a function on ranks of several hosts: each in a process namespace of its own, so that they share no memory.

Namespaces need root, or a kernel that lets everyone make them; see `are_possible`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import shutil
import signal
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
import torch.multiprocessing as mp

_CONTEXT = mp.get_context("forkserver")  # the server of `tests.distributed`, which has imported what takes seconds
_POLL_SECONDS = 0.02
_NEW_MOUNTS, _NEW_USER, _NEW_PIDS = 0x20000, 0x10000000, 0x20000000
_SAFE, _PRIVATE_BELOW = 2 | 4 | 8, 0x4000 | 0x40000  # flags of `mount`
_DIE_WITH_PARENT = 1


@cache
def are_possible() -> bool:
    """Whether this process may make namespaces."""
    if shutil.which("unshare") is None:
        return False
    own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *own_user, "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=20).returncode == 0


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
        dies: a rank that neither returns nor raises; its result is None.
        timeout: seconds until all processes are ended and the test fails.

    Raises:
        RuntimeError: a rank raised (the message holds all tracebacks, the first one first), died or did not although
            it was to, or the time is over.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `tests.distributed`
        task, hosts, first = (function, args, sum(ranks_per_host)), [], 0
        for count in ranks_per_host:
            host = _CONTEXT.Process(
                target=_be_host, args=(directory, dict(os.environ), task, first, count), daemon=True
            )
            first += count
            host.start()
            hosts.append(host)
        try:
            deadline = time.monotonic() + timeout
            while any(host.is_alive() for host in hosts):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not finished in time: {_logs(directory)}")
                time.sleep(_POLL_SECONDS)
            return _results(directory, first, dies)
        finally:
            for process in hosts:
                process.kill()
                process.join()


def _results(directory: Path, world_size: int, dies: int | None) -> list[Any]:
    values: list[Any] = [None] * world_size
    problems = []
    for rank in range(world_size):
        path = directory / f"result{rank}"
        if path.exists():
            succeeded, values[rank] = pickle.loads(path.read_bytes())  # noqa: S301 -- our own
            if not succeeded:
                problems.append((path.stat().st_mtime, f"rank {rank} raised:\n{values[rank]}"))
            elif rank == dies:
                problems.append((path.stat().st_mtime, f"rank {rank} did not die"))
        elif rank != dies:
            problems.append((time.time(), f"rank {rank} died"))
    if problems:  # the first of them may have led to the others
        raise RuntimeError("\n".join([*(text for _, text in sorted(problems)), _logs(directory)]))
    return values


def _logs(directory: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(directory.glob("log*")))


def _be_host(directory: Path, environment: dict[str, str], task: Any, first: int, count: int) -> None:
    """Make the namespaces and wait for process 1 of them, which ends with this one and takes the ranks along."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(directory / f"log{first}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_NEW_MOUNTS | _NEW_PIDS | (_NEW_USER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if process := os.fork():
        os.waitpid(process, 0)
        return
    try:
        _check(libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL))
        _check(libc.mount(b"none", b"/", None, _PRIVATE_BELOW, None))
        _check(libc.mount(b"proc", b"/proc", b"proc", _SAFE, None))
        _run_host(directory, task, first, count)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run_host(directory: Path, task: Any, first: int, count: int) -> None:
    """Fork the ranks. This is process 1 of its namespace, so no rank itself."""
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
