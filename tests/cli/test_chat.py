"""`fullshard chat` talks to what was trained: a model, an adapter, with a chat template or without one.

pytest tests/cli/test_chat.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def test_a_folder_without_a_model_is_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "chat", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "contains no model: neither config.json nor adapter_config.json" in done.stderr
