"""Ranks compare notes: a flipped bit in one replica is found and named; a slow rank is named, and nobody else.

pytest tests/features/consistency/test_consistency.py
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.checkpoint import save_checkpoint
from fullshard.config.schema import RunConfig, ShardingConfig, TrainingConfig
from fullshard.core.errors import ConfigError, ReplicaError
from fullshard.core.journal import JOURNAL, read_journal
from fullshard.features import shard_model
from fullshard.features.consistency import ConsistencyCheck
from fullshard.features.consistency.pace import LEAST_SECONDS, RankPace, slow_ranks
from tests.distributed import run_ranks
from tests.traps import BLOCKS, Stack, batch, rank_and_size

EVERY = 3
NAME = "blocks.1.up.weight"


def make(strategy: str, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Stack().to(dtype)
    options: dict[str, Any] = {"shard_size": 2} if strategy == "HYBRID_SHARD" else {}
    model = shard_model(
        model, unit_modules=[model.get_submodule(name) for name in BLOCKS], strategy=strategy, **options
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model: Any, step: int) -> None:
    parameter = next(model.parameters())
    model(batch(step, rank_and_size()[0]).to(parameter.dtype)).square().mean().backward()


def steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def flip(model: Any, bit: int, name: str = NAME) -> None:
    """One bit of this rank's part of a weight."""
    local = model.get_parameter(name).local
    integers = local.view({4: torch.int32, 2: torch.int16}[local.itemsize])
    with torch.no_grad():
        integers[3] ^= 1 << bit


def whole(model: Any) -> list[torch.Tensor]:
    return [parameter.local.clone() for parameter in model.parameters()]


def check_found(strategy: str, flipped: int, other: int, how: str) -> None:
    """A bit flips after `EVERY` - 1 steps; the comparison after `EVERY` says where."""
    rank, size = rank_and_size()
    name = "blocks.1.down.weight" if flipped % 2 and size == 4 else NAME  # of which the other half of a group has all
    first, second = sorted((flipped, other))
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    model, optimizer = make(strategy, dtype)
    model.set_replica_check("raise", every=EVERY)
    steps(model, optimizer, 0, EVERY)
    if rank == flipped:
        flip(model, 3, name)
    before = whole(model)
    pattern = (
        rf"rank {rank}, step {EVERY + 1} of this process: replicas hold different weights: {name} of rank {first} "
        rf"\(process \d+ on \S+\) and rank {second} \(process \d+ on \S+\)\nhint: the replicas are evenly split"
    )
    if how == "save":
        with pytest.raises(ReplicaError, match=name):
            save_checkpoint("nowhere", model=model, optimizer=optimizer)
        assert not Path("nowhere").exists()
    with pytest.raises(ReplicaError, match=pattern):
        backward(model, EVERY)
    assert all(map(torch.equal, whole(model), before))


@pytest.mark.parametrize(
    ("strategy", "ranks", "flipped", "other", "how"),
    [
        ("NO_SHARD", 2, 1, 0, "raise"),
        pytest.param("HYBRID_SHARD", 4, 3, 1, "raise", marks=pytest.mark.full),
        pytest.param("NO_SHARD", 2, 0, 1, "save", marks=pytest.mark.full),
        pytest.param("NO_SHARD", 2, 0, 1, "bf16", marks=pytest.mark.full),
        pytest.param("HYBRID_SHARD", 4, 0, 2, "raise", marks=pytest.mark.full),
    ],
)
def test_a_flipped_bit_is_found_and_named(strategy: str, ranks: int, flipped: int, other: int, how: str) -> None:
    run_ranks(check_found, ranks, strategy, flipped, other, how)


def train(directory: str) -> tuple[list[str], str]:
    """Three replicas; a bit of each of five weights flips on rank 2 after the first comparison."""
    JOURNAL.path = None
    fullshard.record_events(directory)
    model, optimizer = make("NO_SHARD")
    model.set_replica_check("raise", every=EVERY)
    steps(model, optimizer, 0, EVERY)
    names = [name for name, p in model.named_parameters() if name.startswith("blocks.") and p.numel() > 3][:5]
    if rank_and_size()[0] == 2:
        for name in names:
            flip(model, 22, name)
    with pytest.raises(ReplicaError) as error:
        backward(model, EVERY)  # compared at its end
    return names, str(error.value)


def test_most_replicas_are_right(tmp_path: Path) -> None:
    pattern = r"weights: (.*) and 2 more of rank 2 \(process \d+ on \S+\), unlike 2 other replicas\nhint: resume from"
    for names, said in run_ranks(train, 3, str(tmp_path)):
        found = re.search(pattern, said)
        assert found, said
        shown = found[1].split(", ")
        assert len(shown) == 3 and set(shown) < set(names)
    (event,) = [event for event in read_journal(tmp_path) if event["kind"] == "replica"]
    assert event["ranks"] == [2] and event["parameters"] == shown and event["rank"] == 2


def train_slowly(
    directory: str, slow: int | None, seconds: float, busy: int | None = None
) -> tuple[list[str], list[RankPace]]:
    """Two comparisons, a rank being slow in forward, or busy between steps."""
    rank, _ = rank_and_size()
    JOURNAL.path = None
    fullshard.record_events(directory)
    model, optimizer = make("FULL_SHARD")
    model.set_replica_check("raise", every=EVERY)
    model.register_forward_pre_hook(lambda *_: time.sleep(seconds * (3 if rank == slow else 1)))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for step in range(2 * EVERY + 1):
            steps(model, optimizer, step, step + 1)
            time.sleep(3 * seconds * (rank == busy))
    return said.getvalue().splitlines(), model.rank_paces()


