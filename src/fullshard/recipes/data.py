"""Prepare the data of a run: documents -> tokens on disk -> sequences of equal length -> the batch of every step.

The documents are concatenated, each followed by the end-of-text token, and cut into sequences. A sequence may hold the
end of one document and the beginning of the next. The sequences of a step depend only on the seed and the step, not on
the number of ranks.
"""

import functools
import hashlib
import json
import math
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from fullshard.core.errors import ConfigError, DataError, plural
from fullshard.core.files import read_object, write_text
from fullshard.core.imports import import_extra
from fullshard.core.sizes import format_count
from fullshard.launch import run_on_main
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.model import read_config, transformers

END_OF_TEXT = "<|endoftext|>"
IGNORED = -100
"""Label of a position that is no target, torch's default for cross-entropy."""

_TEXT, _ROWS = {".txt", ".text", ".md", ".rst", ".py"}, {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DEFAULT_MAX_NBYTES = 12_000_000
"""Cap of the default corpus, so that tokenizing it stays a matter of seconds on every Python."""
_LONGEST_WORD = 1000
"""Bytes of a word that the tokenizer is trained on as a whole: it goes through a word again for each merge in it."""

Indices = npt.NDArray[np.int64]


def corpus_files(data: str | None) -> list[Path]:
    """Return the data files in a fixed, shuffled order: by default, those of Python's standard library."""
    root = Path(data or sysconfig.get_paths()["stdlib"])
    if root.is_file() or not root.exists():
        return [root] if root.exists() else []
    kinds, files = {".py"} if data is None else _TEXT | _ROWS.keys(), list[Path]()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        is_left_out = not _SKIPPED_DIRS.isdisjoint(parts) if data is None else any(part[0] == "." for part in parts)
        if path.suffix in kinds and not is_left_out and path.is_file():
            files.append(path)
    if not files:
        raise DataError(f"{root} contains no file with one of these suffixes: {', '.join(sorted(kinds))}")
    random.Random(0).shuffle(files)
    return files


def read_documents(files: Sequence[Path], data: str | None, text_field: str, max_nbytes: int | None) -> Iterator[str]:
    """Yield at most `max_nbytes` bytes of UTF-8 of documents, from files or from `owner/name:configuration`."""
    left = max_nbytes or (_DEFAULT_MAX_NBYTES if data is None else sys.maxsize)
    found = (text for file in files for text in _texts(file, text_field, "strict" if data else "replace"))
    for text in found if files else _rows(str(data), text_field):
        encoded = text.encode("utf-8")
        yield text if len(encoded) <= left else encoded[:left].decode("utf-8", errors="ignore")
        left -= len(encoded)
        if left <= 0:
            return


def _texts(path: Path, text_field: str, errors: str) -> Iterator[str]:
    if path.suffix in _ROWS:
        yield from _rows(_ROWS[path.suffix], text_field, path) if path.stat().st_size else ()
        return
    try:
        yield path.read_text(encoding="utf-8", errors=errors).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _rows(name: str, field: str, file: Path | None = None) -> Iterator[str]:
    """Stream the texts of a hub dataset or a local file, so that a limit on bytes also limits the download."""
    where, number = str(file or f"the hub dataset {name}"), 0
    datasets = import_extra("datasets", extra="hf", purpose=f"reading {where}")
    repository, _, configuration = name.partition(":")
    options = {"split": "train", "streaming": True} | ({} if file is None else {"data_files": str(file)})
    try:
        for number, row in enumerate(datasets.load_dataset(repository, configuration or None, **options), start=1):
            if not isinstance(text := row.get(field), str):
                got, there = type(text).__name__, ", ".join(map(repr, row))
                raise DataError(
                    f"{where}, row {number}: expected text in {field!r}, got {got} (available: {there})",
                    hint="select the field or column with --text-field; blank lines do not count as rows",
                )
            yield text
    except DataError:
        raise
    except Exception as error:  # the hub and each reader raise different errors
        hint = "check --data; repair a damaged file, or copy it again"
        raise DataError(f"{where} cannot be read after row {number}: {error}", hint=hint) from error


def load_tokenizer(source: str | Path) -> Any:
    """Load a tokenizer from a directory or the hub. Raise `ConfigError` if it has no end-of-text token."""
    try:
        tokenizer = transformers().AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer {str(source)!r} cannot be read: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer {str(source)!r} has no end-of-text token (eos_token)")
    return tokenizer


def train_tokenizer(documents: Iterator[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer, which encodes every text without loss and depends only on the documents."""
    library = transformers()  # raises an error that names the extra for both libraries
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.Split(Regex(f".{{{_LONGEST_WORD}}}"), "isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    tokenizer.pre_tokenizer = words
    return library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenize(path: Path, documents: Iterable[str], tokenizer: Any) -> dict[str, int]:
    """Write the tokens of the documents to a file, four bytes per token. Return their number and checksum."""
    checksum = count = number = 0
    written = filter(None, documents)
    with path.open("wb") as file:
        while texts := list(islice(written, 256)):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                block = np.asarray([*ids, tokenizer.eos_token_id], "<u4").tobytes()
                checksum = google_crc32c.extend(checksum, block)
                file.write(block)
                count, number = count + len(ids) + 1, number + 1
    if not number:
        raise DataError("the data contains no text")
    return {"count": count, "documents": number, "crc32c": checksum}


class PackedSequences:
    """Splits tokens into sequences of length L. Sequence i has tokens [i*L, (i+1)*L), and targets shifted by one."""

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def read(self, indices: Sequence[int] | Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels of the given sequences. Both are int64 tensors of shape (len(indices), seq_len)."""
        places = np.asarray(indices, np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        rows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch_of(step: int, count: int, *, batch_size: int, seed: int) -> Indices:
    """Return the indices of the sequences in a step's global batch, in order.

    `step` counts from 0 and `count` is the number of sequences. A seed and an epoch number determine the order of all
    sequences in that epoch. The epochs are concatenated, and step i takes positions [i*B, (i+1)*B), where B is the
    batch size. If fewer than B sequences remain at the end of an epoch, the batch continues in the next epoch, so that
    no sequence is omitted.
    """
    epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), count)
    return np.concatenate([_order(count, seed, epoch)[places[epochs == epoch]] for epoch in np.unique(epochs).tolist()])


@functools.lru_cache(maxsize=1)
def _order(count: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(count)


def micro_batches(
    sequences: PackedSequences, indices: Indices, *, rank: int, world_size: int, micro_batch_size: int | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's part of a batch as micro-batches.

    Their number and shape are the same on every rank, so that every rank runs the same collectives. If the batch does
    not divide evenly, rows without targets (labels `IGNORED`) fill the gap. These rows have weight 0 in the loss.
    """
    most = math.ceil(len(indices) / world_size)
    size = min(micro_batch_size or most, most)
    inputs, labels = sequences.read(np.array_split(indices, world_size)[rank])
    if missing := math.ceil(most / size) * size - len(inputs):
        inputs = torch.cat([inputs, inputs.new_zeros(missing, sequences.seq_len)])
        labels = torch.cat([labels, labels.new_full((missing, sequences.seq_len), IGNORED)])
    return list(zip(inputs.split(size), labels.split(size), strict=True))


class TrainingData(NamedTuple):
    """Holds the data that a run trains on. Equal checksums mean equal tokens. `held_out` may be empty."""

    tokenizer: Any
    train: PackedSequences
    held_out: PackedSequences
    checksum: int


def prepare_data(arguments: TrainArguments, accelerator: Any, check: Callable[[int], None]) -> TrainingData:
    """Prepare tokenizer and sequences on all ranks. Rank 0 calls `check` with the checksum of the tokens."""
    directory, source, made = run_on_main(accelerator.process.environment, lambda: _make_data(arguments, check))
    tokenizer, count, seq_len = load_tokenizer(source or directory / "tokenizer"), made["count"], arguments.seq_len
    tokens = np.memmap(directory / "tokens.bin", np.dtype("<u4"), mode="r", shape=(count,))
    kept = int(count * arguments.held_out)
    if arguments.held_out and kept < seq_len + 1:
        raise DataError(
            f"{arguments.held_out:.1%} of {count} tokens is {kept} tokens, but evaluation needs at least one sequence "
            f"of {seq_len}",
            hint="use more data, shorter sequences or --held-out 0",
        )
    name, numbers = arguments.data or "Python's standard library", map(format_count, (made["documents"], count, kept))
    accelerator.say("data: {}: {} documents, {} tokens; {} are held out".format(name, *numbers))
    train, held_out = (PackedSequences(part, seq_len) for part in np.split(tokens, [count - kept]))
    if len(train) < arguments.batch_size:
        raise DataError(
            f"the data has {plural(len(train), 'sequence')}, which is fewer than one batch of {arguments.batch_size}",
            hint="use more data, a smaller --batch-size or a shorter --seq-len",
        )
    return TrainingData(tokenizer, train, held_out, made["crc32c"])


def _make_data(arguments: TrainArguments, check: Callable[[int], None]) -> tuple[Path, str | None, dict[str, Any]]:
    """Tokenize the documents, after training a tokenizer if the model has none. Reuse files of an earlier run."""
    # Return their directory, the model's name if its tokenizer was used, and the counts and checksum of the tokens.
    most, vocab_size = arguments.max_data_mb, arguments.vocab_size
    files, source = corpus_files(arguments.data), _own_tokenizer(arguments.model)
    what = (arguments.data, arguments.text_field, None if most is None else int(most * 1e6))
    if arguments.model is not None and source is None:
        vocab_size = min(vocab_size, read_config(arguments.model).vocab_size)
    read = [*files, *(sorted(Path(source).glob("*.*[nlt]")) if source else [])]  # and .json, .model, .txt
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in read]
    key = hashlib.sha256(json.dumps([*what, source or vocab_size, stats]).encode()).hexdigest()
    directory = arguments.output_dir / f"data-{key[:16]}"
    if (directory / "tokens.json").is_file():
        made = read_object(directory / "tokens.json")
    else:
        directory.mkdir(exist_ok=True)
        if source is None:
            documents = read_documents(files, *what)
            train_tokenizer(documents, vocab_size=vocab_size).save_pretrained(str(directory / "tokenizer"))
        tokenizer = load_tokenizer(source or directory / "tokenizer")
        made = tokenize(directory / "tokens.bin", read_documents(files, *what), tokenizer)
        # This file is written last: it marks the other files as complete.
        write_text(directory / "tokens.json", json.dumps(made) + "\n")
    check(made["crc32c"])
    return directory, source, made


def _own_tokenizer(model: str | None) -> str | None:
    """Return `model` (a hub name or a directory) if it includes a tokenizer, and None otherwise."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    path = Path(model or "")
    is_bare = path.is_file() or (path.is_dir() and not any((path / name).is_file() for name in names))
    return None if model is None or is_bare else model
