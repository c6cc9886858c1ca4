"""What hints and pages name is there: names to import, commands, flags, and the oldest torch.

pytest tests/project/test_named_in_words.py
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fullshard.cli.main import COMMANDS
from fullshard.cli.sft import _LAUNCH
from fullshard.config.flags import FLAGS, OPTIONS
from fullshard.config.schema import GROUPS, RunConfig
from fullshard.config.trackers import PACKAGES
from fullshard.core.requirements import OLDEST_TORCH, is_too_old
from fullshard.recipes.arguments import TrainArguments
from tests.sources import nodes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NAME = re.compile(r"(?<![\w/.@-])fullshard((?:\.[A-Za-z_]\w*)+)")
_COMMAND = re.compile(r"(?<![\w/.-])(?<!from )fullshard (?P<name>[a-z]+)(?: (?P<inner>[a-z]+))?")
_FILES = {"yaml", "yml", "json", "md", "toml"}


def _hints() -> Iterator[tuple[str, str]]:
    """(where, text) of every hint in the sources, what is put in at run time as X."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in nodes(path):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "hint":
                    parts = [
                        str(part.value) if isinstance(part, ast.Constant) else "X"
                        for part in ast.walk(keyword.value)
                        if isinstance(part, ast.Constant | ast.FormattedValue)
                    ]
                    yield f"{path.relative_to(ROOT)}:{keyword.value.lineno}", " ".join(parts)


def _words() -> Iterator[tuple[str, str]]:
    """(where, text) of every text in the sources and every line of the pages."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{page.relative_to(ROOT)}:{number}", line


def _resolve(dotted: str) -> None:
    """Import as much of a name as is a module, and look the rest up, also where a function has its module's name."""
    parts = dotted.split(".")
    found: Any = importlib.import_module("fullshard")
    for position, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            above = sys.modules.get(".".join(parts[: position - 1]))
            found = getattr(above, part, None) or importlib.import_module(".".join(parts[:position]))


def test_every_name_of_the_package_is_there() -> None:
    wrong, count = [], 0
    for where, text in _words():
        for found in _NAME.finditer(text):
            if found[1].rsplit(".", 1)[-1] in _FILES:
                continue
            count += 1
            try:
                _resolve(f"fullshard{found[1]}")
            except (ImportError, AttributeError):
                wrong.append(f"{where}: fullshard{found[1]}")
    assert wrong == []
    assert count > 40


