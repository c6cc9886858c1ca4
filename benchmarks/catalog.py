"""What can be measured: engines, model shapes, rows and devices, by the names users select them with. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# bf16 keeps fp32 main weights; in bf16only weights, gradients and optimizer state are bf16 too.
Dtype = Literal["fp32", "bf16", "bf16only"]

# In the order of the tables. BARE runs on one rank and is the limit; SEVERAL_BARE is one such process per rank at once,
# which share the machine and nothing else; the others are divided by REFERENCE.
ENGINES = {
    "bare": "one bare process",
    "bares": "one bare process per rank",
    "ddp": "DDP",
    "fsdp1": "torch FSDP1",
    "fsdp2": "torch FSDP2",
    "accelerate": "Accelerate, FSDP2",
    "deepspeed": "DeepSpeed ZeRO-3",
    "fullshard": "fullshard",
    "fullshard-in-backward": "fullshard, step in backward",
    "fsdp2-offload": "torch FSDP2, CPU offload",
    "fullshard-offload": "fullshard, CPU offload",
}
DEFAULT_ENGINES = {
    "cpu": ("bare", "bares", "ddp", "fsdp1", "fsdp2", "accelerate", "deepspeed", "fullshard"),
    "cuda": ("bare", "fsdp2", "fullshard"),
}
BARE = "bare"
SEVERAL_BARE = "bares"
REFERENCE = "fsdp2"

# Device type -> backend of torch.distributed.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model: GPT-2's, with its vocabulary and tied embeddings, or Llama's.

    Args:
        intermediate: width inside the MLP of a Llama; 0 stands for GPT-2.
        key_value_heads: of a Llama.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int = 0
    key_value_heads: int = 0

    @property
    def family(self) -> str:
        """Which architecture it is a shape of."""
        return "Llama" if self.intermediate else "GPT-2"


SHAPES = {
    "30m": Shape(hidden=384, layers=6, heads=6),  # 30.3 M parameters, two thirds of them in the embedding
    "124m": Shape(hidden=768, layers=12, heads=12),  # GPT-2 small
    "350m": Shape(hidden=1024, layers=24, heads=16),  # GPT-2 medium
    "tiny": Shape(hidden=64, layers=2, heads=4, intermediate=128, key_value_heads=2),
    "1b": Shape(hidden=2048, layers=16, heads=32, intermediate=8192, key_value_heads=8),
    "3b": Shape(hidden=3072, layers=28, heads=24, intermediate=8192, key_value_heads=8),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: a model shape, a compute dtype and what each rank is fed per step.

    Args:
        model: a name from `SHAPES`.
        dtype: dtype of forward and backward; main weights, reduction and optimizer are fp32, except in `bf16only`.
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


# For CPUs: 4 sequences per rank is compute-bound, 1 is communication-bound; 4x512 is compute and nothing else.
_CPU_ROWS = [
    *(Row(model, dtype, n, 128) for model in ("30m", "124m") for dtype in ("fp32", "bf16") for n in (4, 1)),
    Row("124m", "fp32", 4, 512),
]
# Not by default: they take minutes, and are there for their memory.
_LARGE_ROWS = [Row("350m", "fp32", 1, 128)]
# For accelerators, of which one takes a 3B model with AdamW in bf16.
_GPU_ROWS = [
    *(Row("tiny", dtype, 2, 64) for dtype in ("bf16", "bf16only")),
    *(Row("1b", dtype, 4, 2048) for dtype in ("bf16", "bf16only")),
    Row("3b", "bf16only", 2, 2048),
]
ROWS = {row.name: row for row in (*_CPU_ROWS, *_LARGE_ROWS, *_GPU_ROWS)}
DEFAULT_ROWS = {"cpu": [row.name for row in _CPU_ROWS], "cuda": [row.name for row in _GPU_ROWS]}
QUICK_ROWS = {"cpu": "30m-fp32-1x128", "cuda": "tiny-bf16-2x64"}
