"""The engine on the simulated accelerator: whatever order its streams run in, the numbers are the CPU's bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.simulated.features import go_on_from, save_to, shard_what_loses_its_class
from tests.simulated.process import on_device
from tests.simulated.programs import AXES, PROGRAMS
from tests.simulated.training import CHOICES, OTHERS, Case, differences, pairwise, train

SLICES = 6
CASES = pairwise()
MORE = pairwise(3, **OTHERS)
STRATEGIES = (*CHOICES["strategy"], "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _all_differences(cases: list[Case], seed: int, step: int = 1) -> dict[str, list[str]]:
    """In every `step`-th order, which the next case begins one later."""
    found = {str(case): differences(case, seed, orders=slice(i % step, None, step)) for i, case in enumerate(cases)}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_every_pair_of_choices_is_among_the_cases() -> None:
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in CASES} == set(choices)
    assert all(case.is_allowed for case in CASES) and 30 < len(CASES) < 60
    together = {(case.offload, case.loop) for case in CASES}
    assert {(offload, "no_sync") for offload in CHOICES["offload"]} < together
    for name, choices in OTHERS.items():
        assert {getattr(case, name) for case in MORE} == set(choices)
    assert {(case.optimizer, case.ranks) for case in MORE} == {(o, r) for o in OTHERS["optimizer"] for r in (1, 2)}


ALL = pytest.param(1, marks=pytest.mark.full)
IN_ORDERS = pytest.mark.parametrize("step", [4, ALL], ids=["quarter", "all"])
IN_FEW_ORDERS = pytest.mark.parametrize("step", [8, ALL], ids=["eighth", "all"])


@IN_ORDERS
@pytest.mark.parametrize("part", range(SLICES))
def test_every_order_of_the_streams_gives_the_same(part: int, step: int) -> None:
    """Losses, norms and weights of a few steps; every two choices meet in some case."""
    assert on_device(_all_differences, CASES[part::SLICES], 1, step) == {}


@IN_FEW_ORDERS
@pytest.mark.parametrize("part", range(2))
def test_parameters_of_other_kinds_and_optimizers_of_whole_matrices_do(part: int, step: int) -> None:
    """Every two choices of `OTHERS` meet."""
    assert on_device(_all_differences, MORE[part::2], 1, step) == {}


@pytest.mark.full
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("seed", range(2, 6))
def test_every_order_of_the_streams_gives_the_same_in_other_cases(seed: int) -> None:
    assert on_device(_all_differences, [*pairwise(seed), *pairwise(seed, **OTHERS)], seed, timeout=2400) == {}


@pytest.mark.full
@pytest.mark.timeout(2500)
def test_every_order_of_the_streams_gives_the_same_on_four_ranks() -> None:
    reshard = (*CHOICES["reshard"], 2)
    cases = pairwise(7, ranks=(4,), strategy=STRATEGIES, reshard=reshard)
    cases += pairwise(7, **{**OTHERS, "ranks": (4,), "strategy": STRATEGIES, "reshard": reshard})
    assert on_device(_all_differences, cases, 7, timeout=2400) == {}


def _wrong_programs(names: list[str], step: int) -> dict[str, list[str]]:
    found = {}
    for i, (program, case) in enumerate(map(PROGRAMS.__getitem__, names)):
        found[names[i]] = differences(case, 1, program, orders=slice(i % step, None, step))
    return {name: wrong for name, wrong in found.items() if wrong}


OTHER_PROGRAMS = [name for name, (program, _) in PROGRAMS.items() if program is not train and name not in AXES]


@IN_FEW_ORDERS
@pytest.mark.parametrize("part", range(2))
def test_what_a_script_does_beside_training(part: int, step: int) -> None:
    """Weights changed, read, saved and loaded at once, gradients hooked, text generated, while copies are under way."""
    assert len(OTHER_PROGRAMS) == 21
    assert on_device(_wrong_programs, OTHER_PROGRAMS[part::2], step) == {}


def _moved(folders: list[str], sizes: tuple[int, int]) -> list[list[list[torch.Tensor]]]:
    """What training goes on with at another number of ranks, on the CPU and in each order."""
    from tests.simulated.device import ORDERS, begin
    from tests.simulated.group import run_ranks

    case, found = Case(offload="main weights", precision="bf16"), []
    for folder, order, kind in zip(folders, (ORDERS[0], *ORDERS), ("cpu", *["simulated"] * len(ORDERS)), strict=True):
        begin(order, seed=1)
        run_ranks(save_to, sizes[0], folder, case, kind)
        found.append(run_ranks(go_on_from, sizes[1], folder, case, kind))
    return found


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((4, 1), marks=pytest.mark.full)])
def test_a_checkpoint_is_loaded_at_another_number_of_ranks(sizes: tuple[int, int], tmp_path: Path) -> None:
    expected, *runs = on_device(_moved, [str(tmp_path / str(number)) for number in range(5)], sizes)
    assert len(runs) == 4
    for ranks in runs:
        for values, right in zip(ranks, expected, strict=True):
            assert all(map(torch.equal, values, right))


def _lost_class() -> None:
    from tests.simulated.group import run_ranks

    run_ranks(shard_what_loses_its_class, 1)


def test_a_parameter_whose_class_is_lost_on_the_way_to_the_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="of type Losing becomes a Tensor when moved to simulated"):
        on_device(_lost_class)


def _device_of_the_state() -> str:
    from fullshard.api.accelerator_state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    device = PartialState().device
    AcceleratorState._reset_state()
    return device.type


def test_a_state_computes_where_accelerates_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # that of `tests.trainers`
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # which is refused when a model is sharded
    assert on_device(_device_of_the_state) == "simulated"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert on_device(_device_of_the_state) == "cpu"