def test_every_file_that_a_page_names_is_there() -> None:
    """By its place in the package, as `engine/unit`."""
    package = ROOT / "src" / "fullshard"
    layers = "|".join(sorted(path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"))
    wrong, count = [], 0
    for page in [*PAGES, ROOT / "ARCHITECTURE.md"]:
        for name in re.findall(rf"`((?:{layers})(?:/[a-z_0-9]+)+)(?:\.py)?`", page.read_text(encoding="utf-8")):
            if "/test_" in name:  # torch's own
                continue
            count += 1
            if not ((package / name).is_dir() or (package / f"{name}.py").is_file()):
                wrong.append(f"{page.name}: {name}")
    assert wrong == []
    assert count > 100


@functools.cache
def _inner(command: str) -> set[str]:
    module = importlib.import_module(f"fullshard.cli.{command}")
    if not hasattr(module, "app"):
        return set()
    group: Any = typer.main.get_command(module.app)
    return set(group.commands)


def _commands_in(text: str, *, is_page: bool) -> Iterator[re.Match[str]]:
    """In a page only what is code: prose has `fullshard does ...`."""
    code = re.findall(r"`([^`]+)`", text)
    if is_page and text.startswith("fullshard "):
        code.append(text)
    for part in code if is_page else [text]:
        yield from _COMMAND.finditer(part)


def test_every_command_is_there() -> None:
    wrong, count = [], 0
    for where, text in (*_hints(), *((where, text) for where, text in _words() if ".md:" in where)):
        for found in _commands_in(text, is_page=".md:" in where):
            count += 1
            name, inner = found["name"], found["inner"]
            if name not in COMMANDS or (inner and _inner(name) and inner not in _inner(name)):
                wrong.append(f"{where}: {found[0]}")
    assert wrong == []
    assert count > 60


def _flags_of(command: str) -> set[str]:
    """Flags of a command, with - for _."""
    if command == "launch":
        names = {option.name for option in OPTIONS} | {option.short for option in OPTIONS if option.short}
        for key in FLAGS.keys:
            names |= {key.name, *key.spellings} if hasattr(key, "spellings") else {key.name}
        for group in GROUPS:
            names |= set(RunConfig.model_fields[group].annotation.model_fields)  # type: ignore[union-attr]
        return {name.replace("_", "-") for name in names} | {"h", "m", "standalone"}
    if command == "sft":
        from trl import ModelConfig, ScriptArguments

        from fullshard.integrations.transformers import SFTConfig
        from fullshard.recipes.sft_arguments import NO_EFFECT, RENAMED, OwnArguments

        known = {
            "splits",
            *(f.name for cls in (ModelConfig, ScriptArguments, OwnArguments, SFTConfig) for f in fields(cls)),
        }
        return {n.replace("_", "-") for n in {*known, *NO_EFFECT, *RENAMED, *_LAUNCH}}
    module = importlib.import_module(f"fullshard.cli.{command}")
    text = inspect.getsource(module)
    names = set(re.findall(r'"--([a-z-]+)"', text)) | ({"json"} if "Json" in text else set())
    for inner in [value for _, value in inspect.getmembers(module, inspect.isfunction)]:
        if inner.__module__ == module.__name__:
            names |= {name.replace("_", "-") for name in inspect.signature(inner).parameters}
    return names | {"help", "version"}


def test_every_flag_on_a_pages_command_line_is_that_commands() -> None:
    wrong, count = [], 0
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            line = line.removeprefix("$ ").split("  #")[0]
            words = line.split()
            if len(words) < 2 or words[0] != "fullshard" or words[1] not in COMMANDS:
                continue
            command = words[1]
            known = _flags_of(command)
            for word in words[2:]:
                if command in ("launch", "rehearse") and (word.endswith(".py") or word in ("-m", "SCRIPT")):
                    break  # what follows is the script's own
                if command == "rehearse" and word.endswith(".yaml"):
                    break  # what follows is `fullshard sft`'s
                if word == "--":
                    known = _flags_of("launch")
                if word.startswith("--") and len(word) > 2:
                    count += 1
                    name = word[2:].partition("=")[0].replace("_", "-")
                    if name not in known and name.removeprefix("no-") not in known:
                        wrong.append(f"{page.name}:{number}: {command} {word}")
    assert wrong == []
    assert count > 20


def test_every_flag_in_a_hint_is_some_commands() -> None:
    known = set().union(*(_flags_of(name) for name in COMMANDS)) | {"ntasks-per-node"}  # which is Slurm's
    wrong = []
    for where, text in _hints():
        for word in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text):
            name = word.replace("_", "-").rstrip("-")
            if name not in known and name.removeprefix("no-") not in known:
                wrong.append(f"{where}: --{word}")
    assert wrong == []


def test_the_oldest_torch_is_the_same_everywhere() -> None:
    oldest = ".".join(map(str, OLDEST_TORCH))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={oldest}" in project["dependencies"]
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not is_too_old(importlib.metadata.version("torch"))
    assert [is_too_old(v) for v in ("2.10.1", "2.9.0+cu128", "1.13.1", "2.11.0+cpu", "2.14.0a0+git1", "3.0")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_every_extra_that_is_named_exists() -> None:
    """In texts of the sources, in pages and examples, and in calls that report a package that is not installed."""
    texts = [(where, text) for where, text in _words() if "[" in text]
    texts += [(path.name, path.read_text(encoding="utf-8")) for path in (ROOT / "examples").glob("*.*")]
    pattern = re.compile(r"(?:fullshard|['\"]\.)\[([a-z\d,]+)\]")
    named = {(extras, where) for where, text in texts for extras in pattern.findall(text)}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("import_extra", "MissingExtraError"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
                named |= {(str(value.value), path.name) for value in given if isinstance(value, ast.Constant)}
    named |= {(extra, "trackers.py") for _, extra in PACKAGES.values()}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"xla", "sft,quant", "hf", "hf,plots", "wandb"} <= {extras for extras, _ in named}
    assert [(extras, where) for extras, where in named if not known.keys() >= set(extras.split(","))] == []


@pytest.mark.full
@pytest.mark.parametrize("module", ["api", "engine", "torchacc", "checkpoint"])
def test_an_older_torch_is_one_line_at_import(module: str) -> None:
    """`test_environments.test_the_engine_is_refused_there` is the default test of this."""
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '2.10.1' if name == 'torch' else real(name)\n"
        f"try: import fullshard.{module}\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "VersionError fullshard needs torch 2.11 or later, got 2.10.1\nhint: pip install" in done.stdout, done.stderr


def test_the_checkpoint_that_the_tutorial_verifies_is_where_train_puts_it() -> None:
    text = (ROOT / "docs/tutorials/first-run.md").read_text(encoding="utf-8")
    path = TrainArguments.of({}).checkpoints / f"step-{TrainArguments.of({}).steps:06d}"
    assert f"fullshard ckpt verify {path} " in text
