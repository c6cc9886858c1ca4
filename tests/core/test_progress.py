"""Long work shows a bar with the time left on a terminal, after a second, and nothing anywhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import Any

import pytest

WORK = """import sys, time
from fullshard.core.progress import advance, progress
sys.argv[1:] = {words}
try:
    with progress("writing", 4):
        for _ in range(4):
            time.sleep({seconds})
            advance(1)
        if {fails}: raise KeyboardInterrupt
except KeyboardInterrupt: print("interrupted")
print("done")
"""


def shown(seconds: float = 0.35, *words: str, fails: bool = False, **variables: str) -> str:
    """What a terminal of 80 columns shows of work in four parts, each of which takes so many seconds."""
    code = WORK.format(seconds=seconds, fails=fails, words=list(words))
    ours, theirs = pty.openpty()
    environ = {"TERM": "xterm", "COLUMNS": "80", "PATH": os.environ["PATH"], **variables}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environ):
        os.close(theirs)
        text = b""
        while True:
            try:
                text += (more := os.read(ours, 65536))
            except OSError:  # the end, on Linux
                more = b""
            if not more:
                os.close(ours)
                return text.decode()


def test_a_bar_shows_the_time_left_and_disappears() -> None:
    text = shown()
    bar = next(line for line in text.replace("\n", "\r").split("\r") if "75%" in line)
    assert "writing" in bar and "left" in bar and ":0" in bar
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2Kdone\r\n")  # the cursor is back, and the bar's line is empty


def test_a_bar_ends_with_an_interrupt_and_without_colors() -> None:
    text = shown(fails=True, NO_COLOR="1")
    assert "100%" in text and "\x1b[9" not in text and "\x1b[3" not in text
    assert text.endswith("\x1b[2Kinterrupted\r\ndone\r\n")


@pytest.mark.parametrize(
    ("seconds", "words", "variables"),
    [
        (0.0, (), {}),
        pytest.param(0.35, ("--json",), {}, marks=pytest.mark.full),
        pytest.param(0.35, (), {"RANK": "1"}, marks=pytest.mark.full),
        pytest.param(0.35, (), {"TERM": "dumb"}, marks=pytest.mark.full),
    ],
)
def test_nothing_is_shown(seconds: float, words: tuple[str, ...], variables: dict[str, Any]) -> None:
    assert shown(seconds, *words, **variables) == "done\r\n"
