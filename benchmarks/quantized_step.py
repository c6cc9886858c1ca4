"""Time of a training step: weights quantized at rest, and the layers of bitsandbytes, on the same dense model.

    python -m benchmarks.quantized_step [--ranks 2] [--repeats 9]
    python -m benchmarks.quantized_step --device cuda --ranks 1 --output benchmarks/results/cuda-quantized-step.json

A Llama in bf16 has LoRA adapters on every linear layer; this engine shards it. It has four small layers on a CPU, and
sixteen of the size of Llama 3.2 1B on a GPU. In `layers` its linear layers are bitsandbytes' Linear4bit, which decode
a weight whenever they multiply by it. In `at-rest` they are ordinary ones whose weights `fullshard.quantize` stores
as the same NF4 codes, decoded once per unit and pass. They take turns in the same processes. What counts is the
median of the ratios within a turn: of the time, and of the CPU time of rank 0, which shows less of what else the
machine does. The losses are there to compare.
The result goes to `benchmarks/results/quantized-step.json`, with the load of the machine before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

RESULT = Path(__file__).parent / "results" / "quantized-step.json"
WAYS = ("layers", "at-rest")
SHAPES: dict[str, dict[str, int]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_hidden_layers": 4},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16},
}
BATCHES = {"cpu": (4, 256), "cuda": (4, 1024)}
VOCABULARY = 8192
STEPS = 3
"""Steps of each per turn, of which the median counts."""


def build(way: str, device: torch.device, directory: str) -> Any:
    """Return the sharded model with adapters."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import fullshard

    options: dict[str, Any] = {}
    if way == "layers":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map=device, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    if way == "at-rest":
        fullshard.quantize(model, "nf4")
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    return fullshard.shard_model(model, unit_modules=layers, device=device)


def measure(rank: int, ranks: int, repeats: int, kind: str, directory: str) -> None:
    """Time both ways in turns on this rank, and write down what came out."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    device = torch.device(kind)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=f"file://{directory}/store", rank=rank, world_size=ranks
    )
    models = {way: build(way, device, directory) for way in WAYS}
    optimizers = {
        way: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for way, model in models.items()
    }
    tokens = torch.randint(0, VOCABULARY, BATCHES[kind], generator=torch.Generator().manual_seed(rank)).to(device)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}

    def step(way: str) -> tuple[float, float]:
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        loss = models[way](input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizers[way].step()
        optimizers[way].zero_grad()
        losses[way] = loss.item()
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    gc.disable()
    for repeat in range(repeats + 1):
        gc.collect()
        for way in WAYS if repeat % 2 else reversed(WAYS):
            steps = [step(way) for _ in range(STEPS)]
            if repeat:  # the first warms up
                seconds[way].append(tuple(statistics.median(part) for part in zip(*steps, strict=True)))
    Path(directory, f"rank{rank}").write_text(json.dumps({"seconds": seconds, "losses": losses}), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and record."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows, load = [], os.getloadavg()[0]
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(0)
            config = LlamaConfig(**SHAPES[arguments.device], num_key_value_heads=4, vocab_size=VOCABULARY)
            LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
            multiprocessing.spawn(measure, (ranks, arguments.repeats, arguments.device, directory), nprocs=ranks)
            found = json.loads(Path(directory, "rank0").read_text())
        row = {"ranks": ranks, "losses": found["losses"]}
        for which, name in enumerate(("ms", "cpu_ms")):
            taken = {way: [turn[which] * 1e3 for turn in found["seconds"][way]] for way in WAYS}
            ratios = [ours / theirs for ours, theirs in zip(taken["at-rest"], taken["layers"], strict=True)]
            row[name] = {way: round(statistics.median(turns), 1) for way, turns in taken.items()}
            row[name]["ratio"] = round(statistics.median(ratios), 3)
        rows.append(row)
        print(json.dumps(row))
    record = {
        "what": "milliseconds of a step, the median of turns; the ratio is the median of the ratios within a turn",
        "load_before": round(load, 2),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else f"{os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("fullshard", "torch", "transformers", "peft", "bitsandbytes")},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"load before: {load:.2f}")


if __name__ == "__main__":
    main()
