"""The page of errors is whole, and the files that a project is expected to have say what is true.

pytest tests/project/test_project_files.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML
from trove_classifiers import classifiers

import fullshard
from fullshard.cli.main import COMMANDS
from fullshard.core import errors
from tests.project.test_environments import needed

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def yaml(path: str | Path) -> Any:
    return YAML(typ="safe").load(ROOT / path)


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


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == yaml("CITATION.cff")["version"] == fullshard.__version__
    assert f"site_dir: build/site/{fullshard.__version__}\n" in (ROOT / "mkdocs.yml").read_text()
    [newest, *_] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == fullshard.__version__


def test_the_citation_says_what_the_package_says() -> None:
    cited = yaml("CITATION.cff")
    assert cited["license"] == PROJECT["license"] == "Apache-2.0"
    assert cited["repository-code"] == PROJECT["urls"]["Repository"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_classifiers_exist_and_name_the_supported_pythons() -> None:
    assert set(PROJECT["classifiers"]) <= classifiers
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    versions = (ROOT / "docs" / "compatibility.md").read_text()
    for python in pythons:
        assert SpecifierSet(PROJECT["requires-python"]).contains(python)
        assert re.search(rf"^\| [\d.]+ \| {re.escape(python)} \|", versions, re.MULTILINE), python
    assert pythons[0] == PROJECT["requires-python"].removeprefix(">=")


def test_extras_name_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    for requirement in (Requirement(each) for extra in extras.values() for each in extra):
        if requirement.name == "fullshard":
            assert requirement.extras <= extras.keys(), str(requirement)


def test_constraints_pin_all_that_development_needs() -> None:
    """Otherwise the same commit would be tested with other packages tomorrow."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines) and len(pinned) == len(lines)
    extras = PROJECT["optional-dependencies"]
    wanted = {*needed("dev"), *(Requirement(each).name for each in [*extras["docs"], *extras["bench"]])}
    left_out = {"fullshard", "triton", "setuptools"}  # the last two are torch's choice
    found = {canonicalize_name(name) for name in wanted} - left_out
    assert sorted(name for name in found - pinned if not name.startswith(("nvidia-", "cuda-"))) == []


def test_distributions_hold_what_they_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=True)
    [wheel], [source] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()}
    recipes = {Path("fullshard", "recipes", "files", path.name) for path in (ROOT / "recipes").iterdir()}
    assert packed == {path.as_posix() for path in own | recipes if "__pycache__" not in path.parts}
    with tarfile.open(source) as sources:
        inside = {name.partition("/")[2] for name in sources.getnames()}
    expected = ("LICENSE", "README.md", "constraints.txt", "proselint.json", ".ci/run", "tests/conftest.py")
    assert {*expected, *(f"src/{name}" for name in packed if "recipes/files" not in name)} <= inside
    assert [name for name in inside if re.search(r"^(build|dist|out|\.venv[^/]*)/|__pycache__", name)] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_complete(path: Path) -> None:
    form = yaml(path)
    assert form["name"] and form["description"]
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert all(each["type"] == "textarea" and each["attributes"]["label"] for each in fields)
    assert len({each["id"] for each in fields}) == len(fields)
    named = set(re.findall(r"`fullshard ([a-z]+)", path.read_text()))
    assert named <= {*COMMANDS}
    assert "doctor" in named or path.stem == "idea"


def test_addresses_of_issue_forms_are_of_this_repository() -> None:
    assert len(FORMS) == 3
    start = f"{PROJECT['urls']['Repository']}/blob/main/"
    for link in yaml(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]:
        assert (ROOT / link["url"].removeprefix(start)).is_file(), link


def test_workflows_run_what_is_here_with_pinned_actions() -> None:
    """A tag of an action can be moved. A commit cannot."""
    workflow = yaml(".github/workflows/ci.yml")
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)
    assert workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [".ci/run", "make dist"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "\ndist: " in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/errors.md"])
def test_links_lead_to_files_of_the_project(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / link).exists(), link
