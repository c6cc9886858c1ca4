"""What users ask `fullshard plan`: every question ends as it should, without a traceback, within seconds.

pytest tests/plan/test_plan_questions.py -m full       # all of tests/fixtures/plan_questions.txt; without, a slice
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.core.errors import ConfigError

MOST_SECONDS = 10.0
"""Of processor time: five, and what a busy machine adds."""
MISTAKE = 2


def questions() -> list[tuple[int, str]]:
    text = (Path(__file__).parents[1] / "fixtures/plan_questions.txt").read_text(encoding="utf-8")
    lines = (line.partition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return [(int(code), question) for code, _, question in lines]


def ask(question: str) -> int:
    """How it ends, after a look at how long it took and what it said."""
    begun = time.process_time()
    done = CliRunner().invoke(app, ["plan", *shlex.split(question)])
    assert time.process_time() - begun < MOST_SECONDS
    if isinstance(done.exception, ConfigError):  # which the command prints without a traceback
        assert done.exception.hint
        return MISTAKE
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code == MISTAKE:  # an option that there is not
        assert "No such option" in done.output or "unexpected extra argument" in done.output
        return MISTAKE
    assert "tokens/s" in done.output and "GiB" in done.output
    return done.exit_code


@pytest.mark.parametrize(("code", "question"), questions()[5::20])
def test_some_questions(code: int, question: str) -> None:
    assert ask(question) == code


@pytest.mark.full
@pytest.mark.parametrize(("code", "question"), questions())
def test_every_question(code: int, question: str) -> None:
    assert ask(question) == code


def test_there_are_enough_of_each_kind() -> None:
    codes = [code for code, _ in questions()]
    assert len(codes) >= 140 and all(codes.count(code) >= 10 for code in (0, 1, MISTAKE))
