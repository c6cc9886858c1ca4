"""The arguments of `fullshard sft`: errors at the lines of a file, the help page, and what they do to the data.

pytest tests/recipes/test_sft_arguments.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from fullshard.core.errors import ConfigError, DataError, FullshardError
from fullshard.recipes.sft_arguments import FLAGS, read_arguments

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def in_file(path: Path, text: str, *words: str) -> Any:
    """What a file says whose first four lines are right."""
    common = f"model_name_or_path: m\ndataset_name: {path}\noutput_dir: o\nreport_to: none\n"
    (path / "run.yaml").write_text(common + text)
    said: list[str] = []
    arguments = read_arguments([str(path / "run.yaml"), *words], said.append)
    return SimpleNamespace(**arguments._asdict(), said=said)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nlearning_rat: 1", "6:1: unknown option 'learning_rat'; did you mean learning_rate?"),
        ("shardin: {}", "5:1: unknown option 'shardin'; did you mean sharding?"),
        ("num_processes: 2", "5:1: unknown option 'num_processes'; put it in the section launch of a file"),
        ("learning_rate: fast", "5:1: invalid settings: --learning_rate: invalid float value: 'fast'"),
        ("optim: adamv", "5:1: invalid settings: --optim: invalid choice: 'adamv'"),
        ("chat_template_format: alpaca", "5:1: invalid settings: --chat_template_format: invalid choice: 'alpaca'"),
        ("max_steps: [1, 2]", "5:1: invalid settings: --max_steps takes one value, got [1, 2]"),
        ("fp16: true\nseed: 1\nbf16: true", "5:1 and FILE:7:1: invalid settings: At most one of fp16 and bf16"),
        ("max_seq_len: 3\nmax_length: 4", "5:1 and FILE:6:1 contradict each other: max_seq_len: 3, max_length: 4"),
        ("load_best_model_at_end: true", "5:1: invalid settings: --load_best_model_at_end requires the save and eval"),
        ("chat_template_format: zephyr\nchat_template_path: a.jinja", "5:1 and FILE:6:1: --chat_template_format and"),
        ("optim: muon\noptim_args: a=1", "5:1 and FILE:6:1: --optim_args is only for Transformers' own"),
        ("chat_template_path: ./a.jinja", "5:1: --chat_template_path: the file or directory './a.jinja' does not"),
        ("use_peft: true\nchat_template_path: a/b", "5:1 and FILE:6:1: --use_peft needs a .jinja file"),
        ("merge_adapter: true", "5:1: --merge_adapter needs an adapter\nhint: add --use_peft True"),
        ("trust_remote_code: true", "5:1: --trust_remote_code is not supported"),
        ("model_init_kwargs: {a: 1}", "5:1: --model_init_kwargs is not supported"),
    ],
)
def test_an_error_in_a_file_names_its_lines(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        in_file(tmp_path, text)
    file = str(tmp_path / "run.yaml")
    assert str(error.value).startswith(f"{file}:" + expected.replace("FILE", file))


def test_a_missing_dataset_is_an_error_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset_name: ./nothing.jsonl\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2:1: --dataset_name: the file .*nothing.jsonl' does not exist"):
        read_arguments([str(tmp_path / "run.yaml")], print)


def test_a_section_of_a_recipe_has_lines_as_well(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("plan: {model: m}\nsft:\n  model_name_or_path: m\n  sed: 1\n")
    with pytest.raises(ConfigError, match=r"run.yaml:4:3: unknown option 'sed'; did you mean seed\?"):
        read_arguments([str(tmp_path / "run.yaml")], print)


def test_flags_replace_what_the_file_says(tmp_path: Path) -> None:
    text = "learning_rate: 1.0\nmax_length: 5\nbf16: true\nrun_name: --odd\n"
    training = in_file(tmp_path, text, "--learning-rate", "2", "--max_seq_len=7", "--fp16", "--bf16", "False").training
    assert (training.learning_rate, training.max_length, training.bf16, training.fp16) == (2, 7, False, True)
    assert training.run_name == "--odd"
    with pytest.raises(ConfigError) as error:  # the line is not to blame
        in_file(tmp_path, "fp16: true\nbf16: false\n", "--bf16", "True")
    assert str(error.value).startswith(f"{tmp_path / 'run.yaml'}:5:1: invalid settings: At most one of")


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    said = in_file(tmp_path, "do_train: true\ndo_eval: true\nhub_always_push: false\nloss_chunk: 3\n").said
    assert [line.partition(" has no effect: ")[0] for line in said] == [
        "--loss_chunk",
        "--do_train",
        "--hub_always_push",
    ]
    assert not in_file(tmp_path, "").said


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--help-all"], 0), ([], 2)])
def test_the_help_page_has_groups(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    from fullshard.cli.sft import _LAUNCH, sft

    with pytest.raises(typer.Exit) as ended:
        sft(cast("Any", SimpleNamespace(args=words)))
    page = capsys.readouterr().out
    assert ended.value.exit_code == code and max(map(len, page.splitlines())) <= 80
    listed = re.findall(r"^  --(\w+)", page, re.MULTILINE)
    grouped = [name for texts in FLAGS["help"].values() for name in texts]
    assert listed[: len(grouped)] == grouped and len(set(grouped)) == len(grouped) and set(_LAUNCH) <= set(grouped)
    assert [title for title in FLAGS["help"] if f"\n{title}:\n" in page] == list(FLAGS["help"])
    assert ("deepspeed" in listed) == (words == ["--help-all"])


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def split(data: Path, *words: str) -> tuple[Any, Any]:
    from fullshard.recipes.sft import load_data

    common = ["--model_name_or_path", "m", "--output_dir", "o", "--report_to", "none", "--dataset_name", str(data)]
    return load_data(read_arguments([*common, *words], print))


def test_rows_are_held_out_for_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"row {number}" for number in range(20)]
    data = write(tmp_path / "data.jsonl", *({"text": text} for text in texts))
    train, test = split(data, "--eval_split_size", "0.25")
    assert (len(train), len(test)) == (15, 5) and sorted([*train["text"], *test["text"]]) == sorted(texts)
    said = capsys.readouterr().err
    assert f"{data}, split train: 20 rows with text\n" in said
    assert "5 rows are held out for evaluation, 15 remain" in said
    assert split(data, "--eval_split_size", "5")[1]["text"] == split(data, "--eval_split_size", "0.25")[1]["text"]
    assert split(data, "--eval_split_size", "5", "--seed", "1")[1]["text"] != test["text"]
    with pytest.raises(ConfigError, match="--eval_split_size 20 does not fit 20 rows"):
        split(data, "--eval_split_size", "20")
    with pytest.raises(ConfigError, match=r"has no split 'test', only train\nhint: .*--eval_split_size"):
        split(data, "--eval_strategy", "epoch")


def test_held_out_rows_are_evaluated_each_epoch_unless_a_flag_says_when(tmp_path: Path) -> None:
    assert in_file(tmp_path, "").training.eval_strategy == "no"
    assert in_file(tmp_path, "eval_split_size: 5\n").training.eval_strategy == "epoch"
    assert in_file(tmp_path, "eval_split_size: 5\nevaluation_strategy: steps\n").training.eval_strategy == "steps"


def test_held_out_rows_leave_the_test_split_alone(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", *({"text": f"{name} {number}"} for number in range(8)))
    train, test = split(tmp_path, "--eval_split_size", "2")
    assert len(train) == 6 and [text[:5] for text in test["text"]] == ["train", "train"]


def test_a_template_in_a_file_makes_chats_fit(tmp_path: Path) -> None:
    """The template is set later, by TRL, so the check of the data must know that there will be one."""
    from fullshard.recipes import sft

    write(tmp_path / "data.jsonl", CHAT)
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    tokenizer = SimpleNamespace(chat_template=None)
    common = ["--model_name_or_path", "m", "--output_dir", "o", "--report_to", "none"]
    common += ["--dataset_name", str(tmp_path / "data.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "load_tokenizer", lambda arguments: (tokenizer, False))
        with pytest.raises(ConfigError, match=r"contains chats, but .* no chat template\nhint: .*--chat_template_path"):
            sft.make_trainer(read_arguments(common, print))
        with pytest.raises(FullshardError, match="m is not a directory"):  # the model, which comes after the data
            sft.make_trainer(read_arguments([*common, "--chat_template_path", str(tmp_path / "a.jinja")], print))


def test_a_template_that_does_not_mark_the_assistant(tmp_path: Path) -> None:
    """The error names the line of the file, before data and model are read. Templates that mark, or TRL marks, do."""
    from trl import chat_template_utils as known

    from fullshard.recipes import sft

    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\noutput_dir: o\nassistant_only_loss: true\ndataset_name: none\n")
    tokenizer = SimpleNamespace(name_or_path="m", chat_template="{{ messages }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "load_tokenizer", lambda arguments: (tokenizer, False))
        patch.setattr(known, "supports_tool_calling", lambda tokenizer: False)
        expected = r"^.*run\.yaml:3:1.*: the chat template of m does not mark the .*\nhint: use a --chat_template_path"
        with pytest.raises(ConfigError, match=expected):
            sft.make_trainer(read_arguments([str(file)], print))
        tokenizer.chat_template = known.llama3_chat_template
        with pytest.raises(DataError, match="none cannot be read"):  # the data, which comes after the template
            sft.make_trainer(read_arguments([str(file)], print))
        (tmp_path / "a.jinja").write_text("{% generation %}{{ messages }}{% endgeneration %}")
        with pytest.raises(DataError, match="none cannot be read"):
            sft.make_trainer(read_arguments([str(file), "--chat_template_path", str(tmp_path / "a.jinja")], print))


def test_an_unreachable_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fullshard.core.imports import require_hub
    from fullshard.recipes import sft

    constants = sft.huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sft.datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the port of `discard`
    require_hub(sft.say, "/", "/tmp")
    assert not constants.HF_HUB_OFFLINE
    require_hub(sft.say, "/", "someone/chats")
    assert constants.HF_HUB_OFFLINE and sft.datasets.config.HF_HUB_OFFLINE
    assert (
        "http://127.0.0.1:9 cannot be reached, so only local and downloaded files are used" in capsys.readouterr().err
    )
