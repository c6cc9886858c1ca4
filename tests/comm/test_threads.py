"""Ranks that are threads of one process, in a process group that is written in Python, as torch's own tests have it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

from fullshard import ShardedTensor, fully_shard
from fullshard.comm.mesh import init_mesh
from fullshard.comm.select import choices_for
from fullshard.comm.torch_dist import NativeCollectives
from tests.launching import environment, free_port

SIZE = 2


@pytest.fixture
def run_threads() -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Call a function as each of the ranks."""
    multi_threaded_pg._install_threaded_pg()
    isolate: Any = torch._C._distributed_c10d
    isolate._set_thread_isolation_mode(True)
    store = dist.HashStore()
    together = threading.Barrier(SIZE)

    def rank(function: Callable[[int], Any], number: int) -> Any:
        dist.init_process_group("threaded", rank=number, world_size=SIZE, store=store)
        try:
            return function(number)
        finally:
            together.wait(60)
            dist.destroy_process_group()

    def run(function: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(lambda number: rank(function, number), range(SIZE), timeout=120))

    yield run
    isolate._set_thread_isolation_mode(False)
    multi_threaded_pg._uninstall_threaded_pg()


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.1)
    return layers


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float64).view(2, 6).cos() + rank


def train(rank: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    sharded: Any = model()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for _ in range(2):
        sharded(inputs(rank)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(parameter, ShardedTensor) for parameter in sharded.parameters())
    return [parameter.full_tensor().detach() for parameter in sharded.parameters()]


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_training_on_threads_is_one_process(run_threads: Any, shape: tuple[int, ...]) -> None:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        (sum(plain(inputs(rank)).square().sum() for rank in range(SIZE)) / SIZE).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for values in run_threads(lambda rank: train(rank, shape)):
        for value, expected in zip(values, plain.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach())


def test_a_group_written_in_python_has_its_own_collectives(run_threads: Any) -> None:
    def check(rank: int) -> None:
        mesh = init_mesh()
        assert mesh is init_mesh() and mesh.rank == rank
        [choice] = choices_for(mesh.shard_group, torch.device("cpu"))
        assert type(choice.collectives) is NativeCollectives and choice.reason == "the group is written in Python"
        assert type(mesh.replicate) is not NativeCollectives
        # The sum may be written while another rank still reads: not into what is given.
        given = torch.arange(4.0) + rank
        before = given.clone()
        total = mesh.reduce.reduce_scatter(given, tag=0).wait()
        assert torch.equal(given, before) and torch.equal(total, (torch.arange(4.0) * 2 + 1)[rank * 2 : rank * 2 + 2])

    run_threads(check)


ENDS = """
import os, sys, threading, time
import torch, torch.distributed as dist, torch._dynamo
from fullshard import fully_shard
from fullshard.core.errors import CommunicationError
from fullshard.core.threads import start_thread
from fullshard.comm.waiting import PROGRESS
from fullshard.features.watchdog import watchdog

def start(kind, rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ[kind])
    dist.init_process_group("gloo")
    if kind == "looks":  # the thread reads the job's store all the time, as it does twice a second in a wait
        watchdog._pause, watchdog._SOON = lambda stall: 0.0, 0.0
    model = fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if kind == "batches" and rank:  # one more than the other, which ends
        try:
            model(torch.ones(2, 4))
        except CommunicationError as error:
            print(error, flush=True)
    if kind == "looks":
        PROGRESS.enter("a test")
    if kind == "computes":
        stops = threading.Event()
        def compute():
            while not stops.is_set():
                torch.ones(100_000).add_(1).sum().item()
        start_thread("computes", compute, stops.set)
    if kind == "operates":  # Gloo's thread asks for the interpreter, which this one does not give up
        tensors = [torch.ones(4)]
        sys.setswitchinterval(60)
        dist.distributed_c10d._get_default_group().allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        del tensors
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    if rank:
        raise SystemExit(3)

ranks = {}
for place in [(kind, rank) for kind in sys.argv[1:] for rank in range(2)]:
    if not (pid := os.fork()):
        start(*place)
        break
    ranks[place] = pid
else:
    for kind in sys.argv[1:]:
        codes = [os.waitstatus_to_exitcode(os.waitpid(ranks[kind, rank], 0)[1]) for rank in range(2)]
        print(kind, *codes, flush=True)
"""


def test_no_thread_aborts_a_process_that_ends() -> None:
    """Also where no launcher of fullshard's is, and a script has made its own process group, which it leaves open."""
    kinds = {kind: str(free_port()) for kind in ("batches", "looks", "computes", "operates")}
    words, where = [sys.executable, "-c", ENDS, *kinds], environment(FULLSHARD_COMM="gloo", **kinds)
    done = subprocess.run(words, env=where, capture_output=True, text=True, timeout=200)
    error, hint, *ends = done.stdout.splitlines()
    assert ends == [f"{kind} 0 3" for kind in kinds], done.stderr
    # Not by Gloo's words, which name a socket.
    assert error.startswith("rank 1, the outermost unit, unshard: rank 0 ") and " has ended" in error
    assert "pair.cc" not in error
    assert error.endswith("(step 1 of this process)") and "had fewer batches" in hint
