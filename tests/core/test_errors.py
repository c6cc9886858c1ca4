"""Which rank an error names as its cause. pytest tests/core/test_errors.py."""

from __future__ import annotations

import pytest

from fullshard.core.errors import cause_of
from fullshard.features.nonfinite import NonFinite

LATE = "CommunicationError: rank 3, unit 'a', unshard: no answer from another rank for 30 s: rank 2"
DIFFERS = "CommunicationError: ranks disagree about the model: rank 0 has [a], but rank 3 has [b] ({} ranks differ)"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (f"NonFiniteError: rank 7, step 12 of this process: {NonFinite({'a': 'NaN'}, [3])}; nothing was updated", 3),
        (f"NonFiniteError: rank 7, step 12 of this process: {NonFinite({'a': 'NaN'}, [])}; nothing was updated", None),
        (f"{LATE} (process 4711 on node3) is running, at a.py:3", 2),
        (f"{LATE} gives no sign of life", 2),
        (f"{LATE} (process 4711 on node3) waits in unit 'b'", None),
        (DIFFERS.format("1 of 4"), 3),
        (DIFFERS.format("1 of 2"), None),
        (DIFFERS.format("2 of 4"), None),
        ("CommunicationError: rank 7, unit 'a': rank 0 (process 4711 on node3) has ended; it did", 0),
        ("CommunicationError: rank 7, unit 'a': rank 1 of the group (process 4711) has ended", None),
        ("CommunicationError: rank 7, unit 'a', reduce: rank 1 had an error in a backward that rank 0 did not have", 1),
        ("CheckpointError: writing out/step-15 failed\nrank 1: cannot write x: File too large", 1),
        ("ReplicaError: rank 7: replicas hold different weights: a of rank 5 (process 3 on b), unlike 3 others", 5),
        ("ReplicaError: rank 7: replicas hold different weights: a of rank 5 (process 3 on b) and rank 6 (c)", None),
        ("KeyError: 'label'", 7),
        ("", 7),
    ],
)
def test_the_rank_that_an_error_names(message: str, cause: int | None) -> None:
    assert cause_of(message, 7) == cause
