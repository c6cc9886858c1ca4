"""Collectives over shared memory against Gloo's: the same numbers, and no hang when a rank is gone.

pytest tests/features/shared_memory/test_shared_memory.py
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.base import FullBuffer, Work, own_interval
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.select import choices_for, collectives_for
from fullshard.config.switches import COMM
from fullshard.features import MixedPrecisionPolicy, ShardedParameter, fully_shard, unsharded
from fullshard.features.shared_memory.collectives import SharedMemoryCollectives
from fullshard.features.shared_memory.peers import _check, _Offer
from fullshard.features.shared_memory.send_queue import _QUEUE_DEPTH, BufferPool
from tests.distributed import run_ranks

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
NUMELS = (0, 16, 48, 4096, 100_000, 1_000_016)
"""Elements per rank: nothing, less than a page, exactly some, more than is summed in one go."""


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


def gathered(buffer: FullBuffer, main: torch.Tensor, tag: int) -> torch.Tensor:
    """What `full` holds once it is whole; freed again."""
    if buffer.main is not None:
        buffer.main.copy_(main)
    whole = buffer.gather(main, tag=tag).wait().clone()
    buffer.free()
    assert buffer.nbytes == 0
    return whole


def check_same_as_gloo() -> None:
    shared, gloo = connected()
    size, rank = shared.size, shared.rank
    dtypes = DTYPES if size == 2 else DTYPES[:2]
    for tag, (dtype, numel) in enumerate((d, n) for d in dtypes for n in NUMELS):
        expected = gloo.full_buffer(size * numel, dtype, CPU, holds_main=False)
        buffers = [shared.full_buffer(size * numel, dtype, CPU, holds_main=holds) for holds in (True, False)]
        for seed in range(2):
            main = fill(numel, dtype, 10 * seed + rank)
            whole = gathered(expected, main, tag)
            for buffer in buffers:
                assert torch.equal(gathered(buffer, main, tag), whole)
                shared.wait_for_readers()  # before main changes
            one, other = (fill(size * numel, dtype, 10 * seed + rank) for _ in range(2))
            divisor = 3.0 if dtype.is_floating_point else 1.0
            # bit for bit: both add in rank order
            assert torch.equal(
                shared.reduce_scatter(one, tag=tag, divisor=divisor).wait().float(),
                gloo.reduce_scatter(other, tag=tag, divisor=divisor).wait().float(),
            )
            if dtype is torch.bfloat16:  # summed in another dtype than they are collected in
                one = fill(size * numel, dtype, 20 + rank)
                summed = shared.reduce_scatter(one, tag=tag, divisor=3.0, dtype=torch.float32).wait()
                assert summed.dtype == torch.float32
                assert torch.equal(summed, gloo.reduce_scatter(one.float(), tag=tag, divisor=3.0).wait())
                copied = gloo.reduce_scatter(one.clone(), tag=tag, divisor=3.0, dtype=torch.float32).wait()
                assert torch.equal(summed, copied)
                # And where one rank has cast already, because it has added to what it collected.
                mine = one if rank else one.float()
                summed = shared.reduce_scatter(mine, tag=tag, divisor=3.0, dtype=torch.float32).wait()
                assert torch.equal(summed, gloo.reduce_scatter(one.float(), tag=tag, divisor=3.0).wait())
        total = fill(numel, torch.float32, rank)
        expected_total = sum(fill(numel, torch.float32, r) for r in range(size))
        torch.testing.assert_close(shared.all_reduce(total, tag=tag).wait(), expected_total)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (3, 4))])
def test_same_numbers_as_gloo(size: int) -> None:
    run_ranks(check_same_as_gloo, size)


def check_unchanged() -> None:
    """Nothing is cast for a gather of what is there, and all is for any other; in training that is every second."""
    shared, _ = connected()
    buffer = shared.full_buffer(32 * shared.size, torch.bfloat16, CPU, holds_main=False)
    for value, is_unchanged, expected in [(1.0, True, 1.0), (2.0, True, 1.0), (3.0, False, 3.0)]:
        assert bool(
            (buffer.gather(torch.full((32,), value), tag=0, is_unchanged=is_unchanged).wait() == expected).all()
        )
        buffer.free()
        shared.wait_for_readers()

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
    first = model[0].weight
    assert isinstance(first, ShardedParameter)
    seen: list[bool] = []
    mapped: Any = first.bucket.buffer
    gather = mapped.gather

    def watched(*arguments: Any, is_unchanged: bool = False, **options: Any) -> Work:
        seen.append(is_unchanged)
        return gather(*arguments, is_unchanged=is_unchanged, **options)  # type: ignore[no-any-return]

    mapped.gather = watched
    inputs = torch.ones(2, 8)
    for change in ("step", "uncounted", "counted"):
        loss = model(inputs).float().square().mean()
        before = loss.item()
        if change == "uncounted":
            first.local.numpy()[:] += 1
            assert model(inputs).float().square().mean().item() != before
        elif change == "counted":
            with torch.no_grad():
                first.add_(1)
        loss.backward()
        if change == "step":
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert seen == [False, True, False, False, True, False, False]


def test_unchanged_weights_are_not_cast_again() -> None:
    run_ranks(check_unchanged, 2)


def check_many_under_way() -> None:
    """Ranks wait in different orders, one of them late."""
    shared, _ = connected()
    size, rank = shared.size, shared.rank
    numel = 100_000
    buffers = [shared.full_buffer(size * numel, torch.bfloat16, CPU, holds_main=False) for _ in range(20)]
    for again in range(3):
        works = [b.gather(torch.full((numel,), 10.0 * i + rank + again), tag=i) for i, b in enumerate(buffers)]
        sums = [shared.reduce_scatter(torch.full((size * numel,), float(i)), tag=i) for i in range(20)]
        if rank == 0:
            time.sleep(0.1)
        for index in range(20) if rank == 0 else reversed(range(20)):
            full = works[index].wait()
            for source in range(size):
                assert bool((own_interval(full, source, size) == 10.0 * index + source + again).all())
            assert bool((sums[index].wait() == index * size).all())
            buffers[index].free()


@pytest.mark.parametrize("size", [2, 3])
def test_many_collectives_under_way(size: int) -> None:
    run_ranks(check_many_under_way, size)


def read_late(work: Work) -> None:
    time.sleep(0.3)
    work.wait()


def check_full_queue() -> None:
    """Send one gradient more than a queue has room for, while another thread reads the first one late."""
    shared, _ = connected()
    send = lambda i: shared.reduce_scatter(torch.full((shared.size,), float(i)), tag=i)  # noqa: E731
    works = [send(number) for number in range(_QUEUE_DEPTH)]
    with ThreadPoolExecutor() as threads:
        late = threads.submit(read_late, works[0])
        works.append(send(_QUEUE_DEPTH))
        late.result()
    assert [work.wait().item() for work in works] == [number * shared.size for number in range(_QUEUE_DEPTH + 1)]


def test_a_full_queue_waits_until_its_first_gradient_was_read() -> None:
    run_ranks(check_full_queue, 2)


def check_own_pages() -> None:
    """What a rank writes into an unsharded bucket is its own, and gone when that is freed; a peer never sees it."""
    shared, _ = connected()
    buffer = shared.full_buffer(2 * 5000, torch.float32, CPU, holds_main=True)
    assert buffer.main is not None
    buffer.main.fill_(shared.rank + 1.0)
    full = buffer.gather(buffer.main, tag=0).wait()
    dist.barrier()
    full.add_(10.0)
    dist.barrier()
    assert full.unique().tolist() == [11.0, 12.0]
    assert buffer.main.unique().tolist() == [shared.rank + 1.0]
    buffer.free()
    shared.wait_for_readers()
    buffer.main.add_(0.5)
    assert buffer.gather(buffer.main, tag=0).wait().unique().tolist() == [1.5, 2.5]
    buffer.free()


def test_changes_to_unsharded_parameters_stay_on_their_rank() -> None:
    run_ranks(check_own_pages, 2)


def check_unmapped() -> tuple[int, int]:
    """Bytes of shared memory mapped besides this rank's main weights: while a bucket is whole, and freed."""
    shared, _ = connected()
    buffer = shared.full_buffer(2 * 5_000_000, torch.float32, CPU, holds_main=True)
    assert buffer.main is not None
    buffer.main.fill_(1.0)
    before = shared_nbytes()
    assert buffer.gather(buffer.main, tag=0).wait().sum() == 10_000_000
    whole = shared_nbytes()
    buffer.free()
    return whole - before, shared_nbytes() - before


