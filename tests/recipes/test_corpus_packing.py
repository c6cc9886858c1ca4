"""Token files, sequences, and batches that do not depend on the number of ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import DataError
from fullshard.recipes.data import IGNORED, PackedSequences, batch_of, micro_batches, tokenize

END = 0


class _Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = END

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(char) for char in text] for text in texts]}


def test_tokens_hold_documents_with_ends_between(tmp_path: Path) -> None:
    made = tokenize(tmp_path / "tokens.bin", ["ab", "", "c"], _Letters())
    assert np.fromfile(tmp_path / "tokens.bin", "<u4").tolist() == [97, 98, END, 99, END]
    assert (made["count"], made["documents"]) == (5, 2)


def test_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        tokenize(tmp_path / "tokens.bin", ["", ""], _Letters())


def test_sequences_overlap_by_the_target() -> None:
    sequences = PackedSequences(np.arange(10, dtype=np.uint16), seq_len=3)
    assert len(sequences) == 3
    inputs, labels = sequences.read([0, 2])
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert labels.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert inputs.dtype == labels.dtype == torch.int64


@given(count=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_epoch_visits_every_sequence_once(count: int, batch: int, seed: int) -> None:
    """Batches laid end to end are the epochs laid end to end: nothing is dropped or repeated at an epoch's end."""
    steps = math.ceil(3 * count / batch)
    visits = np.concatenate([batch_of(step, count, batch_size=batch, seed=seed) for step in range(steps)])
    for epoch in range(3):
        assert sorted(visits[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_orders_differ_by_epoch_and_seed() -> None:
    orders = [batch_of(step, 50, batch_size=50, seed=seed).tolist() for step, seed in ((0, 1), (1, 1), (0, 2))]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


@given(
    count=st.integers(1, 23),
    world_size=st.integers(1, 7),
    micro=st.one_of(st.none(), st.integers(1, 8)),
)
def test_ranks_split_a_batch_exactly(count: int, world_size: int, micro: int | None) -> None:
    """Every rank makes equally many forwards of equal shape, and together they see each sequence once, in order."""
    sequences = PackedSequences(np.arange(1, 23 * 2 + 2, dtype=np.uint16), seq_len=2)
    indices = np.arange(count)
    shapes, seen = set(), []
    for rank in range(world_size):
        batch = micro_batches(sequences, indices, rank=rank, world_size=world_size, micro_batch_size=micro)
        shapes.add(tuple(tuple(inputs.shape) for inputs, _ in batch))
        for inputs, labels in batch:
            assert inputs.shape == labels.shape
            real = (labels != IGNORED).all(dim=1)
            assert (labels[~real] == IGNORED).all()
            seen += inputs[real][:, 0].tolist()
    assert len(shapes) == 1
    assert seen == [2 * index + 1 for index in range(count)]
