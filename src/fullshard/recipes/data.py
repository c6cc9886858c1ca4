"""The data of a run: documents -> tokens on disk -> sequences of equal length -> the batch of every step.

Documents are joined with the end-of-text token after each and cut into sequences; one may hold the end of a document
and the beginning of the next. A step's sequences follow from the seed and the step alone, at any number of ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import random
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from fullshard.checkpoint.storage import committed_directory
from fullshard.core.errors import ConfigError, DataError
from fullshard.core.files import read_object
from fullshard.core.imports import import_extra
from fullshard.core.paths import looks_like_path
from fullshard.core.sizes import format_count
from fullshard.launch import RankEnvironment, run_on_main
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.model import count_ids, read_config, transformers

END_OF_TEXT = "<|endoftext|>"
IGNORED = -100
"""Label of a position that is no target, torch's default for cross-entropy."""

_TEXT, _ROWS = {".txt", ".text", ".md", ".rst", ".py"}, {".jsonl": "json", ".parquet": "parquet"}
_SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DEFAULT_MAX_NBYTES = 12_000_000
"""Cap of the default corpus, so that tokenising it stays a matter of seconds on every Python."""
_LONGEST_WORD = 1000
"""Bytes of a word that the tokenizer is trained on as a whole: it goes through a word again for each merge in it."""
_ENCODE_CHARS = 1 << 22
"""Characters handed to the tokenizer at a time: enough to keep all its threads busy, little memory."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A source of documents: the same ones in the same order on every call, and a text that changes when they may."""

    description: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]


def open_corpus(data: str | None, *, text_field: str = "text", max_nbytes: int | None = None) -> Corpus:
    """Return the corpus that `data` names: a file, a directory or a hub dataset (`owner/name:configuration`).

    A file of text is one document, and so is a row of JSONL or Parquet. Files of a directory come in an order that is
    shuffled but always the same, so that the end of the corpus, which is held out, is like its beginning.

    Args:
        data: None is the standard library of this Python.
        text_field: field or column with the text, in rows.
        max_nbytes: bytes of UTF-8 text to stop after; the last document is cut there.

    Raises:
        DataError: nothing is there, or nothing readable. Faults inside files are raised while documents are read.
        MissingExtraError: rows without the `hf` extra.
    """
    path = Path(data or sysconfig.get_paths()["stdlib"])
    if data is not None and not path.exists():
        if looks_like_path(data):
            raise DataError(f"no file or directory {data!r}", hint="check --data")
        rows, found, description = _open_rows(data), [("hub", 0, 0)], f"hub dataset {data}"

        def documents() -> Iterator[str]:
            return _texts(rows, text_field, data)

    else:
        files = [path] if path.is_file() else sorted(_files_in(path, is_default=data is None))
        if not files:
            raise DataError(f"{path} has no file that ends in one of {', '.join(sorted(_TEXT | _ROWS.keys()))}")
        random.Random(0).shuffle(files)
        found = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        max_nbytes = max_nbytes or (_DEFAULT_MAX_NBYTES if data is None else None)
        size = sum(nbytes for _, nbytes, _ in found) / 1e6
        description = f"{data or 'the standard library of this Python'} ({len(files)} files, {size:.1f} MB)"
        errors = "strict" if data else "replace"  # nobody can mend the standard library

        def documents() -> Iterator[str]:
            return (one for file in files for one in _documents(file, text_field, errors))

    if max_nbytes is not None:
        description += f", the first {max_nbytes / 1e6:g} MB"
    fingerprint = hashlib.sha256(json.dumps([data, found, text_field, max_nbytes]).encode()).hexdigest()
    return Corpus(description, fingerprint, lambda: _capped(documents(), max_nbytes))


def _files_in(root: Path, *, is_default: bool) -> Iterator[Path]:
    """Yield the files to read in a directory and below, but for hidden ones."""
    kinds = {".py"} if is_default else _TEXT | _ROWS.keys()
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        is_left_out = not _SKIPPED_DIRS.isdisjoint(parts) if is_default else any(part[0] == "." for part in parts)
        if path.suffix in kinds and not is_left_out and path.is_file():
            yield path


def _documents(path: Path, text_field: str, errors: str) -> Iterator[str]:
    if path.suffix in _ROWS:
        if path.stat().st_size:
            yield from _texts(_open_rows(_ROWS[path.suffix], path), text_field, str(path))
        return
    if path.suffix == ".json":
        raise DataError(f"{path}: a .json file is no list of documents", hint="write an object a line to a .jsonl file")
    try:
        yield path.read_text(encoding="utf-8", errors=errors).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _open_rows(name: str, file: Path | None = None) -> Any:
    """Return the rows of a hub dataset, or of a file of that kind; streamed, so that a cap reads no more."""
    datasets = import_extra("datasets", extra="hf", purpose=f"reading {file or f'the hub dataset {name!r}'}")
    repository, _, configuration = name.partition(":")
    files = {} if file is None else {"data_files": str(file)}
    try:
        return datasets.load_dataset(repository, configuration or None, split="train", streaming=True, **files)
    except Exception as error:
        if file is not None:
            raise DataError(f"{file} cannot be read: {error}", hint="mend or copy it again") from error
        raise DataError(
            f"no file or directory {name!r}, and no hub dataset of that name could be opened: {error}",
            hint="check --data, and the network if it is a hub name",
        ) from error


