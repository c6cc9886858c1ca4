"""Sequence parallelism (Ulysses): several ranks share a batch, and each of them has one part of every sequence.

In attention, each rank has whole sequences for a part of the heads. Transformers' own implementation computes it.
"""

from fullshard.features.sequence_parallel.attention import SplitSequences, split_sequences
from fullshard.features.sequence_parallel.batches import cut_batch

__all__ = ["SplitSequences", "cut_batch", "split_sequences"]
