"""Resident memory of a step against the least that the planner says.

pytest -m full tests/engine/test_resident_memory.py
"""

from __future__ import annotations

import pytest

from benchmarks.catalog import ROWS
from benchmarks.record import Job
from benchmarks.run import run_job

BOUNDS = {"30m-fp32-1x128": 1.50, "124m-fp32-4x512": 1.32}
"""1.43 and 1.20 to 1.26 were measured. What only a step loads, and the allocator's holes, are much beside 304 MiB for
30 M parameters. Large activations leave holes, too, as glibc keeps freed heap: 1.32 after four steps was seen.
"""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", BOUNDS)
def test_peak_of_a_rank(row: str) -> None:
    """The proportional size over what the imports took, while the model is built and while it is trained."""
    job = Job(
        row=ROWS[row],
        engine="fullshard",
        repeat=0,
        ranks=2,
        warmup=1,
        steps=2,
        seed=17,
        lr=1e-3,
        device="cpu",
        watch_memory=True,
    )
    run = run_job(job, 0, timeout=580)
    assert run.error is None, run.error
    for rank, result in enumerate(run.ranks):
        memory = result.memory
        for phase, nbytes in (("building", memory.setup_pss_peak_nbytes), ("training", memory.steps_pss_peak_nbytes)):
            ratio = nbytes / run.planned_nbytes
            print(f"rank {rank}, {phase}: {nbytes >> 20} MiB of {run.planned_nbytes >> 20}, {ratio:.2f}")
            assert 0 < ratio <= BOUNDS[row]
