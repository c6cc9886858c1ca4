"""What users ask `fullshard plan`: every question ends as it should, consistently, without a traceback, within seconds.

pytest tests/plan/test_plan_questions.py -m full       # all of tests/fixtures/plan_questions.txt; without, a slice
"""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fullshard.cli.main import app
from fullshard.core.errors import ConfigError

MOST_SECONDS = 10.0
"""Of processor time: five, and what a busy machine adds."""
FITS, DOES_NOT_FIT, MISTAKE = "0", "1", "2"


def questions() -> list[tuple[str, str]]:
    text = (Path(__file__).parents[1] / "fixtures/plan_questions.txt").read_text(encoding="utf-8")
    lines = (line.partition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return [(code, question) for code, _, question in lines]


def asked(words: list[str]) -> Result:
    begun = time.process_time()
    done = CliRunner().invoke(app, ["plan", *words])
    assert time.process_time() - begun < MOST_SECONDS
    return done


def ask(words: list[str]) -> str:
    """How it ends, after a look at what it said."""
    done = asked(words)
    if isinstance(done.exception, ConfigError):  # which the command prints without a traceback
        assert done.exception.hint
        return MISTAKE
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code == int(MISTAKE):  # an option that there is not, or a value of the wrong kind
        assert re.search("No such option|unexpected extra argument|Invalid value", done.output)
        return MISTAKE
    assert "tokens/s" in done.output and "GiB" in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    if "no plan fits into" not in done.output:  # a plan that --auto does not propose may fit all the same
        check_memory(words, fits=done.exit_code == 0)
    if done.exit_code:
        check_proposals(done.output)
    return str(done.exit_code)


def check_memory(words: list[str], *, fits: bool) -> None:
    """It fits exactly if the device and the host have what it needs."""
    answer = json.loads(asked([*words, "--json"]).stdout)
    memory = answer["memory"]
    enough = memory["needed"] <= memory["available"]
    assert fits == (enough and memory["host_needed"] <= (memory["host_available"] or float("inf")))
    assert memory["needed"] >= memory["peak"] > 0 and answer["time"]["tokens_per_second"] > 0
    assert 0 < answer["model"]["trainable"] <= answer["model"]["parameters"]
    assert 0 <= answer["time"]["exposed"] <= answer["time"]["communication"] * 1.001


def check_proposals(text: str) -> None:
    """Each command that it proposes fits when it is asked."""
    lines = re.sub(r" \\\n +", " ", text).splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("fullshard plan ")]
    assert 1 <= len(commands) <= 3
    for command in commands:
        assert asked(shlex.split(command)[2:]).exit_code == 0, command


def check(code: str, question: str) -> None:
    found = ask(shlex.split(question))
    assert found in (FITS, DOES_NOT_FIT) if code == "?" else found == code


SAMPLE = [(code, question) for code, question in questions()[9::40] if "--auto" not in question]


@pytest.mark.parametrize(("code", "question"), SAMPLE)
def test_some_questions(code: str, question: str) -> None:
    check(code, question)


@pytest.mark.full
@pytest.mark.parametrize(("code", "question"), questions())
def test_every_question(code: str, question: str) -> None:
    check(code, question)


def test_there_are_enough_of_each_kind() -> None:
    codes = [code for code, _ in questions()]
    assert len(codes) >= 250 and all(codes.count(code) >= 10 for code in (FITS, DOES_NOT_FIT, MISTAKE, "?"))
    assert len(set(questions())) == len(codes)
