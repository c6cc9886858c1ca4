"""Steps in virtual time beside the speeds that others have published, and beside the planner's.

    python -m benchmarks.virtual_published

The runs are those of `test_plan_published.py` that were not compiled, because the virtual device runs kernels one
by one; MPT's are left out, whose attention and loss it has no kernels for. Writes
`benchmarks/results/virtual-published.json`, row by row.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.record import RESULTS
from fullshard.api.virtual.rehearsal import time_step
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import MODELS
from tests.plan.test_plan_published import SPEEDS, Speed, predicted_speed

RECORD = RESULTS / "virtual-published.json"
ROWS = [row for row in SPEEDS if not row.job.get("compile")]


def simulated_speed(row: Speed) -> float:
    """Tokens per second and device."""
    job = Job.of({**row.job, "loss": "eager", "optimizer": "adamw-fused"})
    step = time_step(MODELS[row.model], job, parse_cluster(row.devices, row.hosts))
    return job.tokens * job.accumulation / step.seconds


def median_error(rows: dict[str, dict[str, float]], of: str) -> float:
    """Of what was `planned` or `simulated`."""
    return statistics.median(abs(row[of] / row["published"] - 1) for row in rows.values())


def main() -> None:
    """Simulate and plan all, print and record."""
    rows: dict[str, Any] = {}
    for row in ROWS:
        found = {"published": row.published, "planned": predicted_speed(row), "simulated": simulated_speed(row)}
        rows[row.name] = {name: round(value, 1) for name, value in found.items()}
        ratios = ", ".join(f"{name} {found[name] / row.published:.3f}" for name in ("planned", "simulated"))
        print(f"{row.name:<36} published {row.published:6.0f} tokens/s, {ratios}", flush=True)
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(*(f"median error {of}: {median_error(rows, of):.1%}" for of in ("planned", "simulated")), sep="\n")


if __name__ == "__main__":
    main()
