"""What other people wrote takes bounded time and memory, and is not quoted in full length.

pytest tests/test_bounded_input.py
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from fullshard.config.document import MAX_NBYTES, parse_document, read_document
from fullshard.core.errors import MAX_LINE, MAX_MESSAGE, ConfigError, MissingExtraError

NINE = ",".join(["*{}"] * 9)
BOMBS = {
    "lists": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{NINE.format(*[f'a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "mappings": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 10)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_that_make_many_out_of_few_are_refused(kind: str) -> None:
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"^f.yaml: more than \d+ values\nhint: check its aliases"):
        parse_document(BOMBS[kind], "f.yaml")
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    assert len(parse_document("a: &a [1, 2]\nb: *a\n", "f.yaml")) == 2  # an alias as such is fine


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 30_000, "9" * 5_000])
def test_json_that_python_cannot_read_is_an_own_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f.json:1:1: not valid JSON"):
        parse_document(text, "f.json")


def test_a_long_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room
    for long in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{long} has more than {MAX_NBYTES} bytes"):
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
