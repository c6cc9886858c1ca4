"""The page of errors is whole, and the files that a project is expected to have say what is true.

pytest tests/project/test_project_files.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import fullshard
from fullshard.core import errors

ROOT = Path(__file__).parents[2]


def test_the_page_of_errors_has_every_class_with_what_it_is() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.FullshardError) and kind is not errors.FullshardError
    }
    assert list(rows) == list(kinds)
    for name, base in rows.items():
        assert base in {one.__name__ for one in kinds[name].__mro__[1:]}, name


def test_the_citation_is_of_this_version() -> None:
    cited = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert (cited["version"], cited["license"]) == (fullshard.__version__, "Apache-2.0")


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/errors.md"])
def test_links_lead_to_files_of_the_project(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / link).exists(), link
