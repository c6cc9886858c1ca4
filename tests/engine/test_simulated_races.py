"""Memory that two streams of the simulated accelerator use in no order: none in the engine, and planted ones found."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.simulated.mutations import MUTATIONS, SOURCE, Mutation, races
from tests.simulated.process import on_device
from tests.simulated.programs import PROGRAMS
from tests.simulated.steps import train_with_torch
from tests.simulated.training import Case, pairwise

CASES = pairwise()
RACING = [mutation for mutation in MUTATIONS if mutation.is_race]


def _read_too_early(is_right: bool) -> None:
    here = torch.accelerator.current_stream()
    side = torch.Stream(here.device)
    weight = torch.ones(300, device=here.device)  # here
    if is_right:
        side.wait_stream(here)
    with side:
        weight.sum()  # and here


def _freed_too_early(is_right: bool) -> None:
    here = torch.accelerator.current_stream()
    side = torch.Stream(here.device)
    weight = torch.ones(300, device=here.device)
    side.wait_stream(here)
    with side:
        weight.sum()  # here
    if is_right:
        weight.record_stream(side)
    del weight
    torch.zeros(300, device=here.device)  # and here: it takes the memory


def _changed_too_early(is_right: bool) -> None:
    here = torch.accelerator.current_stream()
    gradient = torch.ones(2, 150, device=here.device)
    work: Any = dist.all_reduce(gradient[1], async_op=True)  # here
    gradient[0].mul_(2)  # the other half
    if is_right:
        work.wait()
    gradient[1].mul_(2)  # and here


PLANTED = {
    _read_too_early: ("writes in aten::fill_", "reads in aten::sum"),
    _freed_too_early: ("reads in aten::sum", "writes in allocation"),
    _changed_too_early: ("writes in all_reduce", "writes in aten::mul"),
}


def _planted(plant: Any, is_right: bool) -> list[list[tuple[str, str]]]:
    """Of each race both accesses: the innermost place, and the words."""
    from tests.simulated.group import run_ranks
    from tests.simulated.races import look_for_races

    with look_for_races() as found:
        run_ranks(plant, 2, is_right)
    # Not the races themselves: to read them here would make the device this process's accelerator.
    return [[(access.where[0], str(access)) for access in (race.first, race.second)] for race in found]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_race_is_found_with_both_places(plant: Any) -> None:
    assert _found(plant, is_right=True) == []
    races = _found(plant, is_right=False)
    assert races
    lines, begin = inspect.getsourcelines(plant)
    marked = [
        f"{Path(__file__).parent.name}/{Path(__file__).name}:{begin + n} {plant.__name__}"
        for n, line in enumerate(lines)
        if "here" in line.partition("#")[2]
    ]
    for race in races:
        assert [where for where, _ in race] == marked
        assert all(what in words for what, (_, words) in zip(PLANTED[plant], race, strict=True))


def _found(plant: Any, is_right: bool) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = on_device(_planted, plant, is_right)
    return found


def _races_of(cases: list[Case], programs: list[str]) -> dict[str, list[str]]:
    from tests.simulated.races import races_of

    found = {name: races_of(PROGRAMS[name][1], PROGRAMS[name][0]) for name in programs}
    found |= {str(case): races_of(case) for case in cases}
    return {name: races for name, races in found.items() if races}


def test_the_engine_has_none() -> None:
    programs = ["two ranks, bf16", "packed", "everything, two ranks", "hook", "staged"]
    assert on_device(_races_of, CASES[::16], programs) == {}


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_the_engine_has_none_in_any_case() -> None:
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    on_four = pairwise(7, ranks=(4,), strategy=strategies)
    assert on_device(_races_of, [*CASES, *pairwise(2), *on_four], list(PROGRAMS), timeout=1200) == {}


def _torchs(offloads: bool) -> list[str]:
    from tests.simulated.group import run_ranks
    from tests.simulated.races import look_for_races

    with look_for_races() as found:
        run_ranks(train_with_torch, 2, offloads, "simulated")
    return [str(race) for race in found]


@pytest.mark.full
@pytest.mark.parametrize("offloads", [False, True])
def test_torchs_own_engine_has_none(offloads: bool) -> None:
    """A control: what is found is not of the device's making."""
    assert on_device(_torchs, offloads) == []


@pytest.mark.full
@pytest.mark.parametrize("mutation", RACING, ids=lambda mutation: mutation.what)
def test_a_wait_that_is_taken_out_is_located(mutation: Mutation) -> None:
    """Both places are said, one of them in the engine."""
    assert races(SOURCE, mutation.found_by) == ""
    with mutation.applied() as source:
        found = races(source, mutation.found_by)
    assert "/".join(Path(mutation.file).parts[-2:]) in found or "engine/" in found, found
