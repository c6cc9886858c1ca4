"""The config.json of models of 2025 and 2026: the plan has as many parameters as the real class, or says why not.

pytest tests/plan/test_plan_configs.py -m full       # all of tests/fixtures/plan_configs.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.api.counting import count
from fullshard.cli.main import app
from fullshard.core.errors import ConfigError
from fullshard.plan import families
from fullshard.plan.families import FAMILIES
from fullshard.plan.known_models import MODELS
from tests.plan_configs import config_json, lines, real_counts

PLANNED_HERE = [
    line for line in lines() if line.get("config", MODELS.get(line["name"], {})).get("model_type") in FAMILIES
]


def planned(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `fullshard plan` prints about the model's config.json."""
    path = folder / "config.json"
    path.write_text(config_json(line), encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", "--model", str(path), "--devices", "1024xB300", "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    answer: dict[str, Any] = json.loads(done.output)
    return answer


def check(line: dict[str, Any], folder: Path) -> None:
    if line.get("is_refused"):
        with pytest.raises(ConfigError, match=line["says"]) as caught:
            planned(line, folder)
        assert caught.value.hint
        return
    answer = planned(line, folder)
    if line["parameters"] is not None:
        frozen = 0 if "text" in line else line.get("frozen", 0)
        assert answer["model"]["parameters"] == line.get("text", line["parameters"])
        assert answer["model"]["trainable"] == answer["model"]["parameters"] - frozen
    notes = " ".join(answer["notes"])
    assert line.get("says", "") in notes
    assert ("only the text part" in notes) == ("text" in line)


@pytest.mark.parametrize("line", PLANNED_HERE[::5], ids=lambda line: line["name"])
def test_some_configurations(line: dict[str, Any], tmp_path: Path) -> None:
    check(line, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("line", lines(), ids=lambda line: line["name"])
def test_every_configuration(line: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in this process where another one would count, to save its start."""

    def counted(values: dict[str, Any], *, where: str) -> Any:
        try:
            return count(values)
        except Exception as error:  # which the other process prints, and its parent raises so
            raise ConfigError(f"{where}: cannot build the model: {error}", hint="x") from error

    monkeypatch.setattr(families, "counted", counted)
    real = real_counts(config_json(line))
    assert {name: line.get(name, 0) for name in ("parameters", "frozen")} == {
        "parameters": real["parameters"],
        "frozen": real["frozen"] or 0,
    }
    assert line.get("text", real["text"]) == real["text"]
    check(line, tmp_path)


def test_there_are_enough_of_each_kind() -> None:
    published = [line for line in lines() if "config" in line]
    exact = [line for line in lines() if line["parameters"] is not None and "text" not in line]
    assert len(lines()) >= 100 and len(published) >= 20 and len(exact) >= 95
    assert len({line["name"] for line in lines()}) == len(lines())
    assert all("says" in line for line in lines() if line["parameters"] is None)