def shared_nbytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_what_is_freed_is_not_resident() -> None:
    for whole, freed in run_ranks(check_unmapped, 2):
        assert whole > 39_000_000 and freed < 1_000_000


def check_settled(holds_main: bool) -> float:
    """Rank 0 wants to change what rank 1 still reads."""
    shared, _ = connected()
    buffer = shared.full_buffer(2 * 5000, torch.float32, CPU, holds_main=holds_main)
    main = torch.zeros(5000) if buffer.main is None else buffer.main
    main.fill_(1.0)
    full = buffer.gather(main, tag=0).wait()
    if shared.rank == 1:
        time.sleep(0.5)
        assert full.unique().tolist() == [1.0]
    buffer.free()
    start = time.monotonic()
    if holds_main:
        shared.wait_for_readers()
    main.fill_(2.0)
    # Without `holds_main`, the next gather itself waits before it writes.
    assert buffer.gather(main, tag=0).wait().unique().tolist() == [2.0]
    buffer.free()
    return time.monotonic() - start


@pytest.mark.parametrize("holds_main", [True, False])
def test_main_weights_change_when_nobody_reads_them(holds_main: bool) -> None:
    waited = run_ranks(check_settled, 2, holds_main)
    assert waited[0] > 0.4


def check_late_reader() -> bool:
    """Step while the other rank still reads the weights where they are; return whether they changed meanwhile."""
    model: Any = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(model.weight)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 8)).sum().backward()
    model.unshard()
    time.sleep(0.4 * dist.get_rank())
    has_changed = not bool((model.weight == 1).all())
    optimizer.step()
    return has_changed


