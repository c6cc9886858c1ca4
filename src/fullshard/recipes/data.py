"""Make sequences from the arguments: rank 0 makes the tokenizer and the token file, every rank maps the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import format_count
from fullshard.launch import RankEnvironment, run_on_main
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.corpus import Corpus, open_corpus
from fullshard.recipes.model import read_config
from fullshard.recipes.packing import PackedSequences, TokenFile, split_held_out, tokenise, unigram_entropy
from fullshard.recipes.tokenizer import count_ids, has_tokenizer, load_tokenizer, trained_tokenizer


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data that a run trains on.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        train: sequences to train on.
        held_out: sequences to evaluate on, maybe none.
        unigram_entropy: of the tokens trained on, nats per token.
        checksum: of the token file; equal checksums mean equal sequences.
        description: for people.
    """

    tokenizer: Any
    train: PackedSequences
    held_out: PackedSequences
    unigram_entropy: float
    checksum: int
    description: str


def prepare_data(arguments: TrainArguments, environment: RankEnvironment, check: Callable[[int], None]) -> TrainingData:
    """Prepare tokenizer and sequences of the run. All ranks call this; rank 0 writes to the output directory.

    Args:
        arguments: of the run.
        environment: the place of this process.
        check: called on rank 0 with the checksum of the tokens. If it raises, the tokenizer and the tokens of the run
            so far are still there: without them, and without its data, it could not go on any more.

    Raises:
        DataError: the data cannot be read, or is too small.
        ConfigError: the tokenizer cannot be used.
    """
    source, file, description = run_on_main(environment, lambda: _make_files(arguments, check))
    tokenizer = load_tokenizer(source)
    tokens, kept = split_held_out(file.open(), arguments.held_out, seq_len=arguments.seq_len)
    entropy = run_on_main(environment, lambda: unigram_entropy(tokens, count_ids(tokenizer)))
    return TrainingData(
        tokenizer=tokenizer,
        train=PackedSequences(tokens, arguments.seq_len),
        held_out=PackedSequences(kept, arguments.seq_len),
        unigram_entropy=entropy,
        checksum=file.crc32c,
        description=f"{description}: {format_count(file.documents)} document{'s' * (file.documents != 1)}, "
        f"{format_count(file.count)} tokens of {len(tokenizer)} kinds; {format_count(len(kept))} tokens are held out",
    )


def _make_files(arguments: TrainArguments, check: Callable[[int], None]) -> tuple[str, TokenFile, str]:
    """Return the tokenizer's place (the model's own, else one trained here), the token file, the corpus in words."""
    corpus = open_corpus(
        arguments.data,
        text_field=arguments.text_field,
        max_nbytes=None if arguments.max_data_mb is None else int(arguments.max_data_mb * 1e6),
    )
    vocab_size = arguments.vocab_size
    if arguments.model is not None:
        path = Path(arguments.model)
        if not path.exists() or (path.is_dir() and has_tokenizer(path)):
            return arguments.model, _make_tokens(arguments, corpus, arguments.model, check), corpus.description
        vocab_size = min(vocab_size, _config_vocab_size(arguments.model))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    directory = arguments.output_dir / "tokenizer"
    with trained_tokenizer(directory, corpus, vocab_size=vocab_size) as trained:
        file = _make_tokens(arguments, corpus, str(trained), check)
    return str(directory), file, corpus.description


def _make_tokens(arguments: TrainArguments, corpus: Corpus, source: str, check: Callable[[int], None]) -> TokenFile:
    tokenizer = load_tokenizer(source)

    def encode(texts: list[str]) -> list[list[int]]:
        # Packing cuts documents itself, so a warning about the model's longest input would be noise.
        ids: list[list[int]] = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return ids

    directory = arguments.output_dir / "data"
    directory.mkdir(parents=True, exist_ok=True)
    return tokenise(
        directory / "tokens.bin",
        corpus.documents(),
        encode,
        end_of_text=tokenizer.eos_token_id,
        vocab_size=count_ids(tokenizer),
        key=f"{corpus.fingerprint}/{_identity(source)}",
        check=check,
    )


def _config_vocab_size(model: str) -> int:
    size = getattr(read_config(model), "vocab_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"the configuration of {model!r} has no vocab_size")
    return size


def _identity(source: str) -> str:
    """Return a text that changes when a local tokenizer changes; a hub name stands for itself."""
    path = Path(source)
    if not path.is_dir():
        return source
    return ";".join(
        f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}"
        for file in sorted(path.iterdir())
        if file.suffix in (".json", ".model", ".txt")
    )
