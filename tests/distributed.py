"""Runs a function on several real processes over Gloo, or NCCL, and brings back what each returned.

The processes are kept for all tests of a file; each call gets a new process group. A call that fails, hangs or kills a
rank ends the processes, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import gc
import os
import queue
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fullshard.comm import device

# A server that has imported what takes seconds; every process is a fresh copy of it, which takes none.
_CONTEXT = mp.get_context("forkserver")
_PRELOADED = [
    *("fullshard.checkpoint", "fullshard.features", "fullshard.api", "pytest", "torch.distributed.fsdp"),
    "torch._dynamo",  # every optimizer imports it as it is made
    "tests.distributed",
]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Have the server import these too, if it has not begun yet: called by modules of tests as they are collected.

    Not where there is a GPU: some of them (bitsandbytes, which Transformers and PEFT bring along) begin to use it as
    they are imported, and no copy of the server could use it then.
    """
    if torch.cuda.is_available():
        return
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


def _serve(tasks: Any, results: Any) -> None:
    """Body of a worker process: one task after the other."""
    torch.set_num_threads(1)
    frozen = 0
    while True:
        if len(sys.modules) > frozen:  # what has been imported will never go, and takes a tenth of a second to look at
            frozen = len(sys.modules)
            gc.freeze()
        rank, world_size, kind, store, environment, function, args = tasks.get()
        os.environ.clear()
        os.environ.update(environment)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({key: str(value) for key, value in own.items()})
        if launched := sys.modules.get("fullshard.launch.environment"):
            launched._LAUNCHED.clear()  # a process of another job would know nothing of this one
        if coverage := sys.modules.get("coverage"):  # of which test this is, it learns by itself only once
            coverage.Coverage.current().switch_context(environment.get("PYTEST_CURRENT_TEST", ""))
        torch.manual_seed(0)
        random.seed(0)
        try:
            if kind != "cpu":
                _take_device(kind, rank, world_size)
            dist.init_process_group(
                device.backends_of(kind),
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            dist.barrier()  # or a rank that is soon done closes its end while the others still connect
            outcome = (rank, True, function(*args))
        except BaseException:
            outcome = (rank, False, traceback.format_exc())
        if dist.is_initialized():  # before the caller removes the store's file, or torch ends the process
            dist.destroy_process_group()
        if lease := sys.modules.get("fullshard.checkpoint.lease"):
            lease.let_go()  # as if the process had ended
        if coverage := sys.modules.get("coverage"):  # in its own process only; this one will be killed
            coverage.Coverage.current().save()
        results.put(_pickled(outcome))
        del outcome, function, args
        gc.collect()  # models are cycles, and hold their groups, of which each keeps threads awake


def _take_device(kind: str, rank: int, world_size: int) -> None:
    """Make this rank's device the current one; ranks may share one."""
    count = device.count(kind)
    if not count:
        raise RuntimeError(f"no {kind} device: this test is for machines that have one")
    if world_size > count:  # NCCL lets them if it takes them for ranks of several hosts, over loopback
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    device.select(kind, rank % count)


def place_of(kind: str) -> torch.device:
    """Where this rank computes on a device of this kind; ranks may share one."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, dist.get_rank() % device.count(kind))


def _pickled(outcome: tuple[int, bool, Any]) -> bytes:
    """Here and not by the queue, whose thread drops what it cannot pickle, so that the caller would wait for it."""
    rank, succeeded, _ = outcome
    try:
        return bytes(ForkingPickler.dumps(outcome))
    except Exception:
        what = "returned what cannot be pickled" if succeeded else "raised"
        return bytes(ForkingPickler.dumps((rank, False, f"it {what}:\n{traceback.format_exc()}")))


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []
        self.results = _CONTEXT.Queue()

    def grow(self, size: int) -> None:
        # Read when torch is imported: one thread per rank, or the ranks starve each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self.workers) < size:
            tasks = _CONTEXT.Queue()
            worker = _CONTEXT.Process(target=_serve, args=(tasks, self.results), daemon=True)
            worker.start()
            self.workers.append((worker, tasks))

    def end(self) -> None:
        for worker, _ in self.workers:
            worker.kill()
            worker.join()
        self.workers = []
        self.results = _CONTEXT.Queue()


_POOL = _Pool()
atexit.register(_POOL.end)


def end_workers() -> None:
    """End the processes, if there are any; the next call starts new ones."""
    _POOL.end()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0, kind: str = "cpu"
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks and return the results in rank order.

    Args:
        function: a function at module level.
        world_size: number of processes, joined in a process group of Gloo and the device's own backend.
        args: passed on; must be picklable.
        timeout: seconds until all processes are ended and the test fails.
        kind: of device, of which each rank has one made current, beside the CPU.

    Raises:
        RuntimeError: a rank raised (the message holds the first traceback), died, or the time is over.
    """
    _POOL.grow(world_size)
    try:
        # A rank that is waited for by a thread of its own may write to the store until it has noticed the end.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            for rank, (_, tasks) in enumerate(_POOL.workers[:world_size]):
                tasks.put((rank, world_size, kind, str(Path(directory) / "store"), dict(os.environ), function, args))
            return _collect(world_size, time.monotonic() + timeout)
    except BaseException:
        _POOL.end()
        raise


def _collect(world_size: int, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < world_size:
        try:
            rank, succeeded, value = ForkingPickler.loads(_POOL.results.get(timeout=0.5))
        except queue.Empty:
            codes = {r: worker.exitcode for r, (worker, _) in enumerate(_POOL.workers[:world_size])}
            dead = [r for r, code in codes.items() if code is not None]
            if dead:
                raise RuntimeError(f"rank {dead[0]} died with exit code {codes[dead[0]]}") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {sorted(set(codes) - set(values))} did not finish in time") from None
            continue
        if not succeeded:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        values[rank] = value
    return [values[rank] for rank in range(world_size)]
