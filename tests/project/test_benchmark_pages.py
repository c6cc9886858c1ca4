"""The tables in README.md and docs/ are those of the benchmarks' records.

Run: pytest tests/project/test_benchmark_pages.py
"""

from __future__ import annotations

import re

import pytest

from benchmarks import pages


def test_every_page_shows_what_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    code = pages.main(["--check"])
    assert code == 0, f"{capsys.readouterr().out}run `python -m benchmarks.pages`"


def test_a_changed_number_is_noticed() -> None:
    page = next(page for page in pages.PAGES if page.name == "README.md").read_text(encoding="utf-8")
    changed, count = re.subn(r"(\| fullshard +\| +)\d", r"\g<1>9", page, count=1)
    assert count == 1
    assert pages.with_tables(changed) == pages.with_tables(page) != changed
