"""Steps on this machine's CPU beside the same steps in virtual time, with the machine's own calibrated numbers.

    python -m benchmarks.virtual_cpu [--repeats 3] [--steps 3]

Six of the configurations of `benchmarks.plan_ranking`, those whose products are large enough to be products. All is
told in seconds of a processor, the calibration, too: what else the machine does makes them few percent longer, and
seconds by the wall several times. A repeat calibrates, runs all, and simulates all; a ratio is the median of repeats.
Writes `benchmarks/results/virtual-cpu.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.plan_ranking import CONFIGURATIONS, MODEL, Configuration, measure, work
from benchmarks.record import RESULTS

RECORD = RESULTS / "virtual-cpu.json"
CHOSEN = tuple(c for c in CONFIGURATIONS if c.micro_batch > 1)
MODULE = "benchmarks.virtual_cpu"


def simulate(configuration: Configuration, calibration: Path) -> float:
    """Seconds of a step of the engine in virtual time."""
    from fullshard.api.virtual.rehearsal import time_step
    from fullshard.plan.hardware import parse_cluster
    from fullshard.plan.job import Job

    job = Job.of({**configuration.job, "optimizer": "adamw-fused", "loss": "eager"})
    return time_step(MODEL, job, parse_cluster(f"{configuration.ranks}x{calibration}")).seconds


def calibrate(out: Path) -> None:
    """One of two ranks: measure the machine in seconds of a processor."""
    from fullshard.api import calibration_ranks as calibration
    from fullshard.launch.worker import run_worker
    from fullshard.plan.hardware import write_calibration

    def measured() -> None:
        with patch.object(calibration.time, "perf_counter", time.process_time):
            device = calibration.measure()
        if os.environ["RANK"] == "0":
            write_calibration(device, out)

    run_worker(measured)


def compare(*, repeats: int, steps: int) -> dict[str, Any]:
    """All configurations, measured and simulated, repeat by repeat."""
    from fullshard.launch.local import launch_local

    rows: dict[str, list[dict[str, float]]] = {c.name: [] for c in CHOSEN}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            path = Path(folder) / f"{repeat}.json"
            if launch_local(MODULE, ["--calibrate", str(path)], nproc=2):
                raise RuntimeError("the calibration failed")
            for name, seconds in measure(CHOSEN, steps=steps, module=MODULE).items():
                configuration = next(c for c in CHOSEN if c.name == name)
                rows[name].append({"measured_s": seconds, "simulated_s": simulate(configuration, path)})
        calibration = json.loads(path.read_text(encoding="utf-8"))
    ratios = {
        name: round(statistics.median(r["simulated_s"] / r["measured_s"] for r in found), 3)
        for name, found in rows.items()
    }
    return {"ratios": ratios, "rows": rows, "calibration": calibration, "configurations": [asdict(c) for c in CHOSEN]}


def main() -> None:
    """Measure, simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        text, steps, out = arguments.worker
        configurations = [Configuration(**values) for values in json.loads(text)]
        work(configurations, int(steps), Path(out), clock=time.process_time, fused=True)
    elif arguments.calibrate:
        calibrate(arguments.calibrate)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        result = compare(repeats=arguments.repeats, steps=arguments.steps)
        for name, ratio in result["ratios"].items():
            measured = statistics.median(row["measured_s"] for row in result["rows"][name])
            print(f"{name:<52} measured {measured:6.3f} s, simulated / measured {ratio:.2f}", flush=True)
        RECORD.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
