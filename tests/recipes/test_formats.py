"""Datasets in the formats that people have become what TRL trains on, or an error shows the first wrong row.

pytest tests/recipes/test_formats.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.core.errors import ConfigError, DataError
from fullshard.recipes.sft import load_data
from fullshard.recipes.sft_arguments import read_arguments

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHAT = [USER, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief."}


def found(
    tmp_path: Path, *rows: dict[str, Any], kind: str = "jsonl", has_template: bool = True
) -> list[dict[str, Any]]:
    """What is trained on."""
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        import datasets

        datasets.Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", "m", "--dataset_name", str(path), "--output_dir", str(tmp_path)]
    data: list[dict[str, Any]] = load_data(read_arguments(words, print), has_template=has_template)[0].to_list()
    return data


SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ShareGPT": ({"id": "a", "conversations": SHARED}, {"messages": CHAT}),
    "ShareGPT, by messages": ({"messages": SHARED}, {"messages": CHAT}),
    "ShareGPT, with a system prompt": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *SHARED]},
        {"messages": [SYSTEM, *CHAT]},
    ),
    "Alpaca": ({"instruction": "2+2?", "input": "", "output": "4"}, {"messages": CHAT}),
    "Alpaca, with an input": (
        {"instruction": "Add", "input": "2 and 2", "output": "4"},
        {"messages": [{"role": "user", "content": "Add\n2 and 2"}, ANSWER]},
    ),
    "Alpaca, with a history": (
        {"instruction": "2+2?", "output": "4", "system": "Be brief.", "history": [["Hi", "Hello"]]},
        {"messages": [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, *CHAT]},
    ),
    "preferences, texts": (
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "completion": "4"},
    ),
    "preferences, whole texts": ({"chosen": "Human: 2+2? 4", "rejected": "Human: 2+2? 5"}, {"text": "Human: 2+2? 4"}),
    "preferences, whole chats": (
        {"prompt": "2+2?", "chosen": CHAT, "rejected": [USER, {"role": "assistant", "content": "5"}]},
        {"messages": CHAT},
    ),
    "preferences, answers": ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, {"messages": CHAT}),
    "preferences, answers to a text": (
        {"prompt": "2+2?", "chosen": [ANSWER], "rejected": [ANSWER]},
        {"messages": CHAT},
    ),
    "messages": ({"messages": CHAT, "source": "x"}, {"messages": CHAT}),
    "prompt and completion": ({"prompt": "2+2?", "completion": "4"}, {"prompt": "2+2?", "completion": "4"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, expected = ROWS[name]
    assert found(tmp_path, row, row) == [expected] * 2
    said = capsys.readouterr().err
    format_name = name.partition(",")[0]
    assert ("the format is" in said) == (format_name not in ("messages", "prompt and completion"))
    if "the format is" in said:
        assert f"the format is {format_name.replace('preferences', 'preference pairs')}" in said


def test_a_parquet_file_is_converted_as_well(tmp_path: Path) -> None:
    assert found(tmp_path, {"conversations": SHARED}, kind="parquet") == [{"messages": CHAT}]


def test_alpaca_without_a_chat_template_is_text(tmp_path: Path) -> None:
    row = {"instruction": "Add", "input": "2 and 2", "output": "4"}
    (made,) = found(tmp_path, row, has_template=False)
    assert made["completion"] == "4"
    assert made["prompt"].startswith("Below is an instruction that describes a task, paired with an input")
    assert made["prompt"].endswith("### Instruction:\nAdd\n\n### Input:\n2 and 2\n\n### Response:\n")
    (made,) = found(tmp_path, row | {"input": ""}, has_template=False)
    assert made["prompt"].startswith("Below is an instruction that describes a task. Write") and "Input" not in str(
        made
    )
    with pytest.raises(DataError, match="a system prompt or a history needs a chat template"):
        found(tmp_path, row | {"system": "Be brief."}, has_template=False)


def test_chats_need_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains chats, but the tokenizer has no chat template") as error:
        found(tmp_path, {"conversations": SHARED}, has_template=False)
    assert "--chat_template_format chatml" in str(error.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a role": (
        {"conversations": [{"from": "wizard", "value": "x"}]},
        "ShareGPT: unknown role 'wizard', expected one of",
    ),
    "no value": ({"conversations": [{"from": "human", "value": None}]}, "ShareGPT: user has the content None"),
    "no turns": ({"conversations": None}, "does not fit ShareGPT"),
    "no output": ({"instruction": "x", "output": ""}, "does not fit Alpaca: output is '', expected text"),
    "no question": ({"chosen": [ANSWER], "rejected": [ANSWER]}, "there is no question before the chosen answer"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "Alpaca": {"instruction": "x", "output": "y"},
    "ShareGPT": {"conversations": SHARED},
    "pref": {"chosen": CHAT, "rejected": CHAT},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_row_that_does_not_fit_is_shown(name: str, tmp_path: Path) -> None:
    row, expected = WRONG[name]
    right = next(value for value in RIGHT.values() if value.keys() == row.keys())
    with pytest.raises(DataError) as error:
        found(tmp_path, right, row, row)
    assert "row 2 does not fit" in str(error.value) and expected in str(error.value)
    assert "`messages` with `role` and `content`" in str(error.value)
