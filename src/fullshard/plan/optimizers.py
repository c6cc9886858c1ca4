"""What is known of each optimizer that can be planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One of them, with float32 main weights.

    Attributes:
        state_nbytes: bytes of its state per trained parameter.
        step_nbytes: bytes that its step reads and writes per trained parameter. Fused: weight, gradient and moments
            read, weight and moments written. Otherwise each operation of torch's loop goes through memory on its own:
            decay 2, first moment 3, second moment 2 + 4, its root 2, that scaled 2, epsilon 2, the update 4, as
            torch/optim/adamw.py has them; momentum 2 + 3, the update 3.
        ops: operations of the loop, per parameter.
        has_temporaries: whether the loop keeps results of the size of parameters for a moment.
        is_torchs: whether it is one of torch's own, which can step in backward.
        in_8_bits: the same with its state in 8 bits, if there is one.
    """

    state_nbytes: float
    step_nbytes: float
    ops: int = 0
    has_temporaries: bool = False
    is_torchs: bool = True
    in_8_bits: str | None = None


_ADAM_8_BIT_STATE = 2.0 + 2 * 4 / 256
"""A byte per state, and a float32 scale per block of 256 (bitsandbytes' blockwise 8-bit optimizers)."""

OPTIMIZERS = {
    "adamw": OptimizerRow(8.0, 21 * 4.0, ops=11, has_temporaries=True, in_8_bits="adamw-8bit"),
    "adamw-fused": OptimizerRow(8.0, 7 * 4.0, in_8_bits="adamw-8bit"),
    "adamw-8bit": OptimizerRow(_ADAM_8_BIT_STATE, 3 * 4.0 + 2 * _ADAM_8_BIT_STATE, is_torchs=False),
    "sgd": OptimizerRow(0.0, 3 * 4.0, ops=1),
    "sgd-momentum": OptimizerRow(4.0, 8 * 4.0, ops=3),
    "none": OptimizerRow(0.0, 0.0),
}
