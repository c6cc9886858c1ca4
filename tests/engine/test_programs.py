"""Random programs of forward, backward, freezing, failing, saving, loading and parking on 1 to 3 ranks.

Each runs beside a plain model.

Each example is four programs that the same ranks run one after the other: to join a job takes as long as to run one.

pytest tests/engine/test_programs.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import preload, run_ranks
from tests.programs import Program, parked_programs, programs, run_program
from tests.programs_of_two import ProgramOfTwo, programs_of_two, run_program_of_two

preload("tests.programs", "tests.programs_of_two")

TOGETHER = 4
MANY = int(os.environ.get("EXAMPLES", 10_000))


def together(of: Callable[[tuple[int, ...]], st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.sampled_from((1, 2, 3)).flatmap(lambda ranks: st.tuples(*[of((ranks,))] * TOGETHER))


def run_each(run: Callable[[Any, str, str], None], several: tuple[Any, ...], folder: str, kind: str = "cpu") -> None:
    """On each rank."""
    for number, program in enumerate(several):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        run(program, str(place), kind)


def check(run: Callable[[Any, str, str], None], several: tuple[Any, ...], timeout: float, kind: str = "cpu") -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_each, several[0].world_size, run, several, folder, kind, timeout=timeout, kind=kind)


@given(together(programs))
@settings(max_examples=48 // TOGETHER, derandomize=True)
def test_random_programs(several: tuple[Program, ...]) -> None:
    check(run_program, several, 60)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(together(programs))
@settings(max_examples=MANY // TOGETHER)
def test_many_random_programs(several: tuple[Program, ...]) -> None:
    check(run_program, several, 60)


@pytest.mark.full
@pytest.mark.timeout(1200)
@given(together(parked_programs))
@settings(max_examples=200 // TOGETHER, derandomize=True)
def test_random_programs_that_park(several: tuple[Program, ...]) -> None:
    check(run_program, several, 60)


@given(together(programs_of_two))
@settings(max_examples=12 // TOGETHER, derandomize=True)
def test_random_programs_of_two_models(several: tuple[ProgramOfTwo, ...]) -> None:
    check(run_program_of_two, several, 60)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(together(programs_of_two))
@settings(max_examples=MANY // TOGETHER)
def test_many_random_programs_of_two_models(several: tuple[ProgramOfTwo, ...]) -> None:
    check(run_program_of_two, several, 60)


@pytest.mark.gpu
@given(together(programs))
@settings(max_examples=24 // TOGETHER)
def test_random_programs_on_a_gpu(several: tuple[Program, ...]) -> None:
    check(run_program, several, 60, "cuda")


@pytest.mark.gpu
@given(together(programs_of_two))
@settings(max_examples=24 // TOGETHER)
def test_random_programs_of_two_models_on_a_gpu(several: tuple[ProgramOfTwo, ...]) -> None:
    check(run_program_of_two, several, 60, "cuda")
