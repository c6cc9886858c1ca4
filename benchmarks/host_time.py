"""What an engine costs the host per unit and step, at many ranks: ours and FSDP2's beside a model that is not sharded.

    python -m benchmarks.host_time [--repeats 9] [--world-sizes 64 1024]

One process plays rank 0 of W over torch's fake process group. Its collectives take time that grows with W, for they
copy one rank's data to all places, so both engines are given collectives that return at once: what is left is the
engine's own work. The model is a Llama of 32 small layers, so that arithmetic is next to nothing. Forward and backward
are timed apart from the optimizer step; the time of the unsharded model is subtracted. In the rows `lora` the base is
frozen and PEFT's LoRA adapters train: many tiny parameters.

Times are CPU times of the one thread there is, but what else the machine does still shows in them. So engines take
turns, and what counts is the median over the turns of what one costs beyond the bare model, and of its ratio to FSDP2
within a turn; they go to `benchmarks/results/host-time.json`. Losses have no meaning here.

Python's garbage collector works between turns only, and freed memory stays with the process: a full collection costs
what all three models together have made, and giving memory back to the kernel is paid by whichever engine happens to be
at the end of the heap. Neither says anything about an engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

RESULT = Path(__file__).parent / "results" / "host-time.json"
LAYERS = 32
ENGINES = ("bare", "fsdp2", "fullshard")
STEPS = 5
"""Steps of each engine per turn, of which the median counts."""
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""Has glibc keep what is freed; the second is the largest that it takes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine's model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """Seconds of forward with backward, and of the optimizer step with `zero_grad`."""
        begin = time.process_time()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        middle = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return middle - begin, time.process_time() - middle


def build_model(*, lora: bool) -> nn.Module:
    """A Llama of small layers; with `lora`, adapters on every linear layer and all else frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer layers."""
    return [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]


class AtOnce:
    """FSDP2's interface to collectives; nothing is communicated."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the result, as by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: object, **kwargs: object) -> Self:
        """Nothing."""
        return self

    def wait(self) -> None:
        """Nothing."""


def shard(model: nn.Module, engine: str) -> None:
    """Make every layer and the whole model a unit of `engine`; nothing for the bare model."""
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for module in (*layers_of(model), model):
            unit = fully_shard(module)
            unit.set_custom_all_gather(AtOnce())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(AtOnce())  # type: ignore[arg-type]
    if engine == "fullshard":
        from benchmarks.at_once import mesh_at_once
        from fullshard import shard_model

        mesh = mesh_at_once(dist.get_world_size())
        shard_model(model, unit_modules=layers_of(model), mesh=mesh)


def measure(world_size: int, repeats: int, *, lora: bool, fused: bool) -> dict[str, object]:
    """One row: milliseconds per unit and step beyond the bare model, and of the optimizer step."""
    tokens = torch.arange(8).reshape(1, 8)
    candidates = {}
    for engine in ENGINES:
        model = build_model(lora=lora)
        shard(model, engine)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        candidates[engine] = Candidate(model, torch.optim.AdamW(trained, lr=1e-3, fused=fused))
    seconds: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
    for repeat in range(repeats + 1):
        gc.collect()
        for engine, candidate in candidates.items():
            steps = [candidate.step(tokens) for _ in range(STEPS)]
            if repeat:  # the first warms up
                seconds[engine].append(tuple(statistics.median(part) for part in zip(*steps, strict=True)))
    units = LAYERS + 1

    def per_unit(engine: str) -> list[float]:
        return [(a[0] - b[0]) / units * 1e3 for a, b in zip(seconds[engine], seconds["bare"], strict=True)]

    ratios = [a / b for a, b in zip(per_unit("fullshard"), per_unit("fsdp2"), strict=True)]

    def step(engine: str) -> float:
        return statistics.median(value[1] for value in seconds[engine]) * 1e3

    return {
        "world_size": world_size,
        "trained": "lora" if lora else "all",
        "adamw": "fused" if fused else "default",
        "unit_ms": {engine: round(statistics.median(per_unit(engine)), 4) for engine in ENGINES[1:]},
        "unit_ratio": round(statistics.median(ratios), 3),
        "optimizer_ms": {engine: round(step(engine), 3) for engine in ENGINES},
        "optimizer_ratio": round(step("fullshard") / step("fsdp2"), 3),
    }


def _play(world_size: int, repeats: int) -> list[dict[str, object]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    torch.set_num_threads(1)
    gc.disable()
    rows = [measure(world_size, repeats, lora=lora, fused=fused) for lora in (False, True) for fused in (True, False)]
    dist.destroy_process_group()
    return rows


def main(show: Callable[[str], None] = print) -> None:
    """Measure in a process per world size, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--play", action="store_true", help="measure here, and print the rows as JSON")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.play:
        show(json.dumps(_play(arguments.world_sizes[0], arguments.repeats)))
        return
    rows = []
    for world_size in arguments.world_sizes:
        command = [sys.executable, "-m", "benchmarks.host_time", "--play", "--repeats", str(arguments.repeats)]
        command += ["--world-sizes", str(world_size)]
        environment = os.environ | KEEP_MEMORY
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800, env=environment)
        rows += json.loads(done.stdout.splitlines()[-1])
    record = {"torch": version("torch"), "layers": LAYERS, "repeats": arguments.repeats, "rows": rows}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        show(json.dumps(row))


if __name__ == "__main__":
    main()