def test_an_optimizer_waits_for_a_rank_that_still_reads_the_weights() -> None:
    assert run_ranks(check_late_reader, 2) == [False, False]


def check_dropped() -> None:
    """Both drop a model that waits for its backward; rank 1's is not collected before it has an answer of rank 0."""
    gc.collect()
    gc.disable()
    for whole in (True, False):
        model = torch.nn.Linear(8, 8)
        fully_shard(model)
        with torch.set_grad_enabled(whole):
            model(torch.ones(1, 8))
        if whole and dist.get_rank() == 0:
            del model
            gc.collect()
    dist.barrier()
    gc.enable()


def test_nobody_waits_for_a_peers_garbage_collector() -> None:
    run_ranks(check_dropped, 2, timeout=20)


@pytest.mark.parametrize(
    ("hosts", "problem"), [("aaa", ""), ("aab", "they are on 2 hosts"), ("aa-a", "FULLSHARD_COMM=gloo")]
)
def test_only_the_ranks_of_one_host_share_memory(hosts: str, problem: str) -> None:
    offers = [_Offer(host, pid, None if host == "-" else 3) for pid, host in enumerate(hosts)]
    with pytest.raises(OSError, match=problem) if problem else nullcontext():
        _check(offers)


def test_memory_is_handed_out_again() -> None:
    memory = mmap.mmap(-1, 2**20)
    pool = BufferPool(memory, 4096)
    one, two = pool.empty(1000, torch.float32), pool.empty(5000, torch.bfloat16)
    assert (pool.offset(one), pool.offset(two), pool.offset(torch.empty(1))) == (4096, 8192, None)
    view = one[10:]
    del one
    assert pool.offset(pool.empty(10, torch.float32)) not in (4096, 8192)  # the view keeps it
    del view, two
    assert pool.offset(pool.empty(5000, torch.float32)) == 4096  # both, put together
    with pytest.raises(MemoryError, match="share"):
        pool.empty(2**20, torch.float32)


def check_given_back() -> tuple[int, int]:
    """Resident shared memory of this rank with a model, and after it is gone."""
    model = torch.nn.Linear(2000, 2000)
    fully_shard(model)
    model(torch.ones(1, 2000)).sum().backward()
    with unsharded(model):
        pass
    held = allocated()
    dist.barrier()
    del model
    gc.collect()
    dist.barrier()
    return held, allocated()


def allocated() -> int:
    """Bytes in files without a name that this process has open."""
    files = {path.stat().st_ino: path.stat() for path in Path("/proc/self/fd").iterdir() if is_ours(path)}
    return sum(512 * file.st_blocks for file in files.values())