def _texts(rows: Iterable[dict[str, Any]], field: str, where: str) -> Iterator[str]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            if not isinstance(text := row.get(field), str):
                got, there = type(text).__name__, ", ".join(map(repr, row))
                raise DataError(
                    f"{where}, row {number}: expected text in {field!r}, got {got} (there are: {there})",
                    hint="name the field or column with --text-field; blank lines do not count as rows",
                )
            yield text
    except DataError:
        raise
    except Exception as error:  # each reader has errors of its own
        raise DataError(f"{where} cannot be read after row {number}: {error}", hint="mend or copy it again") from error


def _capped(documents: Iterator[str], max_nbytes: int | None) -> Iterator[str]:
    left = max_nbytes
    for document in documents:
        if left is None:
            yield document
            continue
        encoded = document.encode("utf-8")
        yield encoded[:left].decode("utf-8", errors="ignore")
        left -= len(encoded)
        if left <= 0:
            return


def load_tokenizer(source: str | Path) -> Any:
    """Return a tokenizer from a directory or the hub.

    Raises:
        ConfigError: there is none that can be read, or it has no end-of-text token to put between documents.
    """
    try:
        tokenizer = transformers().AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a tokenizer from {str(source)!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {str(source)!r} has no end-of-text token (eos_token)")
    return tokenizer


def train_tokenizer(documents: Iterator[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer: it encodes every text without loss. The same documents give the same one."""
    library, tokenizers = transformers(), importlib.import_module("tokenizers")
    tokenizer, kinds = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    words = kinds.ByteLevel(add_prefix_space=False)
    pieces = kinds.Split(tokenizers.Regex(f".{{{_LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer, tokenizer.decoder = kinds.Sequence([words, pieces]), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(kinds.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = words
    return library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenise(path: Path, documents: Iterable[str], tokenizer: Any) -> dict[str, Any]:
    """Write the tokens of documents, little-endian; return their dtype, how many there are, and their checksum.

    Raises:
        DataError: there is no text at all.
    """
    dtype = "uint16" if count_ids(tokenizer) <= 2**16 else "uint32"
    checksum = count = number = 0
    with path.open("wb") as file:
        for texts in _batches(documents):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                block = np.asarray([*ids, tokenizer.eos_token_id], np.dtype(dtype).newbyteorder("<")).tobytes()
                checksum = google_crc32c.extend(checksum, block)
                file.write(block)
                count, number = count + len(ids) + 1, number + 1
    if not number:
        raise DataError("the data holds no text")
    return {"dtype": dtype, "count": count, "documents": number, "crc32c": checksum}


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for document in filter(None, documents):
        batch.append(document)
        chars += len(document)
        if chars >= _ENCODE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class PackedSequences:
    """The sequences of a row of tokens. Sequence i is tokens [i*L, (i+1)*L], the targets one token later."""

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def read(self, indices: Sequence[int] | Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels of the given sequences, each an int64 tensor of shape (len(indices), seq_len)."""
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def unigram_entropy(self) -> float:
        """Return the nats per token of the best model that knows only how frequent each token is."""
        counts = np.zeros(1 + int(self.tokens.max()), dtype=np.int64)
        for part in np.array_split(self.tokens, 64):
            counts += np.bincount(part, minlength=len(counts))
        shares = counts[counts > 0] / len(self.tokens)
        return float(-(shares * np.log(shares)).sum())


class GlobalOrder:
    """The order of the sequences: which of them each step takes, over all ranks.

    Epoch e visits all sequences in an order that (seed, e) fixes. Step i takes places [i*B, (i+1)*B) of the epochs laid
    end to end, so a part of an epoch too small for a batch flows into the next epoch and nothing is left out.
    """

    def __init__(self, count: int, *, batch_size: int, seed: int) -> None:
        if count < batch_size:
            raise DataError(
                f"the data has {count} sequences, fewer than one batch of {batch_size}",
                hint="use more data, a smaller --batch-size or a shorter --seq-len",
            )
        self._count, self._batch_size, self._seed = count, batch_size, seed
        self._epoch: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def indices(self, step: int) -> Indices:
        """Return the sequences of step `step` (counted from 0), in order."""
        begin, end, parts = step * self._batch_size, (step + 1) * self._batch_size, []
        while begin < end:
            epoch, place = divmod(begin, self._count)
            if self._epoch[0] != epoch:
                self._epoch = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self._count))
            parts.append(self._epoch[1][place : place + end - begin])
            begin += len(parts[-1])
        return np.concatenate(parts)


def micro_batches(
    sequences: PackedSequences, indices: Indices, *, rank: int, world_size: int, micro_batch_size: int | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's part of a batch, as equally many micro-batches of equal shape on every rank.

    Where the batch does not divide evenly, rows without targets (labels `IGNORED`) fill the difference: every rank then
    makes the same collectives, and the filling has weight 0 in the loss.
    """
    most = math.ceil(len(indices) / world_size)
    size = min(micro_batch_size or most, most)
    inputs, labels = sequences.read(np.array_split(indices, world_size)[rank])
    if missing := math.ceil(most / size) * size - len(inputs):
        inputs = torch.cat([inputs, inputs.new_zeros(missing, sequences.seq_len)])
        labels = torch.cat([labels, labels.new_full((missing, sequences.seq_len), IGNORED)])
    return list(zip(inputs.split(size), labels.split(size), strict=True))


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data that a run trains on; equal checksums mean equal sequences. `held_out` may be empty."""

    tokenizer: Any
    train: PackedSequences
    held_out: PackedSequences
    checksum: int
    description: str


def prepare_data(arguments: TrainArguments, environment: RankEnvironment, check: Callable[[int], None]) -> TrainingData:
    """Prepare tokenizer and sequences of the run. All ranks call this; rank 0 writes `data/` in the output directory.

    Args:
        arguments: of the run.
        environment: the place of this process.
        check: called on rank 0 with the checksum of the tokens; if it raises, `data/` is what it was before.

    Raises:
        DataError: the data cannot be read, or is too small.
        ConfigError: the tokenizer cannot be used.
    """
    made = run_on_main(environment, lambda: _make_data(arguments, check))
    directory, count, seq_len = arguments.output_dir / "data", made["count"], arguments.seq_len
    tokenizer = load_tokenizer(_own_tokenizer(arguments.model) or directory / "tokenizer")
    tokens = np.memmap(directory / "tokens.bin", np.dtype(made["dtype"]).newbyteorder("<"), mode="r", shape=(count,))
    kept = int(count * arguments.held_out)
    if arguments.held_out and kept < seq_len + 1:
        raise DataError(
            f"{arguments.held_out:.1%} of {count} tokens is {kept}, less than one sequence of {seq_len} to evaluate on",
            hint="use more data, shorter sequences or --held-out 0",
        )
    train, held_out = (PackedSequences(part, seq_len) for part in np.split(tokens, [count - kept]))
    description = (
        f"{made['description']}: {format_count(made['documents'])} documents, {format_count(count)} tokens of "
        f"{len(tokenizer)} kinds; {format_count(kept)} tokens are held out"
    )
    return TrainingData(tokenizer, train, held_out, made["crc32c"], description)


def _make_data(arguments: TrainArguments, check: Callable[[int], None]) -> dict[str, Any]:
    """Make tokens, and a tokenizer unless the model has one; keep those that are there if they are of the same data."""
    most, directory = arguments.max_data_mb, arguments.output_dir / "data"
    cap = None if most is None else int(most * 1e6)
    corpus = open_corpus(arguments.data, text_field=arguments.text_field, max_nbytes=cap)
    source, vocab_size = _own_tokenizer(arguments.model), arguments.vocab_size
    if arguments.model is not None and source is None:
        vocab_size = min(vocab_size, read_config(arguments.model).vocab_size)
    files = sorted(Path(source or "").glob("*.*[nlt]")) if source else []  # .json, .model, .txt
    made_from = [source, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    key = f"{corpus.fingerprint}/{json.dumps(made_from) if source else vocab_size}"
    if os.path.lexists(directory) and not (directory / "tokens.json").is_file():
        raise ConfigError(
            f"{directory} is no data that `fullshard train` has made, and is not replaced by it",
            hint="use another --output-dir, or move it away",
        )
    if (kept := _kept(directory, key)) is not None:
        check(kept["crc32c"])
        return kept
    with committed_directory(directory, uuid.uuid4().hex[:16], overwrite=True) as temporary:
        if source is None:
            train_tokenizer(corpus.documents(), vocab_size=vocab_size).save_pretrained(str(temporary / "tokenizer"))
        tokenizer = load_tokenizer(source or temporary / "tokenizer")
        made = tokenise(temporary / "tokens.bin", corpus.documents(), tokenizer)
        check(made["crc32c"])
        made |= {"description": corpus.description, "key": key}
        (temporary / "tokens.json").write_text(json.dumps(made) + "\n", encoding="utf-8")
    return made


def _own_tokenizer(model: str | None) -> str | None:
    """Return the model where it brings a tokenizer: a hub name, or a directory with one."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    path = Path(model or "")
    is_a_config = model is None or path.is_file()
    is_bare = is_a_config or (path.is_dir() and not any((path / name).is_file() for name in names))
    return None if is_bare else model


def _kept(directory: Path, key: str) -> dict[str, Any] | None:
    """Return what is said of the tokens that are there, if they are whole and were made for the same `key`."""
    try:
        found = read_object(directory / "tokens.json")
        nbytes = found["count"] * np.dtype(found["dtype"]).itemsize
        is_whole = found["key"] == key and (directory / "tokens.bin").stat().st_size == nbytes
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: made anew
        return None
    return found if is_whole else None