def test_a_rank_that_sleeps_is_named_and_nobody_else(tmp_path: Path) -> None:
    lines, paces = run_ranks(train_slowly, 3, str(tmp_path), 1, 0.05)[0]
    words = rf"rank 1 \(process \d+ on \S+\) is slow: 0\.\d\d of the median speed over the last {EVERY} steps; it comp"
    words += (
        r"utes \S+ s of a step \(.*\), \S+ s in the median of 3 ranks; it waits \S+ s for others and spends \S+ s on a"
    )
    assert len(lines) == 1 and re.search(words, lines[0])
    assert paces[1].computing > 0.14 > 0.09 > paces[1].waiting
    assert all(paces[rank].computing < 0.12 and paces[rank].waiting > 0.05 for rank in (0, 2))
    events = [event for event in read_journal(tmp_path) if event["kind"] == "slow"]
    assert [event["rank"] for event in events] == [1] and events[0]["computing"] > events[0]["median"]
    assert f"rank 1 (process {events[0]['pid']} on {events[0]['host']})" in lines[0]


def test_a_rank_that_sleeps_between_steps_is_slow_in_its_own_code(tmp_path: Path) -> None:
    lines, _ = run_ranks(train_slowly, 3, str(tmp_path), None, 0.02, 2)[0]
    words = rf"rank 2 \(.*\) is slow: 0\.\d\d of the median speed over the last {EVERY} steps, in its data or own code"
    words += r"; it spends 0.0[6-9]\d* s of a step .*, \S+ s in the median of 3 ranks; it waits \S+ s for others and co"
    assert len(lines) == 1 and re.search(words, lines[0])
    (event,) = [event for event in read_journal(tmp_path) if event["kind"] == "slow"]
    assert (event["rank"], event["part"]) == (2, "elsewhere") and event["elsewhere"] > 0.05 > event["median"]


def test_of_two_ranks_the_one_with_more_beside_the_steps_is_not_slow(tmp_path: Path) -> None:
    """Rank 0 saves, evaluates and logs. Who is slow in forward is compared with the other, and named once."""
    (lines, paces), _ = run_ranks(train_slowly, 2, str(tmp_path / "busy"), None, 0.05, 0)
    assert not lines and paces[0].elsewhere > 0.14 > paces[1].elsewhere
    (lines, _), _ = run_ranks(train_slowly, 2, str(tmp_path / "slow"), 1, 0.05, 0)
    [line] = lines
    assert re.search(r"rank 1 \(.*\) is slow: 0\.\d+ of rank 0's speed .*, \S+ s on rank 0; it waits", line)


@pytest.mark.full
def test_without_a_slow_rank_there_is_no_line(tmp_path: Path) -> None:
    assert not any(lines for lines, _ in run_ranks(train_slowly, 3, str(tmp_path), None, 0.05))
    assert [event["kind"] for event in read_journal(tmp_path)] == ["start"]


def test_slow_is_below_a_part_of_the_median() -> None:
    def named(*seconds: float) -> list[int]:
        return [pace.rank for pace in slow_ranks([RankPace(rank, s, 0.0) for rank, s in enumerate(seconds)])]

    assert named(1.0, 1.0, 1.4) == []
    assert named(1.0, 1.5, 1.0, 2.0) == [3, 1]
    assert named(1.0, 1.5) == [1]
    assert named(0.0, 0.9 * LEAST_SECONDS, 0.0) == []
    paces = [RankPace(0, 1.0, 0.0), RankPace(1, 1.3, 0.0)]  # not yet slow, and still
    assert not slow_ranks(paces) and [pace.rank for pace in slow_ranks(paces, {1})] == [1]


def test_slow_elsewhere_is_compared_with_the_whole_step() -> None:
    def named(*elsewhere: float) -> list[int]:
        paces = [RankPace(rank, 1.0, 0.0, seconds) for rank, seconds in enumerate(elsewhere)]
        assert set(slow_ranks(paces).values()) <= {"elsewhere"}
        return [pace.rank for pace in slow_ranks(paces)]

    assert named(0.1, 0.1, 0.5) == []  # a large part of the others' time elsewhere, but a small part of the step
    assert named(0.1, 0.1, 0.7) == [2]
    assert named(0.7, 0.1, 0.1) == []  # the first rank saves and logs
    assert named(0.1, 0.7) == [1]
    paces = [RankPace(0, 1.0, 0.0, 0.0), RankPace(1, 0.1, 0.0, 0.9)]  # rank 1 waits for rank 0 in the script
    assert list(slow_ranks(paces).values()) == ["computing"]


def test_settings_reach_the_model_or_are_refused() -> None:
    config = RunConfig(
        sharding=ShardingConfig(strategy="NO_SHARD"), training=TrainingConfig(replica_check="off", compare_every=7)
    )
    model = fullshard.Accelerator(fsdp_plugin=config).prepare(nn.Linear(4, 4))
    from fullshard.engine.lookup import units_of

    check = ConsistencyCheck.of(units_of(model)[-1].schedule)
    assert (check.every, check.policy) == (7, "off")
    with pytest.raises(ConfigError, match="use raise or off"):
        model.set_replica_check("mend")
    with pytest.raises(ConfigError, match="is -1 steps, expected 0 or more"):
        model.set_replica_check("off", every=-1)
    with pytest.raises(ValueError, match="'raise' or 'off', got 'heal'"):
        RunConfig.model_validate({"training": {"replica_check": "heal"}})
