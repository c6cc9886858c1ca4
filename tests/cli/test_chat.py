"""`fullshard chat` talks to what was trained: a model, an adapter, with a chat template or without one.

pytest tests/cli/test_chat.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fullshard.checkpoint.offline.merged import write_merged
from fullshard.cli.chat import chat
from fullshard.core.errors import ConfigError
from tests.trainers import OFFLINE, build

FIRST = ["<end>", "<unk>", "a", "b", "c", "user", "assistant", "system"]
WORDS = {word: number for number, word in enumerate([*FIRST, *(f"w{i}" for i in range(len(FIRST), 256))])}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The output of a run: a small Llama with random weights."""
    torch.manual_seed(0)
    network: Any = build()
    network.save_pretrained(tmp_path / "export")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "export")
    return tmp_path


def talk(place: Path, lines: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[dict[str, str]]]:
    """What the template gets, once for each line."""
    import io

    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    seen: list[Any] = []
    real = PreTrainedTokenizerFast.apply_chat_template

    def apply(self: Any, turns: Any, **further: Any) -> Any:
        seen.append([dict(turn) for turn in turns])
        return real(self, turns, **further)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", apply)
    defaults = {"system": None, "temperature": 0.0, "top_p": 0.9, "max_new_tokens": 3, "seed": 0}
    chat(str(place), **(defaults | options))
    return seen


def with_template(model: Path) -> None:
    (model / "export" / "chat_template.jinja").write_text(TEMPLATE)


def test_a_talk_keeps_what_was_said(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    with_template(model)
    first, second = talk(model, "a b\nc\n\nnot read\n", monkeypatch, system="b")
    assert first == [{"role": "system", "content": "b"}, {"role": "user", "content": "a b"}]
    assert second[:2] == first and [turn["role"] for turn in second[2:]] == ["assistant", "user"]
    assert second[2]["content"] in capfd.readouterr().out  # the answer was streamed


def test_an_unreachable_hub_is_said_before_slow_imports(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the port of `discard`

    def slow(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError(capsys.readouterr().err)

    monkeypatch.setattr(sys.modules[chat.__module__], "import_extra", slow)
    with pytest.raises(ModuleNotFoundError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        chat("someone/model")


def test_a_model_without_a_template_continues_the_text(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert talk(model, "a b\n", monkeypatch) == []
    printed = capfd.readouterr()
    assert "has no chat template and continues the text" in printed.err and printed.out.strip()
    with pytest.raises(ConfigError, match="--system has no effect"):
        talk(model, "a\n", monkeypatch, system="b")


def test_an_adapter_is_loaded_on_its_model(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(model / "export")
    talk(model, "a b\n", monkeypatch, max_new_tokens=8)
    plain = capfd.readouterr().out
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, target_modules="all-linear", r=4))
    adapted.save_pretrained(model / "adapter")
    AutoTokenizer.from_pretrained(model / "export").save_pretrained(model / "adapter")
    talk(model / "adapter", "a b\n", monkeypatch, max_new_tokens=8)
    assert capfd.readouterr().out not in ("", plain)


@pytest.mark.parametrize("held", [2, [2, 7]])
def test_an_adapters_tokenizer_says_where_an_answer_ends(
    held: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / "export" / name).read_text())
        (model / "export" / name).write_text(json.dumps({**settings, "eos_token_id": held, "temperature": 0.5}))
    base = AutoModelForCausalLM.from_pretrained(model / "export")
    tokenizer = AutoTokenizer.from_pretrained(model / "export")
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, target_modules="all-linear", r=4))
    adapted.save_pretrained(model / "adapter")
    inputs = tokenizer("a b", return_tensors="pt")["input_ids"]
    answer = adapted.eval().generate(input_ids=inputs, do_sample=False, max_new_tokens=8)[0, inputs.shape[1] :].tolist()
    end = answer[2]
    told = answer[: answer.index(end)]
    assert {*answer[len(told) :]} != {end}  # so that more is said if it does not stop
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.save_pretrained(model / "adapter")
    talk(model / "adapter", "a b\n", monkeypatch, max_new_tokens=8)
    assert capfd.readouterr().out.split() == tokenizer.convert_ids_to_tokens(told)

    write_merged(model / "export", model / "adapter", model / "merged")
    config, generation = (
        json.loads((model / "merged" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    ends = [end, *held] if isinstance(held, list) else [end, held]
    assert generation["eos_token_id"] == ends and generation["temperature"] == 0.5
    assert config["eos_token_id"] == (ends if isinstance(held, list) else end)
    talk(model / "merged", "a b\n", monkeypatch, max_new_tokens=8)
    assert capfd.readouterr().out.split() == tokenizer.convert_ids_to_tokens(told)


def test_a_missing_base_model_is_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(base_model_name_or_path=str(tmp_path / "gone"), task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"cannot load the model '.*adapter': .*gone(?s:.*)hint: set base_model_na"):
        talk(tmp_path / "adapter", "", monkeypatch)


def test_a_folder_without_a_model_is_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "chat", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "contains no model: neither config.json nor adapter_config.json" in done.stderr


def test_an_unreachable_hub_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the port of `discard`
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"cannot load the model 'someone/model'(.|\n)*hint: pass the directory of"):
        talk(Path("someone/model"), "", monkeypatch)
    assert time.monotonic() - began < 20  # Transformers alone tries for 42 seconds and more
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
