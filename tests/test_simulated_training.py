"""The engine on the simulated accelerator: whatever order its streams run in, the numbers are the CPU's bit for bit."""

from __future__ import annotations

import pytest

from tests.simulated.process import on_device
from tests.simulated.programs import PROGRAMS
from tests.simulated.training import CHOICES, Case, differences, pairwise, train

SLICES = 6
CASES = pairwise()


def _all_differences(cases: list[Case], seed: int) -> dict[str, list[str]]:
    return {str(case): wrong for case in cases if (wrong := differences(case, seed))}


def test_every_pair_of_choices_is_among_the_cases() -> None:
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in CASES} == set(choices)
    assert all(case.is_allowed for case in CASES) and 30 < len(CASES) < 60
    together = {(case.offload, case.loop) for case in CASES}
    assert {(offload, "no_sync") for offload in CHOICES["offload"]} < together


@pytest.mark.parametrize("part", range(SLICES))
def test_every_order_of_the_streams_gives_the_same(part: int) -> None:
    """Losses, norms and weights of a few steps; every two choices meet in some case."""
    assert on_device(_all_differences, CASES[part::SLICES], 1) == {}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
def test_every_order_of_the_streams_gives_the_same_in_other_cases(seed: int) -> None:
    assert on_device(_all_differences, pairwise(seed), seed, timeout=1200) == {}


@pytest.mark.full
def test_every_order_of_the_streams_gives_the_same_on_four_ranks() -> None:
    strategies = (*CHOICES["strategy"], "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    cases = pairwise(7, ranks=(4,), strategy=strategies)
    assert on_device(_all_differences, cases, 7, timeout=1200) == {}


def _wrong_programs(names: list[str]) -> dict[str, list[str]]:
    return {name: wrong for name in names if (wrong := differences(PROGRAMS[name][1], 1, PROGRAMS[name][0]))}


def test_a_script_may_change_weights_save_them_and_hook_gradients_at_once() -> None:
    """With parts of the model on the host, where copies may still be under way."""
    others = [name for name, (program, _) in PROGRAMS.items() if program is not train]
    assert len(others) == 8
    assert on_device(_wrong_programs, others) == {}
