"""What `fullshard plan` says beside one plan: cost, other devices, one setting's values.

pytest tests/plan/test_plan_alternatives.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.core.errors import ConfigError
from fullshard.plan.alternatives import Alternative, elsewhere, read_tokens, swept
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model

MODEL, JOB, CLUSTER = load_model("GPT-2")[0], Job.of({"seq_len": 512}), parse_cluster("8xA100")


def test_hours_and_money() -> None:
    plan = evaluate(MODEL, JOB, CLUSTER)
    one = Alternative("x", plan, 2.0)
    hours = one.hours(1e9) or 0.0
    assert hours == pytest.approx(1e9 / plan.time.tokens_per_second / 3600)
    assert one.money(1e9) == pytest.approx(hours * 8 * 2.0)
    assert one.hours(None) is None and one.money(None) is None and Alternative("x", plan).money(1e9) is None


@pytest.mark.parametrize(("text", "tokens"), [("15e9", 15e9), ("300B", 3e11), ("1.5t", 1.5e12), ("1000", 1000)])
def test_numbers_of_tokens(text: str, tokens: float) -> None:
    assert read_tokens(text) == tokens


def test_other_devices_with_their_prices() -> None:
    found = elsewhere(MODEL, JOB, ["8xH100@3.5, 16xA100", "4 L40S"], price=1.0)
    assert [(str(each.plan.cluster), each.price) for each in found] == [
        ("8 x H100 in 1 host", 3.5),
        ("16 x A100-80 in 2 hosts", 1.0),
        ("4 x L40S in 1 host", 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seq-len=256..1024", ["256", "512", "1024"]),
        ("micro_batch=1,3", ["1", "3"]),
        ("strategy=FULL_SHARD,NO_SHARD", ["FULL_SHARD", "NO_SHARD"]),
        ("devices=8..16", ["8", "16"]),
    ],
)
def test_values_of_a_setting(text: str, values: list[str]) -> None:
    found = swept(MODEL, JOB, CLUSTER, text, price=None)
    assert [each.label for each in found] == values
    assert len({(each.plan.memory.needed, each.plan.time.total) for each in found}) == len(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("seq-len", "0 values"), ("seqlen=1..2", "no setting"), ("seq-len=4..1", "0 values"), ("seq-len=x", "seq_len")],
)
def test_mistakes_in_a_sweep(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        swept(MODEL, JOB, CLUSTER, text, price=None)


def test_mistakes_in_prices_and_tokens() -> None:
    for text, expected in (
        ("8xH100@cheap", "no price"),
        ("8xH100@-1", "price of 0 or more, got -1"),
        ("8xH100@inf", "got inf"),
        ("8xH100@nan", "got nan"),
        ("8xH1000@1", "H1000"),
    ):
        with pytest.raises(ConfigError, match=expected):
            elsewhere(MODEL, JOB, [text], price=None)
    for text in ("many", "0", "-3B", "1e999", "1e308T", "nan"):
        with pytest.raises(ConfigError, match="tokens"):
            read_tokens(text)


def test_the_command_says_it_in_tables_and_json(tmp_path: Path) -> None:
    base = ["plan", "-m", "GPT-2", "-d", "8xA100", "--tokens", "10B", "--price", "2", "--compare", "8xH100@3"]
    path = tmp_path / "sweep.svg"
    CliRunner().invoke(app, [*base, "--sweep", "devices=8..16", "--plot", str(path)])
    assert "GPT-2 on A100-80: each rank keeps its batch" in path.read_text(encoding="utf-8")
    path = tmp_path / "sweep.png"
    done = CliRunner().invoke(app, [*base, "--sweep", "seq-len=512..1024", "--plot", str(path)])
    assert done.exit_code == 0, done.output
    for word in ("time and cost", "side by side", "one setting", "hours", "money", "8 x H100"):
        assert word in done.output
    assert path.stat().st_size > 10_000
    values = json.loads(CliRunner().invoke(app, [*base, "--json"]).stdout)
    assert [row["kind"] for row in values["compare"]] == ["A100-80", "H100"]
    assert values["cost"][0]["money"] == pytest.approx(values["cost"][0]["hours"] * 8 * 2)
    wrong = CliRunner().invoke(app, ["plan", "-m", "GPT-2", "-d", "8xA100", "--price", "2"])
    assert wrong.exit_code != 0 and "--tokens" in f"{wrong.output}{wrong.exception}"


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_files_and_settings_side_by_side(tmp_path: Path) -> None:
    """Without --config the first file is the plan above; flags are in all of them; what differs is said."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("sharding:\n  activation_checkpointing: true\nlaunch:\n  num_processes: 8\n")
    second.write_text("sharding:\n  strategy: SHARD_GRAD_OP\nlaunch:\n  num_processes: 16\n  num_machines: 2\n")
    base = ("-m", "Llama-3.1-8B", "-d", "H100", "--seq-len", "1024", "--compare", str(first), str(second))
    done = ask(*base, "micro-batch=2,devices=8xH200", "4xB200", "--json")
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    rows = values["compare"]
    assert [row["what"] for row in rows] == ["a.yaml", "b.yaml", "micro-batch=2, devices=8xH200", "4 x B200 in 1 host"]
    assert [row["devices"] for row in rows] == [8, 16, 8, 4]
    differ = {"strategy": "SHARD_GRAD_OP", "checkpointing": "none"}
    assert [row["settings"] for row in rows] == [{}, differ, {"micro_batch": 2}, {}]
    assert values["job"]["seq_len"] == 1024 and values["job"]["checkpointing"] == "full"
    assert f"b.yaml: {', '.join(f'{name} {value}' for name, value in differ.items())}" in ask(*base).output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["8xA100"], "belongs to no option"),
        (["--compare", "none.yaml"], "none.yaml"),
        (["--compare", ""], "--compare: there is nothing"),
        (["--compare", "micro-batch=2,fast"], "'fast' is no setting"),
        (["--compare", "sped=2"], "unknown setting 'sped'"),
    ],
)
def test_mistakes_in_what_is_compared(words: list[str], expected: str) -> None:
    done = ask("-m", "GPT-2", "-d", "8xA100", *words)
    assert done.exit_code != 0 and expected in f"{done.output}{done.exception}"
