"""The properties of each optimizer that the planner supports."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.core.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """The memory and memory traffic of one optimizer."""

    moments: int  # number of state tensors that are as large as the parameter and have the dtype of its main weight
    # Number of times that a step reads or writes a tensor of that size. A fused optimizer reads the weight, the
    # gradient and the moments, and writes the weight and the moments. Other optimizers read and write memory in each of
    # their operations. AdamW in torch/optim/adamw.py has 2 passes for the decay, 3 for the first moment, 2 + 4 for the
    # second moment, 2 for its root, 2 for scaling it, 2 for epsilon and 4 for the update. SGD with momentum has 2 + 3
    # for the momentum, and 3 for the update.
    passes: int
    has_temporaries: bool = False  # whether a step briefly allocates temporaries as large as the parameters
    is_torchs: bool = True  # whether it is one of torch's own optimizers, which can step in backward
    packed_nbytes: float = 0.0  # bytes of state per trained element whose dtype does not depend on that of the weight
    # The costs for parameters that are updated as complete matrices, if the optimizer does that; the other fields then
    # only apply to the other parameters.
    matrix: OptimizerRow | None = None

    def state_nbytes(self, dtype: str) -> float:
        """Return the bytes of optimizer state for each trained element that is stored as `dtype`."""
        return self.moments * itemsize(dtype) + self.packed_nbytes

    def step_nbytes(self, dtype: str) -> float:
        """Return the bytes that a step reads and writes for each trained element that is stored as `dtype`."""
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
