"""Collectives between hosts against Gloo's: the same elements, sums in a stated order, and no hang when a rank is gone.

pytest test_two_level.py, with `-m full` for all of them. Hosts are process namespaces (`tests/hosts.py`).
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import mesh
from fullshard.comm.base import FullBuffer, own_interval
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.select import collectives_for
from fullshard.config.switches import COMM
from fullshard.core.errors import CommunicationError
from fullshard.features import FSDPModule, fully_shard, unsharded
from fullshard.features.shared_memory.peers import _Offer, _ranks_per_host
from fullshard.features.shared_memory.two_level import TwoLevelCollectives
from tests.differential import CLOSE, EPS
from tests.features.shared_memory.test_shared_memory import CPU, fill, gathered
from tests.hosts import are_possible, run_hosts

pytestmark = pytest.mark.skipif(not are_possible(), reason="hosts are process namespaces, which this user may not make")

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
NUMELS = (0, 16, 48, 4096, 300_016)


def connected() -> tuple[TwoLevelCollectives, GlooCollectives]:
    linked = collectives_for(dist.group.WORLD, CPU)
    assert isinstance(linked, TwoLevelCollectives)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return linked, GlooCollectives(group)


def sum_by_host(terms: list[torch.Tensor], ranks_per_host: int) -> torch.Tensor:
    """Ranks of a host in their order, then hosts in theirs."""
    hosts = []
    for first in range(0, len(terms), ranks_per_host):
        total = terms[first].clone()
        for term in terms[first + 1 : first + ranks_per_host]:
            total += term
        hosts.append(total)
    total = hosts[0].clone()
    for other in hosts[1:]:
        total += other
    return total


def check_same_as_gloo(dtypes: tuple[torch.dtype, ...]) -> None:
    linked, gloo = connected()
    size, rank, per_host = linked.size, linked.rank, int(os.environ["LOCAL_WORLD_SIZE"])
    for tag, (dtype, numel) in enumerate((d, n) for d in dtypes for n in NUMELS):
        expected = gloo.full_buffer(size * numel, dtype, CPU, holds_main=False)
        buffers = [linked.full_buffer(size * numel, dtype, CPU, holds_main=holds) for holds in (True, False)]
        for seed in range(2):
            main = fill(numel, dtype, 10 * seed + rank)
            whole = gathered(expected, main, tag)
            for buffer in buffers:
                assert torch.equal(gathered(buffer, main, tag), whole)
                linked.wait_for_readers()  # before main changes
        if dtype is torch.uint8:
            continue
        full = fill(size * numel, dtype, rank)
        terms = [own_interval(fill(size * numel, dtype, source), rank, size) for source in range(size)]
        reduced = linked.reduce_scatter(full.clone(), tag=tag, divisor=3.0).wait()
        assert torch.equal(reduced, sum_by_host(terms, per_host) / 3.0)
        if dtype is torch.bfloat16:  # summed in another dtype than they are collected in
            summed = linked.reduce_scatter(full.clone(), tag=tag, divisor=3.0, dtype=torch.float32).wait()
            assert torch.equal(summed, sum_by_host([term.float() for term in terms], per_host) / 3.0)
        # Two roundings of the sum's largest term apart from the order of one host, at most.
        flat = gloo.reduce_scatter(full.clone(), tag=tag, divisor=3.0).wait()
        bound = size * torch.finfo(dtype).eps * sum(term.abs() for term in terms)
        assert bool(((reduced - flat).abs() <= bound).all())


def check_many_under_way() -> None:
    """Ranks wait in different orders, one of them late; buckets are used again at once."""
    linked, _ = connected()
    size, rank = linked.size, linked.rank
    numel = 100_000
    buffers = [linked.full_buffer(size * numel, torch.bfloat16, CPU, holds_main=False) for _ in range(20)]
    for again in range(3):
        works = [b.gather(torch.full((numel,), 10.0 * i + rank + again), tag=i) for i, b in enumerate(buffers)]
        sums = [linked.reduce_scatter(torch.full((size * numel,), float(i)), tag=i) for i in range(20)]
        if rank == 0:
            time.sleep(0.1)
        for index in range(20) if rank == 0 else reversed(range(20)):
            full = works[index].wait()
            for source in range(size):
                assert bool((own_interval(full, source, size) == 10.0 * index + source + again).all())
            assert bool((sums[index].wait() == index * size).all())
            buffers[index].free()


def check_own_pages() -> None:
    """What a rank writes into an unsharded bucket is its own, and gone when that is freed, received or not."""
    linked, _ = connected()
    buffer = linked.full_buffer(linked.size * 5000, torch.float32, CPU, holds_main=True)
    assert buffer.main is not None
    buffer.main.fill_(linked.rank + 1.0)
    full = buffer.gather(buffer.main, tag=0).wait()
    dist.barrier()
    full.add_(10.0 * (linked.rank + 1))
    dist.barrier()
    assert full.unique().tolist() == [10.0 * (linked.rank + 1) + source + 1 for source in range(linked.size)]
    buffer.free()
    linked.wait_for_readers()
    buffer.main.add_(0.5)
    assert buffer.gather(buffer.main, tag=0).wait().unique().tolist() == [r + 1.5 for r in range(linked.size)]
    buffer.free()


def check_settled() -> None:
    """Rank 0 wants to change what rank 1 of its host still reads, and what other hosts still receive."""
    linked, _ = connected()
    buffer = linked.full_buffer(linked.size * 500_000, torch.float32, CPU, holds_main=True)
    assert buffer.main is not None
    for step in range(3):
        buffer.main.fill_(10.0 * step + linked.rank)
        full = buffer.gather(buffer.main, tag=0).wait()
        time.sleep(0.1 * (linked.rank == 1))
        assert full.unique().tolist() == [10.0 * step + source for source in range(linked.size)]
        buffer.free()
        linked.wait_for_readers()


def shared_nbytes(linked: TwoLevelCollectives) -> int:
    """Bytes that the ranks of this host share."""
    return sum(512 * os.fstat(file).st_blocks for file in linked._buffers.peers.files)


def check_memory() -> None:
    """What came from other hosts takes memory while a rank may read it, and the same from bucket to bucket."""
    linked, _ = connected()
    numel = 1_000_000
    buffers = [linked.full_buffer(linked.size * numel, torch.float32, CPU, holds_main=True) for _ in range(4)]
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])

    def gather(buffer: FullBuffer) -> None:
        assert buffer.main is not None
        buffer.main.fill_(1.0)
        assert bool((buffer.gather(buffer.main, tag=0).wait() == 1.0).all())

    def free(whole: list[FullBuffer]) -> None:
        for buffer in whole:
            buffer.free()
            stranger = own_interval(buffer.full, (linked.rank + per_host) % linked.size, linked.size)
            assert int(stranger.count_nonzero()) < 2048  # on two pages
        for _ in range(2):  # the first rank takes back what all have freed
            linked.wait_for_readers()
            linked._gathers.progress.finish()
            dist.barrier()

    def growth() -> float:
        """In received parts of a bucket."""
        dist.barrier()
        nbytes = shared_nbytes(linked) - before
        dist.barrier()  # or a rank that is ahead receives already
        return nbytes / (4 * numel * (linked.size - per_host))

    before = 0
    for buffer in buffers:
        gather(buffer)
    free(buffers)
    linked._received._pool.trim()
    dist.barrier()
    before = shared_nbytes(linked)
    dist.barrier()
    for buffer in buffers:
        gather(buffer)
        assert 0.9 < growth() < 1.1
        free([buffer])
    for buffer in buffers:
        gather(buffer)
    assert 3.9 < growth() < 4.1
    free(buffers)
    assert growth() < 2.1


def check_dropped() -> None:
    """A bucket that ends while it is whole is not waited for, nor its memory kept."""
    linked, _ = connected()
    buffer = linked.full_buffer(linked.size * 5000, torch.bfloat16, CPU, holds_main=False)
    acquired = len(linked._received._acquired)
    buffer.gather(torch.ones(5000), tag=0).wait()
    dist.barrier()
    linked._gathers.progress.finish()
    del buffer
    dist.barrier()
    linked.wait_for_readers()
    linked._gathers.progress.finish()
    assert len(linked._received._acquired) <= acquired


def check_freed() -> None:
    """Autograd refuses what it saved of parameters that are freed by now; unsharded again they are fine."""
    layer = torch.nn.Linear(3000, 20)
    fully_shard(layer)
    assert isinstance(layer, FSDPModule)
    for is_whole in (True, False, True):
        layer.unshard()
        with torch.enable_grad():
            hidden = (torch.ones(1, 3000, requires_grad=True) @ layer.weight.t()).sum()
        layer.reshard()
        if is_whole:
            layer.unshard()
            hidden.backward()
            layer.reshard()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                hidden.backward()
    with torch.inference_mode():
        layer(torch.ones(1, 3000))


def train(steps: int, killed: int | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final parameters; rank `killed` dies in the middle of the second forward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)), torch.nn.Linear(200, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if killed == dist.get_rank():
        model[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if losses else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses: list[float] = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with unsharded(model):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def check_training() -> None:
    """Against point to point in the same processes; sums differ in their order alone."""
    losses, parameters = train(5)
    mesh._CACHE.clear()
    os.environ[COMM.name] = "gloo"
    expected_losses, expected = train(5)
    torch.testing.assert_close(losses, expected_losses, **CLOSE)
    torch.testing.assert_close(parameters, expected, **CLOSE)


def check_everything(dtypes: tuple[torch.dtype, ...]) -> None:
    check_many_under_way()
    check_same_as_gloo(dtypes)
    check_own_pages()
    check_settled()
    check_memory()
    check_dropped()
    check_freed()
    check_training()


def check_numbers() -> None:
    check_same_as_gloo(DTYPES[:1])
    check_training()


def test_the_same_as_gloo() -> None:
    run_hosts(check_numbers, (2, 2))


@pytest.mark.full
@pytest.mark.parametrize("ranks_per_host", [(2, 2), (2, 2, 2), (3, 3)])
def test_the_same_as_gloo_in_every_dtype(ranks_per_host: tuple[int, ...]) -> None:
    run_hosts(check_everything, ranks_per_host, DTYPES)


def check_fallback() -> str:
    collectives = collectives_for(dist.group.WORLD, CPU)
    buffer = collectives.full_buffer(collectives.size * 1000, torch.float32, CPU, holds_main=True)
    whole = gathered(buffer, torch.full((1000,), float(collectives.rank)), 0)
    assert whole.unique().tolist() == list(range(collectives.size))
    assert collectives.reduce_scatter(whole + 1, tag=1).wait().unique().tolist() == [
        (collectives.rank + 1.0) * collectives.size
    ]
    return type(collectives).__name__


@pytest.mark.full
@pytest.mark.parametrize("ranks_per_host", [(2, 1), (1, 1)])
def test_other_hosts_use_point_to_point(ranks_per_host: tuple[int, ...]) -> None:
    results = run_hosts(check_fallback, ranks_per_host)
    assert results == ["GlooCollectives"] * sum(ranks_per_host)


@pytest.mark.parametrize(
    ("hosts", "outcome"),
    [
        ("aa", 2), ("aabb", 2), ("aaabbb", 3), ("aabbcc", 2),
        ("abab", "do not follow one another"), ("aab", r"different numbers of ranks: \[2, 1\]"), ("ab", "of its own"),
        ("aa-a", "FULLSHARD_COMM=gloo"),
    ],
)  # fmt: skip
def test_which_ranks_are_one_host(hosts: str, outcome: int | str) -> None:
    offers = [_Offer(host, pid, None if host == "-" else 3) for pid, host in enumerate(hosts)]
    if isinstance(outcome, int):
        assert _ranks_per_host(offers) == outcome
    else:
        with pytest.raises(OSError, match=outcome):
            _ranks_per_host(offers)


def check_killed(killed: int) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        train(1000, killed)
    return str(error.value), time.monotonic() - start


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 3])
def test_a_killed_rank_is_noticed_on_every_host(killed: int) -> None:
    """Long before the time-out of 60 s, and with the unit and the phase."""
    results = run_hosts(check_killed, (2, 2), killed, dies=killed)
    for message, seconds in filter(None, results):
        assert "rank" in message and "unit" in message
        assert seconds < 20


def check_other_collective() -> None:
    linked, _ = connected()
    with pytest.raises(RuntimeError) as error:
        linked.reduce_scatter(torch.zeros(64 * linked.size), tag=5 if linked.rank == 0 else 3).wait()
    if linked.rank < 2:
        assert "is in collective" in str(error.value)


@pytest.mark.full
def test_ranks_in_different_collectives_are_told() -> None:
    """Which are those of one host here; the other host learns that its counterparts have ended."""
    run_hosts(check_other_collective, (2, 2))


def check_gone(moment: str) -> tuple[str, float]:
    """Rank 0 ends while rank 1 computes; when rank 1 begins to communicate, its connection is gone already."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)
    model(torch.ones(1, 64)).sum().backward()
    loss = model(torch.ones(1, 64)).sum()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    start = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        if moment == "forward":
            model(torch.ones(1, 64))
        else:
            loss.backward()
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=pytest.mark.full)])
def test_a_message_to_a_rank_that_is_gone(moment: str) -> None:
    """Gloo refuses even to begin it; the error says unit and phase all the same."""
    message, seconds = run_hosts(check_gone, (1, 1), moment, dies=0)[1]
    assert "rank 1" in message and "unit" in message
    assert seconds < 20
