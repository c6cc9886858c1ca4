"""Mistakes that people make with software of this kind: each either works, or ends in an error that says what is wrong.

The tables beside this file say what a person types or writes, and what they see; `table.py` explains a row.

pytest tests/mistakes/test_mistakes.py
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import run_here
from tests.distributed import preload, run_ranks
from tests.launching import environment, run_python
from tests.mistakes.table import Row, busy_port, read, run_code, write_files, write_model

preload("tests.mistakes.table")

PROGRAM = [sys.executable, "-c", "from fullshard.cli.main import main; main()"]
TABLES = ("commands", "configs", "engine", "accelerator", "checkpoints", "pretrained", "sft")
PROGRAMS = TABLES[2:]
COMMANDS, FILES = read("commands")[1], read("configs")[1]
_SLOW = re.compile("fullshard (?:chat|merge|simulate)")  # they import Transformers, or need the model
_ERROR = re.compile(r"^(?:\w+Error: |Error: |\S+: refused$|rank \d+ of \d+ |Usage: |.* is damaged:$|cannot run )", re.M)


def _is_slow(row: Row) -> bool:
    return bool(
        row.get("starts")
        or row.get("slow")
        or _SLOW.match(row["run"])
        or " model" in row["run"]
        or "weights" in row["run"]
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `commands.toml` names files in, without a model."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def model(files: Path) -> Path:
    """The same folder with a model."""
    write_model(files)
    return files


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which somebody listens."""
    socket, number = busy_port()
    with socket:
        yield number


def _run(row: Row, folder: Path, port: int = 0) -> tuple[int, str]:
    """Run a command in a folder: its exit code, and all that it printed."""
    for name, text in row.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    words = shlex.split(row["run"].replace("{busy_port}", str(port)))[1:]
    environ = {**environment(HF_HUB_OFFLINE="1", **row.get("environ", {})), "COLUMNS": "200"}
    if row.get("starts"):
        done = run_python([*PROGRAM, *words], folder, environ, 100)
    else:
        done = run_here(*words, cwd=folder, environ=environ)
    return done.returncode, done.stdout + done.stderr


def _check(row: Row, code: int, text: str, port: int = 0) -> None:
    shown = text[-3000:]
    if row["class"] == "works":
        assert code == row.get("exit", 0), shown
    else:
        assert code == row["exit"] if "exit" in row else code != 0, shown
        assert _ERROR.search(text), f"no error is shown:\n{shown}"
    assert ("Traceback" in text) == ("traceback" in row), f"a traceback, or none of the script:\n{shown}"
    for words in [*row.get("sees", []), *([row["traceback"]] if "traceback" in row else [])]:
        assert words.replace("{busy_port}", str(port)) in text, f"{words!r} is not in:\n{shown}"


def _ids(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=row["id"]) for row in rows]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", _ids([row for row in COMMANDS if not _is_slow(row)]))
def test_a_command(row: Row, files: Path) -> None:
    if row.get("needs") == "no GPU" and torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    _check(row, *_run(row, files))


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("row", _ids([row for row in COMMANDS if _is_slow(row)]))
def test_a_slow_command(row: Row, model: Path, port: int) -> None:
    _check(row, *_run(row, model, port), port)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", _ids(FILES))
def test_a_file(row: Row, tmp_path: Path) -> None:
    name = row.get("name", "run.yaml")
    (tmp_path / name).write_text(row["text"])
    (tmp_path / "train.py").touch()
    command = row.get("command", f"fullshard launch --config_file {name} --dry_run train.py")
    _check(row, *_run({**row, "run": command}, tmp_path))


def _programs() -> Iterator[Any]:
    for table in PROGRAMS:
        prelude, rows = read(table)
        for row in rows:
            yield pytest.param(prelude, row, id=f"{table}-{row['id']}")


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("prelude", "row"), list(_programs()))
def test_a_program(prelude: str, row: Row, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, which wait for each other `patience` seconds, if a rank does not come."""
    for name, value in {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)
    places = {"place": str(tmp_path), "shared": str(model)}
    found = run_ranks(run_code, 2, prelude + row.get("setup", ""), row["code"], places, row.get("patience"), timeout=90)
    of_interest = [found[rank] for rank in row.get("ranks", range(len(found)))]
    for text, _ in of_interest if row["class"] == "clear" else ():
        for words in row["sees"]:
            assert words in text, f"{words!r} is not in:\n{text[-3000:]}"
    if row["class"] == "works":
        assert [source for _, source in of_interest] == [""] * len(of_interest), found
        assert all(words in "".join(text for text, _ in of_interest) for words in row.get("sees", ())), found
    else:
        assert {source for _, source in of_interest} == {row.get("by", "fullshard")}, found


def test_the_tables_are_whole() -> None:
    """At least 130 mistakes, each of one class, and with what a person sees unless it simply works."""
    rows = [(table, row) for table in TABLES for row in read(table)[1]]
    names = [(table, row["id"]) for table, row in rows]
    assert len(set(names)) == len(names) >= 130
    assert {row["class"] for _, row in rows} == {"works", "clear"}
    assert [
        name for name, (_, row) in zip(names, rows, strict=True) if row["class"] == "clear" and not row["sees"]
    ] == []
