"""The tokenizer of a run: the model's own, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.files import read_json
from fullshard.core.imports import import_extra
from fullshard.recipes.corpus import Corpus

END_OF_TEXT = "<|endoftext|>"
_LONGEST_WORD = 1000
"""Bytes of a word that the tokenizer is trained on as a whole."""
_ORIGIN_FILE = "trained_on.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: Path) -> bool:
    """Return whether a Hugging Face directory brings a tokenizer."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(source: str | Path) -> Any:
    """Return a tokenizer from a directory or the hub.

    Raises:
        ConfigError: there is none that can be read, or it has no end-of-text token to put between documents.
    """
    library = transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a tokenizer from {str(source)!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {str(source)!r} has no end-of-text token (eos_token)")
    return tokenizer


def count_ids(tokenizer: Any) -> int:
    """Return one more than its highest token id, which is more than its size where ids are left out."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(len(tokenizer), 1 + max(ids.values()))


@contextlib.contextmanager
def trained_tokenizer(directory: Path, corpus: Corpus, *, vocab_size: int) -> Iterator[Path]:
    """Give the directory of a tokenizer that was trained on the corpus. Called on one rank.

    It is `directory` if the one there was trained on the same. Otherwise it is another, which takes the place of
    `directory` when the block ends well, and is removed if it does not.

    Raises:
        ConfigError: what is at `directory` was not trained here.
    """
    origin = {"corpus": corpus.fingerprint, "vocab_size": vocab_size}
    record = directory / _ORIGIN_FILE
    if os.path.lexists(directory) and not record.is_file():
        raise ConfigError(
            f"{directory} is no tokenizer that `fullshard train` has made, and is not replaced by one",
            hint="use another --output-dir, or move it away",
        )
    if _recorded(record) == origin:
        yield directory
        return
    temporary, stale = (directory.with_name(f".{directory.name}.{os.getpid()}{end}") for end in ("", ".old"))
    try:
        train_tokenizer(corpus.documents(), vocab_size=vocab_size).save_pretrained(str(temporary))
        (temporary / _ORIGIN_FILE).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        yield temporary
        if directory.exists():
            directory.rename(stale)
        temporary.rename(directory)
    finally:
        for left in (temporary, stale):
            shutil.rmtree(left, ignore_errors=True)


def _recorded(record: Path) -> Any:
    """Return the record of a tokenizer's training data; None if there is none, or it is damaged."""
    try:
        return read_json(record)
    except (OSError, ValueError):
        return None


def train_tokenizer(documents: Iterator[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer: it encodes every text without loss. The same documents give the same one."""
    library = transformers()
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The trainer goes through a word again for each merge in it. What is called a word may be a file without a space.
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f".{{{_LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = words
    return library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def transformers() -> Any:
    """Return the library, if it is installed."""
    return import_extra("transformers", extra="hf", purpose="training a language model")
