"""`docs/tour.md` shows lines of the engine: they are there, in the file that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fullshard

SOURCE = Path(fullshard.__file__).parent
TOUR = (Path(__file__).parents[2] / "docs" / "tour.md").read_text()
STOPS = re.findall(r"^### `(.+?)`\n(.*?)```python\n(.*?)```", TOUR, re.MULTILINE | re.DOTALL)


def test_every_stop_is_found() -> None:
    assert len(STOPS) == TOUR.count("\n### ") == 16


@pytest.mark.parametrize(("file", "lines"), [(file, lines) for file, _, lines in STOPS], ids=[s[0] for s in STOPS])
def test_the_lines_shown_are_in_the_file(file: str, lines: str) -> None:
    shown = lines.splitlines()
    assert 1 <= len(shown) <= 5
    there = [line.partition("  # ")[0] for line in (SOURCE / f"{file}.py").read_text().splitlines()]
    assert [line for line in shown if line not in there] == []
