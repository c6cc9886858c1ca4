"""Seconds from the start of a launcher to the first line of the script, and of `--help`: ours, torchrun, Accelerate.

    python -m benchmarks.startup [--repeats 9]

Runs are interleaved, so that what else the machine does hits all alike; the median of each is recorded in
`benchmarks/results/startup.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "startup.json"

SCRIPT = """
import time
now = time.time()
import os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(repr(now))
"""

_BIN = Path(sys.executable).parent
LAUNCHERS = {
    "fullshard launch": [str(_BIN / "fullshard"), "launch", "--config_file", "none", "--cpu", "--num_processes", "2"],
    "torchrun": [str(_BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
    "accelerate launch": [
        *(str(_BIN / "accelerate"), "launch", "--use_fsdp", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}


def seconds_to_first_line(command: list[str]) -> float:
    """From the start of the launcher until the last of its two ranks is at the first line."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        ranks = Path(directory) / "ranks"
        ranks.mkdir()
        begin = time.time()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": directory}
        subprocess.run([*command, str(script), str(ranks)], check=True, capture_output=True, timeout=300, env=environ)
        return max(float(path.read_text(encoding="utf-8")) for path in ranks.iterdir()) - begin


def seconds_of_help(command: list[str]) -> float:
    """From start to end of `--help`."""
    begin = time.time()
    subprocess.run([*command, "--help"], check=True, capture_output=True, timeout=300)
    return time.time() - begin


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    first: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    helps: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    for number in range(repeats + 1):
        for name, command in LAUNCHERS.items():
            seconds, help_seconds = seconds_to_first_line(command), seconds_of_help(command[: 1 + (name != "torchrun")])
            if number:  # the first round only warms the file cache
                first[name].append(seconds)
                helps[name].append(help_seconds)
    rows = {
        name: {
            "first_line_s": round(statistics.median(first[name]), 3),
            "first_line_all_s": [round(value, 3) for value in first[name]],
            "help_s": round(statistics.median(helps[name]), 3),
        }
        for name in LAUNCHERS
    }
    torchrun = statistics.median(first["torchrun"])
    record = {
        "what": "median seconds to the first line of the script on the last of 2 ranks, and of --help",
        "repeats": repeats,
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("fullshard", "torch", "accelerate")},
        "launchers": rows,
        "fullshard_over_torchrun": round(statistics.median(first["fullshard launch"]) / torchrun, 3),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
