"""Peak host memory of each rank while a pretrained model is loaded and sharded: ours, Transformers with Accelerate.

    python -m benchmarks.loading [--form nf4] [--layers 16]

A Llama of 1.1 billion parameters (16 layers; made here, with random weights, stored in bf16) is loaded on two ranks of
this host: with float32 weights, or quantized to 4 bits on the way. Accelerate has `cpu_ram_efficient_loading` on. What
a rank may take is its shard and the largest unit; the loss of a first batch shows that both loaded the same model.
The result goes to `benchmarks/results/loading-FORM.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RANKS = 2
LOADERS = ("fullshard", "accelerate")
FORMS = ("float32", "nf4")
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


class Peak:
    """The most memory this process held beyond what it held before: anonymous and shared pages, not mapped files."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Sample every 2 ms until the block ends."""
        before = _held_nbytes()

        def watch() -> None:
            while not self._stop.wait(0.002):
                self.nbytes = max(self.nbytes, _held_nbytes() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            self.nbytes = max(self.nbytes, _held_nbytes() - before)
            self._stop.set()
            thread.join()


def _held_nbytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def load_with_fullshard(directory: str, options: dict[str, Any], peak: Peak) -> Any:
    """Weights straight into shards."""
    from transformers import AutoModelForCausalLM

    import fullshard

    accelerator = fullshard.Accelerator(cpu=True)
    with peak.measured():
        model: Any = fullshard.from_pretrained(AutoModelForCausalLM, directory, **options)
        if "quantization_config" in options:
            model.requires_grad_(False)
        return accelerator.prepare(model)


def load_with_accelerate(directory: str, options: dict[str, Any], peak: Peak) -> Any:
    """Rank 0 reads the model, the others have it on the meta device; then it is sharded and sent around.

    Accelerate leaves FSDP out on CPUs, so it is told here that FSDP is on. All that follows is its own.
    """
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    with peak.measured():
        model = AutoModelForCausalLM.from_pretrained(directory, **options)
        if "quantization_config" in options:
            model.requires_grad_(False)
        # It shards a model only together with an optimizer, which takes no memory before its first step.
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def work(loader: str, form: str, directory: str, result: str) -> None:
    """Load on this rank, and write down what it took."""
    import torch

    torch.set_num_threads(1)
    options: dict[str, Any] = {"dtype": torch.float32}
    if form == "nf4":
        from transformers import BitsAndBytesConfig

        options = {
            "dtype": torch.bfloat16,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
                bnb_4bit_quant_storage=torch.bfloat16,
            ),
        }
    peak, begin = Peak(), time.perf_counter()
    load = load_with_fullshard if loader == "fullshard" else load_with_accelerate
    facts: dict[str, Any] = {}
    try:
        model = load(directory, options, peak)
        local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        facts["shard_nbytes"] = sum(p.nbytes for p in local)
        facts["seconds"] = round(time.perf_counter() - begin, 2)
        with torch.no_grad():
            ids = torch.arange(16)[None] * 7
            facts["loss"] = float(model(input_ids=ids, labels=ids).loss)
    except Exception as error:  # a peer that cannot do it is a result, too
        facts["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    Path(result).write_text(json.dumps({"peak_nbytes": peak.nbytes, **facts}), encoding="utf-8")
    os._exit(0)  # the other rank may wait in a collective that this one has left


def measure(loader: str, form: str, directory: str) -> list[dict[str, Any]]:
    """Start the ranks, and collect what each wrote down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as results:
        processes = []
        for rank in range(RANKS):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true",
            }  # fmt: skip
            words = [sys.executable, "-m", "benchmarks.loading", "--worker", loader, form, directory]
            processes.append(subprocess.Popen([*words, f"{results}/{rank}"], env=environment))
        deadline = time.monotonic() + 240
        for process in processes:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        paths = [Path(results, str(rank)) for rank in range(RANKS)]
        return [json.loads(p.read_text()) if p.exists() else {"error": "ended without a result"} for p in paths]


def make_model(directory: str, layers: int) -> dict[str, int]:
    """Write the model; returns its parameters, and the bytes of its largest unit in each form."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPE, vocab_size=32000, num_hidden_layers=layers, dtype="bfloat16")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="1GB")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    rest = sum(p.numel() for p in model.parameters()) - layers * layer  # the root's: embeddings and head
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "float32": 4 * max(layer, rest),
        # While it is quantized, a unit's largest weight is there in bf16, too; the root stays in bf16.
        "nf4": max(layer * 17 // 32 + 2 * SHAPE["hidden_size"] * SHAPE["intermediate_size"], 2 * rest),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, default=FORMS[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
    with tempfile.TemporaryDirectory() as directory:
        facts = make_model(directory, arguments.layers)
        ranks = {loader: measure(loader, arguments.form, directory) for loader in LOADERS}
    unit = facts[arguments.form]
    packages = ("fullshard", "torch", "transformers", "accelerate", "bitsandbytes")
    record = {
        "what": "peak bytes of each of 2 ranks while loading and sharding, beyond what it held before",
        "form": arguments.form,
        "parameters": facts["parameters"],
        "largest_unit_nbytes": unit,
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in packages},
        "ranks": ranks,
        "fullshard_over_shard_and_unit": [
            round(rank["peak_nbytes"] / (rank["shard_nbytes"] + unit), 3) for rank in ranks["fullshard"]
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"loading-{arguments.form}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
