"""The tokenizer trained on the corpus: deterministic, loses nothing, kept while the corpus is the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fullshard.api import Accelerator
from fullshard.core.errors import ConfigError
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.data import END_OF_TEXT, load_tokenizer, prepare_data, train_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n", "class A:\n    pass\n"] * 20


def test_same_documents_give_the_same_tokenizer() -> None:
    one, two = (train_tokenizer(iter(TEXTS), vocab_size=320).backend_tokenizer.to_str() for _ in range(2))
    assert one == two


def test_every_text_round_trips() -> None:
    tokenizer = train_tokenizer(iter(TEXTS), vocab_size=300)
    for text in ("def g():\n\treturn 'ünïcode 🙂'\n", "  two  spaces  ", "\x00\x7f", " ,.!? 's"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    assert len(tokenizer) <= 300
    assert len(tokenizer("def f(x):")["input_ids"]) < len("def f(x):"), "nothing was merged"


def test_data_is_kept_while_what_it_is_made_from_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(Path(__file__).read_bytes())
    accelerator: Any = Accelerator(cpu=True)
    accelerator.say = print

    def prepare(vocab_size: int) -> tuple[int, int]:
        settings = {"data": str(tmp_path / "a.txt"), "output_dir": tmp_path / "out", "vocab_size": vocab_size}
        seen: list[int] = []
        data = prepare_data(TrainArguments.of(settings | {"seq_len": 8}), accelerator, seen.append)
        assert len(data.tokenizer) <= vocab_size and seen == [data.checksum]
        return data.checksum, max(path.stat().st_mtime_ns for path in (tmp_path / "out").glob("data-*/tokens.bin"))

    (tmp_path / "out").mkdir()
    first = prepare(310)
    assert prepare(310) == first
    other = prepare(300)
    assert other[0] != first[0]
    assert prepare(310)[0] == first[0]
    for path in (tmp_path / "out").glob("data-*/tokens.json"):
        path.unlink()  # as if a kill had come before it
    assert prepare(300) == (other[0], max(other[1], prepare(300)[1]))
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer .* cannot be read"):
        load_tokenizer(tmp_path)


def test_a_file_without_a_space_is_no_single_word() -> None:
    """Training goes through a word for each merge in it: no word is as long as a file."""
    chance = random.Random(0)
    text = "".join(chance.choice("abcdefghij") for _ in range(60_000))
    tokenizer = train_tokenizer(iter([text]), vocab_size=400)
    assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab" * 5_000)[0][1] == (0, 10_000)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    pieces = train_tokenizer(iter([text[i : i + 1000] for i in range(0, len(text), 1000)]), vocab_size=400)
    assert pieces.get_vocab() == tokenizer.get_vocab()  # as if there were so many words
