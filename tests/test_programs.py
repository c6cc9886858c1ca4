"""Random programs of forward, backward, freezing, failing, saving, loading on 1 to 3 ranks, beside a plain model.

pytest tests/test_programs.py
"""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings

from tests.distributed import preload, run_ranks
from tests.programs import Program, programs, run_program
from tests.programs_of_two import ProgramOfTwo, programs_of_two, run_program_of_two

preload("tests.programs", "tests.programs_of_two")


def check(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_program, program.world_size, program, folder, timeout=60)


@given(programs())
@settings(max_examples=60, derandomize=True)
def test_random_programs(program: Program) -> None:
    check(program)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(programs())
@settings(max_examples=10_000)
def test_many_random_programs(program: Program) -> None:
    check(program)


def check_two(program: ProgramOfTwo) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_program_of_two, program.world_size, program, folder, timeout=20)


@given(programs_of_two())
@settings(max_examples=40, derandomize=True)
def test_random_programs_of_two_models(program: ProgramOfTwo) -> None:
    check_two(program)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(programs_of_two())
@settings(max_examples=10_000)
def test_many_random_programs_of_two_models(program: ProgramOfTwo) -> None:
    check_two(program)