def is_ours(path: Path) -> bool:
    try:
        return "memfd:fullshard" in str(path.readlink())
    except OSError:
        return False


def test_memory_of_a_model_is_given_back() -> None:
    for held, left in run_ranks(check_given_back, 2):
        assert held > 16_000_000 and left < held - 15_000_000


def check_other_collective() -> None:
    shared, _ = connected()
    full = torch.zeros(64 * shared.size)
    with pytest.raises(
        RuntimeError, match=r"is in collective 5, but this rank is in 3|is in collective 3, but this rank is in 5"
    ):
        shared.reduce_scatter(full, tag=3 if shared.rank == 0 else 5).wait()


def test_ranks_in_different_collectives_are_told() -> None:
    run_ranks(check_other_collective, 2)


def check_switch(value: str) -> str:
    os.environ[COMM.name] = value if dist.get_rank() == 0 else "auto"
    return type(collectives_for(dist.group.WORLD, CPU)).__name__


def test_one_rank_turns_it_off_for_all() -> None:
    assert run_ranks(check_switch, 2, "gloo") == ["GlooCollectives"] * 2
    assert run_ranks(check_switch, 2, "auto") == ["SharedMemoryCollectives"] * 2


def check_no_room() -> str:
    """Rank 0 may have few more addresses than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    try:
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, before[1]))
        return type(collectives_for(dist.group.WORLD, CPU)).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_one_rank_without_room_turns_it_off_for_all() -> None:
    assert run_ranks(check_no_room, 2) == ["GlooCollectives"] * 2


def check_no_file(what: str) -> str:
    before, create = resource.getrlimit(resource.RLIMIT_FSIZE), os.memfd_create

    def none(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    if what == "ulimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, before[1]))
    elif dist.get_rank() == 1:
        os.memfd_create = none  # type: ignore[assignment]
    try:
        return choices_for(dist.group.WORLD, CPU)[0].reason
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.memfd_create = create


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("ulimit", "a rank has a limit on the size of files (ulimit -f): "),
        ("sandbox", "a rank could not create a file in memory: "),
    ],
)
def test_one_rank_without_a_file_turns_it_off_for_all(what: str, reason: str) -> None:
    for found in run_ranks(check_no_file, 2, what):
        assert found.startswith(f"the ranks do not share memory: {reason}")


def descriptors() -> int:
    """Open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def check_no_names() -> tuple[list[str], int]:
    shared, _ = connected()
    named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/fullshard" in line]
    before = descriptors()
    for _ in range(50):
        gathered(shared.full_buffer(shared.size * 1000, torch.float32, CPU, holds_main=False), torch.zeros(1000), 0)
        shared.reduce_scatter(torch.zeros(shared.size * 1000), tag=0).wait()
    return named, descriptors() - before


def test_the_memory_has_no_name_and_few_descriptors() -> None:
    for named, opened in run_ranks(check_no_names, 3):
        assert named == [] and opened <= 5  # two for buckets, one per rank for gradients


KILLED = """
import datetime, os, sys, time, torch, torch.distributed as dist, fullshard.features
from fullshard.comm.select import collectives_for
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
shared = collectives_for(dist.group.WORLD, torch.device("cpu"))
buffer = shared.full_buffer(2**20, torch.float32, torch.device("cpu"), holds_main=True)
def collective(what):
    if what == "gather":
        buffer.gather(buffer.main, tag=0).wait()
        buffer.free()
    elif what == "reduce":
        shared.reduce_scatter(torch.zeros(2**20), tag=1).wait()
    else:
        shared.wait_for_readers()
collective("gather")
collective("reduce")
if sys.argv[3] == "settle" and rank == 1:
    buffer.gather(buffer.main, tag=0)
if sys.argv[3] == "settle" and rank == 0:
    collective("gather")
print("ready", os.getpid(), flush=True)
if rank == 1:
    time.sleep(60)
start = time.monotonic()
try:
    collective(sys.argv[3])
except RuntimeError as error:
    print(f"told after {time.monotonic() - start:.1f} s: {error}", flush=True)
    os._exit(7)
"""


@pytest.mark.parametrize(
    "what", [pytest.param("gather", marks=pytest.mark.full), "reduce", pytest.param("settle", marks=pytest.mark.full)]
)
def test_a_killed_rank_is_noticed_within_seconds(tmp_path: Path, what: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(tmp_path / "store"), what],
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
