"""Sequence parallelism (Ulysses): in attention, ranks that share a batch have whole sequences for some heads each."""

from fullshard.features.sequence_parallel.attention import split_sequences
from fullshard.features.sequence_parallel.batches import cut_batch

__all__ = ["cut_batch", "split_sequences"]
