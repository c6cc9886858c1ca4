"""The known figures of each optimizer that can be planned."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.core.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        moments: tensors of state as large as the parameter, in the dtype that its main weight is stored in.
        passes: how often its step reads or writes a tensor of that size. Fused: weight, gradient and moments
            read, weight and moments written. Otherwise each operation of torch's loop goes through memory on its own:
            decay 2, first moment 3, second moment 2 + 4, its root 2, that scaled 2, epsilon 2, the update 4, as
            torch/optim/adamw.py has them; momentum 2 + 3, the update 3.
        has_temporaries: whether the loop keeps results of the size of parameters for a moment.
        is_torchs: whether it is one of torch's own, which can step in backward.
        matrix: costs of whole matrices for every rank, if it needs them; the other fields are then for all other
            parameters.
        packed_nbytes: bytes of state per trained parameter in a dtype of its own.
    """

    moments: int
    passes: int
    has_temporaries: bool = False
    is_torchs: bool = True
    packed_nbytes: float = 0.0
    matrix: OptimizerRow | None = None

    def state_nbytes(self, dtype: str) -> float:
        """Return bytes of state per trained parameter that is stored as `dtype`."""
        return self.moments * itemsize(dtype) + self.packed_nbytes

    def step_nbytes(self, dtype: str) -> float:
        """Return bytes that its step reads and writes per trained parameter that is stored as `dtype`."""
        return self.passes * itemsize(dtype) + 2 * self.packed_nbytes


_ADAM_8_BIT_STATE = 2.0 + 2 * 4 / 256
"""A byte per state, and a float32 scale per block of 256 (bitsandbytes' blockwise 8-bit optimizers)."""

OPTIMIZERS = {
    "adamw": OptimizerRow(2, 21, has_temporaries=True),
    "adamw-fused": OptimizerRow(2, 7),
    "adamw-8bit": OptimizerRow(0, 3, is_torchs=False, packed_nbytes=_ADAM_8_BIT_STATE),
    # Momentum 3, the direction 3, cast 1.5, decay 2, the update 2.5; AdamW for what is no matrix.
    "muon": OptimizerRow(2, 21, has_temporaries=True, is_torchs=False, matrix=OptimizerRow(1, 12)),
    "sgd": OptimizerRow(0, 3),
    "sgd-momentum": OptimizerRow(1, 8),
    "none": OptimizerRow(0, 0),
}
