"""Random programs of forward, backward, freezing, failing, saving, loading on 1 to 3 ranks, beside a plain model.

pytest tests/test_programs.py
"""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings

from tests.distributed import preload, run_ranks
from tests.programs import Program, programs, run_program

preload("tests.programs")


def check(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_program, program.world_size, program, folder, timeout=60)


@given(programs())
@settings(max_examples=100, derandomize=True)
def test_random_programs(program: Program) -> None:
    check(program)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(programs())
@settings(max_examples=10_000)
def test_many_random_programs(program: Program) -> None:
    check(program)
