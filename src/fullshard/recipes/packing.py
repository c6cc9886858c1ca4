"""Documents -> one long row of tokens on disk -> sequences of equal length -> the batches of every step.

The documents are joined with the end-of-text token between them and cut into sequences of `seq_len`; a sequence may
hold the end of one document and the beginning of the next. Which sequences a step sees follows from the seed alone, not
from the number of ranks: the epochs' shuffled orders are laid end to end, and step i takes the next B of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from fullshard.core.errors import DataError
from fullshard.core.files import read_object
from fullshard.observe import whole_file, write_text

Tokens = npt.NDArray[Any]
"""Token ids of unsigned integer type, usually a memory map."""

IGNORED = -100
"""Label of a position that is no target, torch's default for cross-entropy."""

_ENCODE_CHARS = 1 << 22
"""Characters handed to the tokenizer at a time: enough to keep all its threads busy, little memory."""

_COUNT_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A tokenised corpus on disk.

    Attributes:
        path: the raw token ids, little-endian.
        dtype: `uint16` or `uint32`.
        count: number of tokens.
        documents: number of documents.
        crc32c: checksum of the file, by which a resumed run knows that it sees the same data.
    """

    path: Path
    dtype: str
    count: int
    documents: int
    crc32c: int

    def open(self) -> Tokens:
        """Open the tokens as a read-only memory map."""
        return np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r", shape=(self.count,))


def tokenise(
    path: Path,
    documents: Iterable[str],
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    *,
    end_of_text: int,
    vocab_size: int,
    key: str,
    check: Callable[[int], None] = lambda checksum: None,
) -> TokenFile:
    """Write the tokens of the documents to `path`, or keep the file that is there if it was made for the same `key`.

    Called on one rank. The file appears whole or not at all; its description stands beside it as JSON.

    Args:
        path: the file to write.
        documents: texts in order; empty ones are passed over.
        encode: token ids for a list of texts.
        end_of_text: token id put after each document.
        vocab_size: one more than the highest token id.
        key: names everything the tokens depend on.
        check: called with the checksum before the file counts; if it raises, `path` is what it was before.

    Raises:
        DataError: there is no text at all.
    """
    description = path.with_suffix(".json")
    if (kept := _kept(path, description, key)) is not None:
        check(kept.crc32c)
        return kept
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    checksum, count, number = 0, 0, 0
    with whole_file(path) as temporary, temporary.open("wb") as file:
        for texts in _batches(documents):
            for ids in encode(texts):
                block = np.asarray([*ids, end_of_text], dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
                checksum = google_crc32c.extend(checksum, block)
                file.write(block)
                count, number = count + len(ids) + 1, number + 1
        if not number:
            raise DataError("the data holds no text")
        check(checksum)
    made = TokenFile(path, dtype, count, number, checksum)
    write_text(description, json.dumps(_described(made) | {"key": key}) + "\n")
    return made


def _described(file: TokenFile) -> dict[str, Any]:
    return {"dtype": file.dtype, "count": file.count, "documents": file.documents, "crc32c": file.crc32c}


def _kept(path: Path, description: Path, key: str) -> TokenFile | None:
    if not (path.is_file() and description.is_file()):
        return None
    try:
        values = read_object(description)
    except (OSError, ValueError):  # damaged: the tokens are made anew
        return None
    if values.pop("key", None) != key:
        return None
    file = TokenFile(path, **values)
    return file if path.stat().st_size == file.count * np.dtype(file.dtype).itemsize else None


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for document in documents:
        if not document:
            continue
        batch.append(document)
        chars += len(document)
        if chars >= _ENCODE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def split_held_out(tokens: Tokens, fraction: float, *, seq_len: int) -> tuple[Tokens, Tokens]:
    """Return the part to train on and the part at the end that is kept for evaluation.

    Raises:
        DataError: a kept part was asked for and does not hold one whole sequence.
    """
    kept = int(len(tokens) * fraction)
    if fraction and kept < seq_len + 1:
        raise DataError(
            f"{fraction:.1%} of {len(tokens)} tokens is {kept}, less than one sequence of {seq_len} to evaluate on",
            hint="use more data, shorter sequences or --held-out 0",
        )
    return tokens[: len(tokens) - kept], tokens[len(tokens) - kept :]


def unigram_entropy(tokens: Tokens, vocab_size: int) -> float:
    """Return the nats per token of the best model that knows only how frequent each token is."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _COUNT_CHUNK):
        counts += np.bincount(tokens[start : start + _COUNT_CHUNK], minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class PackedSequences:
    """The sequences of a row of tokens. Sequence i is tokens [i*L, (i+1)*L], the targets one token later.

    Args:
        tokens: the row.
        seq_len: L.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self._tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self.seq_len)

    def read(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels of the given sequences, each an int64 tensor of shape (len(indices), seq_len)."""
        length = self.seq_len
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self._tokens[index * length : (index + 1) * length + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class GlobalOrder:
    """The order of the sequences: which of them each step takes, over all ranks.

    Epoch e visits all sequences in an order that (seed, e) fixes. Step i takes places [i*B, (i+1)*B) of the epochs laid
    end to end, so a part of an epoch too small for a batch flows into the next epoch and nothing is left out.

    Args:
        count: number of sequences.
        batch_size: B, sequences per step.
        seed: fixes the orders.

    Raises:
        DataError: fewer sequences than one batch takes.
    """

    def __init__(self, count: int, *, batch_size: int, seed: int) -> None:
        if count < batch_size:
            raise DataError(
                f"the data has {count} sequences, fewer than one batch of {batch_size}",
                hint="use more data, a smaller --batch-size or a shorter --seq-len",
            )
        self._count, self._batch_size, self._seed = count, batch_size, seed
        self._cached: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the sequences of step `step` (counted from 0), in order."""
        begin, end = step * self._batch_size, (step + 1) * self._batch_size
        parts = []
        while begin < end:
            epoch, place = divmod(begin, self._count)
            part = self._epoch(epoch)[place : place + end - begin]
            parts.append(part)
            begin += len(part)
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self._count))
        return self._cached[1]


def rank_part(indices: npt.NDArray[np.int64], *, rank: int, world_size: int) -> npt.NDArray[np.int64]:
    """Return the contiguous part of a batch that `rank` reads; parts differ by at most one sequence."""
    return np.array_split(indices, world_size)[rank]


def micro_batches(
    sequences: PackedSequences,
    indices: npt.NDArray[np.int64],
    *,
    rank: int,
    world_size: int,
    micro_batch_size: int | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's part of a batch, as equally many micro-batches of equal shape on every rank.

    Where the batch does not divide evenly, rows without targets (labels `IGNORED`) fill the difference: every rank then
    makes the same collectives, and the filling has weight 0 in the loss.

    Args:
        sequences: where to read.
        indices: the sequences of the whole batch.
        rank: this rank.
        world_size: number of ranks.
        micro_batch_size: sequences of a micro-batch; None for one micro-batch.

    Returns:
        Pairs of inputs and labels, int64 of shape (micro-batch size, seq_len).
    """
    most = math.ceil(len(indices) / world_size)
    size = min(micro_batch_size or most, most)
    rows = math.ceil(most / size) * size
    inputs, labels = sequences.read(rank_part(indices, rank=rank, world_size=world_size))
    missing = rows - len(inputs)
    if missing:
        inputs = torch.cat([inputs, inputs.new_zeros(missing, sequences.seq_len)])
        labels = torch.cat([labels, labels.new_full((missing, sequences.seq_len), IGNORED)])
    return list(zip(inputs.split(size), labels.split(size), strict=True))
