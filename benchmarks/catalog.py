"""What can be measured: engines, model shapes, rows and devices, by the names users select them with. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp32", "bf16"]

# In the order of the tables. BARE runs on one rank and is the limit; the others are divided by REFERENCE.
ENGINES = {
    "bare": "one bare process",
    "ddp": "DDP",
    "fsdp1": "torch FSDP1",
    "fsdp2": "torch FSDP2",
    "deepspeed": "DeepSpeed ZeRO-3",
    "fullshard": "fullshard",
}
BARE = "bare"
REFERENCE = "fsdp2"

# Device type -> backend of torch.distributed.
BACKENDS = {"cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a GPT-2 model; the vocabulary is GPT-2's and input and output embeddings are tied."""

    hidden: int
    layers: int
    heads: int


SHAPES = {
    "30m": Shape(hidden=384, layers=6, heads=6),  # 30.3 M parameters, two thirds of them in the embedding
    "124m": Shape(hidden=768, layers=12, heads=12),  # GPT-2 small
}


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: a model shape, a compute dtype and what each rank is fed per step.

    Args:
        model: a name from `SHAPES`.
        dtype: dtype of forward and backward; main weights, reduction and optimizer are fp32 in both cases.
        sequences: sequences per rank and step.
        tokens: tokens per sequence.
    """

    model: str
    dtype: Dtype
    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        """The row as users select it: `30m-fp32-4x128`."""
        return f"{self.model}-{self.dtype}-{self.sequences}x{self.tokens}"


DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
# 4 sequences per rank is compute-bound, 1 is communication-bound.
ROWS = {
    row.name: row
    for row in (Row(model, dtype, sequences, 128) for model in SHAPES for dtype in DTYPES for sequences in (4, 1))
}
QUICK_ROW = "30m-fp32-1x128"
