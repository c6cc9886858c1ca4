"""What `make mutants` changes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutants.__main__ import RECORD, all_mutants
from tests.mutants.sites import Mutant, mutants

SOURCE = '''
def published(first: int, ready: list[bool] | None = None) -> int:
    """Five is not a number here."""
    if first < 0:
        raise ValueError(f"{first + 1} is too small")
    self.count = (first + 1) * 2
    self.log(first, flush=True)
    for index in range(first):
        if index in seen or index is None:
            continue
    return max(self.count, first)
'''


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.old, mutant.new) for mutant in mutants("some.py", source)}


def test_each_kind_of_change_is_there() -> None:
    assert changes(SOURCE) == {
        ("first < 0", "False"),
        ("first < 0", "first <= 0"),
        ("0", "1"),
        ("self.count = (first + 1) * 2", "pass"),
        ("(first + 1) * 2", "(first + 1) // 2"),
        ("first + 1", "first - 1"),
        ("1", "2"),
        ("2", "3"),
        ("self.log(first, flush=True)", "pass"),
        ("True", "False"),
        ("index in seen or index is None", "not (index in seen or index is None)"),
        ("index in seen or index is None", "(index in seen)"),
        ("index in seen or index is None", "(index is None)"),
        ("index in seen", "index not in seen"),
        ("index is None", "index is not None"),
        ("continue", "pass"),
        ("max(self.count, first)", "None"),
        ("max", "min"),
    }


def test_a_change_is_made_where_it_was_found() -> None:
    (found,) = [mutant for mutant in mutants("some.py", SOURCE) if mutant.new == "(first + 1) // 2"]
    assert found.apply(SOURCE) == SOURCE.replace("(first + 1) * 2", "(first + 1) // 2")
    assert found.statement == (6, 6) and found.function == "published" and not found.at_import


def test_a_file_that_changed_meanwhile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"some.py:1 is not 'a' any more"):
        Mutant("some.py", 1, 0, "f", "a", "b", (1, 1), False).apply("c = 1\n")


def test_the_record_names_tests_that_exist() -> None:
    """By file and function, without parameters, which may quote messages and thus change."""
    named = {row["by"] for row in json.loads(RECORD.read_text()) if "::" in row["by"]}
    missing = [name for name in named if f"def {name.partition('::')[2]}(" not in Path(name.split("::")[0]).read_text()]
    assert len(named) > 50 and not missing


@pytest.mark.full
def test_every_change_of_the_critical_files_can_be_parsed() -> None:
    everything = all_mutants()
    assert len(everything) > 4000
    sources = {file: Path(file).read_text() for file in {mutant.file for mutant in everything}}
    for mutant in everything[::7]:
        ast.parse(mutant.apply(sources[mutant.file]))
