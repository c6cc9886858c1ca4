"""Ten ways to run the same training step on this machine, as the planner ranks them and as they are.

    python -m benchmarks.plan_ranking [--repeats 3] [--steps 6] [--calibration this.json]

First the machine is calibrated, as `fullshard plan --calibrate` does it; then all configurations run, in an order that
rotates with the repeat and with fresh processes in each; a time is the least of all steps and repeats, because other
work on the machine only ever adds. Predicted and measured seconds per step, side by side, and Spearman's correlation of
the two go into `benchmarks/results/plan-ranking.json`.

The configurations are all of a grid, none left out: strategies at both ends, micro-batches of one sequence and of all,
with and without checkpointing, on two ranks; and besides one rank alone, and half precision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "plan-ranking.json"

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
}
SEQUENCES, TOKENS = 8, 64
"""Of one optimizer step, over all ranks: the same for every configuration."""


@dataclass(frozen=True)
class Configuration:
    """One way to do the step; the fields are those of `fullshard.plan.job.Job`."""

    ranks: int = 2
    strategy: str = "FULL_SHARD"
    micro_batch: int = 4
    checkpointing: str = "none"
    precision: str = "fp32"

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return SEQUENCES // self.ranks // self.micro_batch

    @property
    def name(self) -> str:
        """For tables."""
        words = f"{self.ranks} x {self.strategy}, {self.accumulation} x {self.micro_batch}, {self.precision}"
        return words + (", checkpointing" if self.checkpointing == "full" else "")

    @property
    def job(self) -> dict[str, Any]:
        """Settings of the plan."""
        return {
            "strategy": self.strategy,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "checkpointing": self.checkpointing,
            "precision": self.precision,
            "seq_len": TOKENS,
            "attention": "sdpa",
        }


CONFIGURATIONS = (
    *(
        Configuration(strategy=strategy, micro_batch=micro_batch, checkpointing=checkpointing)
        for strategy, micro_batch, checkpointing in itertools.product(
            ("FULL_SHARD", "NO_SHARD"), (1, 4), ("none", "full")
        )
    ),
    Configuration(ranks=1, micro_batch=8),
    Configuration(precision="bf16"),
)


def predict(configuration: Configuration, calibration: Path) -> float:
    """Seconds of a step, as the planner says."""
    from fullshard.plan.evaluate import evaluate
    from fullshard.plan.families import from_config
    from fullshard.plan.hardware import parse_cluster
    from fullshard.plan.job import Job

    shape, _ = from_config(MODEL, where="benchmark")
    cluster = parse_cluster(f"{configuration.ranks}x{calibration}")
    return float(evaluate(shape, Job.of(configuration.job), cluster).time.total)


def measure(
    configurations: Sequence[Configuration], *, steps: int, module: str = "benchmarks.plan_ranking"
) -> dict[str, float]:
    """Seconds of a step of each: the least of rank 0's. One launch for those with equally many ranks.

    Args:
        configurations: to run.
        steps: of each.
        module: whose `--worker` runs them.
    """
    found: dict[str, float] = {}
    root = Path(__file__).parent.parent
    for ranks in dict.fromkeys(c.ranks for c in configurations):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "seconds.json"
            wanted = json.dumps([asdict(c) for c in configurations if c.ranks == ranks])
            command = [
                *(sys.executable, "-c", "from fullshard.cli.main import main; main()", "launch", "--quiet", "--cpu"),
                *("--config_file", "none", "--num_processes", str(ranks), "--num_cpu_threads_per_process", "1"),
                *("-m", module, "--worker", wanted, str(steps), str(out)),
            ]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
            seconds: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
            found |= {name: min(values) for name, values in seconds.items()}
    return found


def work(configurations: Sequence[Configuration], steps: int, out: Path, **how: Any) -> None:
    """One rank: each configuration in turn, as `run_steps` is told."""
    import torch

    from fullshard.launch import init_process_group_from_environment

    environment = init_process_group_from_environment(torch.device("cpu"))
    seconds = {c.name: run_steps(c, steps, seed=1 + environment.rank, **how) for c in configurations}
    if environment.is_main:
        out.write_text(json.dumps(seconds), encoding="utf-8")


def run_steps(
    configuration: Configuration,
    steps: int,
    *,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    fused: bool | None = None,
) -> list[float]:
    """Seconds of `steps` steps; two more before are not counted.

    Args:
        configuration: what is run.
        steps: how many.
        seed: of the tokens.
        clock: tells seconds.
        fused: AdamW in one operation; None: as torch chooses.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fullshard import MixedPrecisionPolicy, shard_model
    from fullshard.features.recompute import checkpoint_modules
    from fullshard.features.unit_selection import unit_modules

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    units = unit_modules(model)
    if configuration.checkpointing == "full":
        checkpoint_modules(model, units)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if configuration.precision == "bf16" else None)
    shard_model(model, unit_modules=units, strategy=configuration.strategy, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MODEL["vocab_size"], (configuration.micro_batch, TOKENS), generator=generator)
    seconds = []
    for _ in range(steps + 2):
        begin = clock()
        for _ in range(configuration.accumulation):
            loss = model(input_ids=tokens, labels=tokens).loss / configuration.accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock() - begin)
    return seconds[2:]


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation; there are no ties in times."""
    positions = [sorted(range(len(v)), key=v.__getitem__) for v in (one, other)]
    first, second = ({index: place for place, index in enumerate(order)} for order in positions)
    n = len(one)
    return 1 - 6 * sum((first[i] - second[i]) ** 2 for i in range(n)) / (n * (n**2 - 1))


def compare(calibration: Path, *, repeats: int, steps: int) -> dict[str, Any]:
    """Measure all configurations, and predict them."""
    times: dict[str, list[float]] = {c.name: [] for c in CONFIGURATIONS}
    for repeat in range(repeats):
        shift = repeat * len(CONFIGURATIONS) // repeats
        found = measure((*CONFIGURATIONS[shift:], *CONFIGURATIONS[:shift]), steps=steps)
        for name, seconds in found.items():
            times[name].append(seconds)
    rows: list[dict[str, Any]] = [
        {
            "configuration": configuration.name,
            "predicted_s": round(predict(configuration, calibration), 4),
            "measured_s": round(min(times[configuration.name]), 4),
            "all_s": [round(value, 4) for value in times[configuration.name]],
        }
        for configuration in CONFIGURATIONS
    ]
    correlation = spearman([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows])
    return {"rows": rows, "spearman": round(correlation, 3)}


def table(result: dict[str, Any]) -> str:
    """Side by side."""
    lines = [f"{'configuration':<52} predicted   measured   ratio"]
    for row in sorted(result["rows"], key=lambda row: row["measured_s"]):
        ratio = row["predicted_s"] / row["measured_s"]
        lines.append(
            f"{row['configuration']:<52} {row['predicted_s']:7.3f} s  {row['measured_s']:7.3f} s   {ratio:.2f}"
        )
    return "\n".join([*lines, f"Spearman's correlation: {result['spearman']:.2f}"])


def main() -> None:
    """Calibrate, predict, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--calibration", type=Path, help="a file of an earlier --calibrate instead of a new one")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        text, steps, out = arguments.worker
        work([Configuration(**values) for values in json.loads(text)], int(steps), Path(out))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        calibration = arguments.calibration or Path(directory) / "this.json"
        if arguments.calibration is None:
            from fullshard.api.calibration import calibrate

            calibrate(calibration)
        result = compare(calibration, repeats=arguments.repeats, steps=arguments.steps)
        result["calibration"] = json.loads(calibration.read_text(encoding="utf-8"))
    print(table(result))
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
