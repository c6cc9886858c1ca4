"""The numbers of `budgets.toml` are kept, and a red line says what is over.

pytest tests/project/test_budgets.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests import budgets
from tests.budgets import Source, measures, over


@pytest.mark.full  # `make lint` measures them each time
def test_budgets_are_kept() -> None:
    assert over(measures(Source()), tomllib.loads(budgets.BUDGETS.read_text())) == []


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A kernel that reaches a feature over two imports, and a class of three members."""
    files = {
        "engine/fully_shard.py": "from fullshard.engine.unit import Unit\n",
        "engine/unit.py": "from fullshard.features.extra import more\n\n"
        "class Unit:\n    a: int\n    def b(self):\n        self.c = 1\n",
        "features/extra.py": "more = 1\n" * 9,
        **{f"{name}.py": "\n" for name in ("checkpoint/save", "checkpoint/load", "api/accelerator", "cli/plan")},
    }
    for name, text in files.items():
        path = tmp_path / "fullshard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source(tmp_path / "fullshard")


def test_a_red_line_says_which_import_or_class(source: Source) -> None:
    found = measures(source)
    allowed = {name: measure.value for name, measure in found.items()}
    assert over(found, allowed) == []
    assert found["closure_of_fully_shard"].value == 16
    lines = "\n".join(over(found, allowed | {"closure_of_fully_shard": 15, "members_of_a_kernel_class": 2}))
    assert "closure_of_fully_shard is 16, its budget 15" in lines
    assert "9 lines: fullshard.engine.fully_shard -> fullshard.engine.unit -> fullshard.features.extra" in lines
    assert "3: fullshard.engine.unit.Unit" in lines


def test_a_name_without_a_budget_is_red(source: Source) -> None:
    assert over(measures(source), {"liness": 1})[0].endswith("no budget, or nothing is measured for it")
