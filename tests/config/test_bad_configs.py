"""Wrong configurations are refused, with the place, what was expected and what to do; never with a traceback.

Each file of `fixtures/bad_configs` says in comments (JSON: in a file `.expect` beside it) what its error must hold.

pytest tests/config/test_bad_configs.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullshard.config.load import load_file
from fullshard.config.resolve import resolve
from fullshard.core.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "fixtures" / "bad_configs"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".expect")


def _expected(path: Path) -> dict[str, str]:
    beside = path.with_name(path.name + ".expect")
    text = (beside if beside.exists() else path).read_text(encoding="utf-8")
    return dict(re.findall(r"^# (error|hint|at): (.*)$", text, flags=re.MULTILINE))


def test_there_are_enough() -> None:
    assert len(FILES) >= 60
    assert all("error" in _expected(path) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_refused_with_place_reason_and_hint(path: Path) -> None:
    expected = _expected(path)
    with pytest.raises(ConfigError) as caught:
        resolve([load_file(path)])
    message, _, hint = str(caught.value).partition("\nhint: ")
    assert expected["error"] in message
    assert re.search(re.escape(str(path)) + r":\d+:\d+: ", message + " "), "no file:line:column"
    if "at" in expected:
        assert f"{path}:{expected['at']}" in message
    assert hint, "no hint"
    assert "hint" not in expected or any(part in str(caught.value) for part in expected["hint"].split("|"))
    assert "Traceback" not in message
