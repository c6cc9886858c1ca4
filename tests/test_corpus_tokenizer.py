"""The tokenizer trained on the corpus: deterministic, loses nothing, kept while the corpus is the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fullshard.core.errors import ConfigError
from fullshard.recipes.corpus import open_corpus
from fullshard.recipes.tokenizer import (
    END_OF_TEXT,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
    trained_tokenizer,
)

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


def test_kept_while_corpus_and_size_are_the_same(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text("".join(TEXTS))
    directory = tmp_path / "tokenizer"

    def prepare(vocab_size: int) -> int:
        with trained_tokenizer(directory, open_corpus(str(data)), vocab_size=vocab_size) as made:
            assert len(load_tokenizer(made)) <= vocab_size
        return (directory / "tokenizer.json").stat().st_mtime_ns

    first = prepare(310)
    assert prepare(310) == first
    assert prepare(305) != first
    assert has_tokenizer(directory)
    with pytest.raises(ConfigError), trained_tokenizer(directory, open_corpus(str(data)), vocab_size=310) as made:
        assert made != directory
        raise ConfigError("what it is for fails")
    assert len(load_tokenizer(directory)) <= 305
    (directory / "trained_on.json").write_text("{")
    assert prepare(305) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "tokenizer"]


def test_what_was_not_trained_here_is_not_replaced(tmp_path: Path) -> None:
    data, directory = tmp_path / "a.txt", tmp_path / "tokenizer"
    data.write_text("".join(TEXTS))
    directory.mkdir()
    (directory / "vocab.json").write_text("mine")
    with (
        pytest.raises(ConfigError, match="is no tokenizer that `fullshard train` has made"),
        trained_tokenizer(directory, open_corpus(str(data)), vocab_size=310),
    ):
        pass
    assert (directory / "vocab.json").read_text() == "mine"


def test_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="cannot read a tokenizer"):
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
