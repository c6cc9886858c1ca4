"""Collectives over shared memory against Gloo's: the same numbers, and no hang when a rank is gone.

pytest tests/test_shared_memory.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.base import own_interval
from fullshard.comm.select import collectives_for
from fullshard.comm.shared_memory import NUM_SLOTS, SLOT_NBYTES, SWITCH, SharedMemoryCollectives
from fullshard.comm.torch_dist import GlooCollectives
from tests.distributed import run_ranks

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
NUMELS = (0, 16, 48, SLOT_NBYTES // 4, SLOT_NBYTES + 64, NUM_SLOTS * SLOT_NBYTES // 4 + 16)
"""Elements per rank: nothing, less than a slot, exactly one, several with a rest, more than a ring holds."""


def connected() -> tuple[SharedMemoryCollectives, GlooCollectives]:
    shared = collectives_for(dist.group.WORLD, CPU)
    assert isinstance(shared, SharedMemoryCollectives)
    assert dist.group.WORLD is not None
    return shared, GlooCollectives(dist.group.WORLD)


def fill(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (numel,), generator=generator).to(dtype)


def check_same_as_gloo() -> None:
    shared, gloo = connected()
    size, rank = shared.size, shared.rank
    dtypes = DTYPES if size == 2 else DTYPES[:2]
    for tag, (dtype, numel) in enumerate((d, n) for d in dtypes for n in NUMELS):
        for seed in range(2):
            one, other = (torch.zeros(size * numel, dtype=dtype) for _ in range(2))
            for full in (one, other):
                own_interval(full, rank, size).copy_(fill(numel, dtype, 10 * seed + rank))
            assert torch.equal(shared.all_gather(one, tag=tag).wait(), gloo.all_gather(other, tag=tag).wait())
            one, other = (fill(size * numel, dtype, 10 * seed + rank) for _ in range(2))
            # bit for bit: both add in rank order
            assert torch.equal(shared.reduce_scatter(one, tag=tag).wait(), gloo.reduce_scatter(other, tag=tag).wait())
        total = fill(numel, torch.float32, rank)
        expected = sum(fill(numel, torch.float32, r) for r in range(size))
        torch.testing.assert_close(shared.all_reduce(total, tag=tag).wait(), expected)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (3, 4))])
def test_same_numbers_as_gloo(size: int) -> None:
    run_ranks(check_same_as_gloo, size)


def check_many_under_way() -> None:
    """Far more is under way than the rings hold, and the ranks wait in different orders."""
    shared, _ = connected()
    size, rank = shared.size, shared.rank
    numel = 3 * SLOT_NBYTES // 4
    fulls = [torch.zeros(size * numel) for _ in range(20)]
    for index, full in enumerate(fulls):
        own_interval(full, rank, size).fill_(100 * index + rank)
    gathers = [shared.all_gather(full, tag=index) for index, full in enumerate(fulls)]
    sums = [shared.reduce_scatter(torch.full((size * numel,), float(index)), tag=index) for index in range(20)]
    order = list(range(20)) if rank == 0 else list(reversed(range(20)))
    if rank == 0:
        time.sleep(0.3)
    for index in order:
        gathered = gathers[index].wait()
        for source in range(size):
            assert torch.equal(own_interval(gathered, source, size), torch.full((numel,), 100.0 * index + source))
        assert torch.equal(sums[index].wait(), torch.full((numel,), float(index * size)))


@pytest.mark.parametrize("size", [2, 3])
def test_many_collectives_under_way(size: int) -> None:
    run_ranks(check_many_under_way, size)


def check_other_collective() -> None:
    shared, _ = connected()
    full = torch.zeros(64 * shared.size)
    with pytest.raises(RuntimeError, match=r"is in collective 5, this rank in 3|is in collective 3, this rank in 5"):
        shared.all_gather(full, tag=3 if shared.rank == 0 else 5).wait()


def test_ranks_in_different_collectives_are_told() -> None:
    run_ranks(check_other_collective, 2)


def check_switch(value: str) -> str:
    os.environ[SWITCH] = value if dist.get_rank() == 0 else "auto"
    return type(collectives_for(dist.group.WORLD, CPU)).__name__


def test_one_rank_turns_it_off_for_all() -> None:
    assert run_ranks(check_switch, 2, "gloo") == ["GlooCollectives"] * 2
    assert run_ranks(check_switch, 2, "auto") == ["SharedMemoryCollectives"] * 2


def descriptors() -> int:
    """Open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def check_no_names() -> tuple[list[str], int]:
    before = descriptors()
    shared, _ = connected()
    full = torch.zeros(shared.size * SLOT_NBYTES)
    shared.all_gather(full, tag=0).wait()
    return [path.name for path in Path("/dev/shm").glob("*fullshard*")], descriptors() - before


def test_the_memory_has_no_name_and_one_descriptor_per_rank() -> None:
    for names, opened in run_ranks(check_no_names, 3):
        assert names == [] and opened <= 3


KILLED = """
import datetime, os, sys, time, torch, torch.distributed as dist
from fullshard.comm.select import collectives_for
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
shared = collectives_for(dist.group.WORLD, torch.device("cpu"))
full = torch.zeros(2 * 2**20)
shared.all_gather(full, tag=0).wait()
print("ready", os.getpid(), flush=True)
if rank == 1:
    time.sleep(60)
start = time.monotonic()
try:
    shared.all_gather(full, tag=1).wait()
except RuntimeError as error:
    print(f"told after {time.monotonic() - start:.1f} s: {error}", flush=True)
    os._exit(7)
"""


def test_a_killed_rank_is_noticed_within_seconds(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline().startswith("ready")
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait(timeout=20)
        output, _ = ranks[0].communicate(timeout=20)
        assert ranks[0].returncode == 7
        assert "rank 1 of the group" in output and "has ended" in output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
