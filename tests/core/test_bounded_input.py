"""What other people wrote takes bounded time and memory, and is not quoted in full length.

pytest tests/core/test_bounded_input.py
"""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fullshard.api.saving import _HOOKS, _names_of_hooks
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.offline.huggingface import read_configuration
from fullshard.checkpoint.torch_files import load_torch_file
from fullshard.checkpoint.weight_files import indexed_files, tensors_of
from fullshard.config.document import MAX_NBYTES, parse_document, read_document
from fullshard.core.errors import (
    MAX_LINE,
    MAX_MESSAGE,
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    printable,
)  # fmt: skip
from fullshard.core.files import MAX_DEPTH, SMALL_NBYTES, parse_json, read_bytes, read_lines, read_object
from fullshard.core.journal import Happening, Journal, read_journal, told_by_processes
from fullshard.observe import read_metrics
from fullshard.plan.hardware import read_calibration
from fullshard.plan.library import _read as read_model_file

NINE = ",".join(["*{}"] * 9)
BOMBS = {
    "lists": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{NINE.format(*[f'a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "mappings": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 10)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_that_make_many_out_of_few_are_refused(kind: str) -> None:
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"^f.yaml: the file has more than \d+ values\nhint: check the aliases"):
        parse_document(BOMBS[kind], "f.yaml")
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    assert len(parse_document("a: &a [1, 2]\nb: *a\n", "f.yaml")) == 2  # an alias as such is fine


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 30_000, "9" * 5_000])
def test_json_that_python_cannot_read_is_an_own_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f.json:1:1: the file is not valid JSON"):
        parse_document(text, "f.json")


def test_a_long_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room
    for long in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{long} is larger than {MAX_NBYTES} bytes"):
            read_document(long)


def test_messages_are_short_enough_to_read() -> None:
    message = str(ConfigError("unknown key " + "k" * 300_000 + " in f.yaml\nsecond line", hint="h" * 300_000))
    first, second, hint = message.split("\n")
    assert first.startswith("unknown key kkk") and first.endswith("k in f.yaml") and "more characters ...]" in first
    assert second == "second line" and hint.startswith("hint: hhh")
    assert max(map(len, message.split("\n"))) < MAX_LINE
    many = str(ConfigError("\n".join(f"line {n}" for n in range(100_000))))
    assert len(many) < MAX_MESSAGE and many.startswith("line 0\nline 1\n") and many.endswith("line 99999")
    assert "x" * 1000 in str(ConfigError("x" * 1000))
    assert str(MissingExtraError("a", extra="b", purpose="c")).endswith("hint: pip install 'fullshard[b]'")


def test_a_small_file_is_a_regular_one_and_small(tmp_path: Path) -> None:
    pipe, sparse, good = tmp_path / "pipe", tmp_path / "sparse", tmp_path / "good.json"
    os.mkfifo(pipe)
    with sparse.open("wb") as file:
        file.truncate(6 * 10**9)  # takes no room
    good.write_text('{"a": 1}\n')
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="expected a regular file, got a directory, a pipe or a device"):
            read_bytes(path)
        with pytest.raises(OSError, match="expected a regular file"):
            next(read_lines(path))
    with pytest.raises(OSError, match=rf"the file has 6,000,000,000 bytes, expected at most {SMALL_NBYTES:,}: "):
        read_object(sparse)
    with pytest.raises(OSError, match="the file has more bytes, expected at most 3: '/proc/self/status'"):
        read_bytes(Path("/proc/self/status"), limit_nbytes=3)  # whose size the system gives as 0
    (tmp_path / "link").symlink_to(good)
    assert read_object(tmp_path / "link") == {"a": 1} and list(read_lines(good)) == ['{"a": 1}\n']
    assert list(read_lines(good, longest=5)) == ['{"a":', " 1}\n"]
    good.write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object, got a list"):
        read_object(good)


def test_json_is_not_nested_without_end() -> None:
    deep = {kind: lambda n, kind=kind: kind * n + "1" + {"[": "]"}.get(kind, "}") * n for kind in ("[", '{"a":')}
    for nested in deep.values():
        assert parse_json(nested(MAX_DEPTH))
        for levels in (MAX_DEPTH + 1, 100_000):
            with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
                parse_json(nested(levels))
    wide = '["' + r"[\"" * 1000 + '",' + "[]," * 1000 + "[]]"  # brackets in text, and beside one another, are none
    assert len(parse_json(wide)) == 1002


def test_text_that_no_file_can_hold_is_replaced() -> None:
    assert parse_json(r'["\ud83d\ude00", "\ud800", "\ud800\u0041", "\\ud800"]') == [
        "\U0001f600",
        "\ufffd",
        "\ufffdA",
        r"\ud800",
    ]


def test_messages_do_not_steer_a_terminal() -> None:
    message = str(ConfigError("red \x1b[31m\r\n\ttab \u202egnorw \x9b \ud800", hint="\x1b]0;title\x07"))
    assert message == "red \\x1b[31m\\r\n\ttab \\u202egnorw \\x9b \\ud800\nhint: \\x1b]0;title\\x07"
    assert printable("grüße 你好", 20) == "grüße 你好" and len(printable("x" * 10**6, 100)) < 150


READERS: dict[str, tuple[str, Any, Any]] = {
    "manifest": ("manifest.json", lambda path: read_manifest(path.parent), CheckpointError),
    "hooks of save_state": (_HOOKS, lambda path: _names_of_hooks(path.parent), CheckpointError),
    "index": ("model.safetensors.index.json", indexed_files, CheckpointError),
    "safetensors": ("model.safetensors", lambda path: list(tensors_of(path)), CheckpointError),
    "torch": ("model.pt", load_torch_file, CheckpointError),
    "config.json": ("config.json", read_configuration, CheckpointError),
    "calibration": ("calibration.json", read_calibration, ConfigError),
    "model to plan": ("config.json", read_model_file, ConfigError),
    "metrics": ("metrics.jsonl", lambda path: list(read_metrics(path)), (DataError, OSError)),
    "events": ("events.jsonl", lambda path: list(read_journal(path)), OSError),
    "journal of a launcher": ("journal", lambda path: told_by_processes(path.parent), None),
}
"""Of each: the name of the file, what reads it, and what it raises; None: it takes it for none."""


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("kind", ["pipe", "sparse", "deep"])
def test_every_small_file_of_ours_is_read_with_limits(tmp_path: Path, what: str, kind: str) -> None:
    name, read, error = READERS[what]
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(6 * 10**9)
    else:
        path.write_text("[" * 100_000 + "\n")
    tracemalloc.start()
    try:
        if error is None or (what, kind) in {("events", "deep"), ("hooks of save_state", "pipe")}:
            assert read(path) in (None, [], set(), Path("[" * 100_000 + "\n"))
        else:
            with pytest.raises(error):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_events_are_not_written_to_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.warns(UserWarning, match="events cannot be written to .*events.jsonl"):
        Journal(tmp_path / "events.jsonl").note(Happening.START)
