"""The properties of each optimizer that the planner supports."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.core.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        moments: number of state tensors that are as large as the parameter and have the dtype of its main weight.
        passes: how often its step reads or writes a tensor of that size. A fused optimizer reads the weight, the
            gradient and the moments, and writes the weight and the moments. Otherwise each operation of torch's loop
            goes through memory separately. AdamW in torch/optim/adamw.py has 2 passes for the decay, 3 for the first
            moment, 2 + 4 for the second moment, 2 for its root, 2 for scaling it, 2 for epsilon and 4 for the update.
            Momentum takes 2 + 3, and its update 3.
        has_temporaries: whether the loop briefly holds temporaries as large as the parameters.
        is_torchs: whether it is one of torch's own optimizers, which can step in backward.
        matrix: the costs of complete matrices for every rank, if the optimizer needs them; the other fields then apply
            to all other parameters.
        packed_nbytes: bytes of state per trained parameter that have a dtype of their own.
    """

    moments: int
    passes: int
    has_temporaries: bool = False
    is_torchs: bool = True
    packed_nbytes: float = 0.0
    matrix: OptimizerRow | None = None

    def state_nbytes(self, dtype: str) -> float:
        """Return the bytes of optimizer state per trained parameter that is stored as `dtype`."""
        return self.moments * itemsize(dtype) + self.packed_nbytes

    def step_nbytes(self, dtype: str) -> float:
        """Return the bytes that a step reads and writes per trained parameter that is stored as `dtype`."""
        return self.passes * itemsize(dtype) + 2 * self.packed_nbytes


_ADAM_8_BIT_STATE = 2.0 + 2 * 4 / 256
"""Two states of one byte, each with a float32 scale per block of 256 (bitsandbytes' blockwise 8-bit optimizers)."""

OPTIMIZERS = {
    "adamw": OptimizerRow(2, 21, has_temporaries=True),
    "adamw-fused": OptimizerRow(2, 7),
    "adamw-8bit": OptimizerRow(0, 3, is_torchs=False, packed_nbytes=_ADAM_8_BIT_STATE),
    # Momentum takes 3, the direction 3, the cast 1.5, decay 2 and the update 2.5. Other parameters use AdamW.
    "muon": OptimizerRow(2, 21, has_temporaries=True, is_torchs=False, matrix=OptimizerRow(1, 12)),
    "sgd": OptimizerRow(0, 3),
    "sgd-momentum": OptimizerRow(1, 8),
    "none": OptimizerRow(0, 0),
}
