"""Steps of fullshard and FSDP2 as rank 0 of many on one device, in turns: the record of `fullshard rehearse` on a GPU.

    python -m benchmarks.rehearsal [--rows llama-1b qwen3-30b-nf4 ...] [--ranks 8 64 1024] [--repeats 2]
    python -m benchmarks.rehearsal --device cpu --quick

Both engines run in one process over the process group of a rehearsal, whose messages take the time of H100's links.
Weights are random. Compute is in bfloat16; what is trained has float32 main weights, what is frozen is in bfloat16.
Each turn builds the model, shards it layer by layer, and trains. After the warm-up, every second step has free links:
the difference of the two medians is the exposed communication. Peaks are of the steps after the warm-up. In
`qwen3-30b-nf4`, fullshard stores the frozen weights of layers in NF4. FSDP2 cannot, so it has them in bfloat16. All
experts there get equally many tokens.

The result goes to `benchmarks/results/DEVICE-rehearsal.json` after each row. Rows that are in it are not measured
again, and none starts after `--seconds`: repeat the command until it says that nothing is left. A repeated command
refuses a record of another commit or accelerator. The losses are there to see that both train; they mean nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import fullshard
from benchmarks.record import RESULTS, describe_machine, git_state
from fullshard.api.rehearsal.group import register
from fullshard.api.rehearsal.lines import Links
from fullshard.api.rehearsal.meter import now, seconds_between
from fullshard.api.rehearsal.stage import replacements
from fullshard.api.virtual.device import instead
from fullshard.api.virtual.simulation import transformers_model
from fullshard.core.errors import FullshardError
from fullshard.features import meta_parameters
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.library import MODELS

ENGINES = ("fullshard", "fsdp2")
WARM_UP = 3
LORA_RANK = 16
MEASURED = ("step_seconds", "exposed_seconds", "allocated_nbytes", "reserved_nbytes")


@dataclass(frozen=True, slots=True)
class Row:
    """What is trained.

    Attributes:
        model: a name in `plan.library`.
        tokens: in the one sequence of a step.
        checkpointing: whether layers are recomputed.
        form: in which fullshard stores frozen weights, or None for bfloat16.
        is_lora: whether adapters are trained on a frozen model.
    """

    model: str
    tokens: int
    checkpointing: bool = False
    is_lora: bool = False
    form: str | None = None


ROWS = {
    "llama-1b": Row("Llama-3.2-1B", 4096),
    "llama-1b-checkpointed": Row("Llama-3.2-1B", 4096, checkpointing=True),
    "llama-8b": Row("Llama-3.1-8B", 2048),
    "llama-8b-checkpointed": Row("Llama-3.1-8B", 4096, checkpointing=True),
    "llama-8b-lora": Row("Llama-3.1-8B", 2048, is_lora=True),
    "qwen3-30b-nf4": Row("Qwen3-30B-A3B", 2048, checkpointing=True, is_lora=True, form="nf4"),
}
TINY: dict[str, int] = {
    "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 256,
}  # fmt: skip
"""Sizes with `--quick`, of the fields that a model has."""


def build(row: Row, engine: str, device: torch.device, *, is_tiny: bool) -> nn.Module:
    """Return the sharded model. Each layer gets its values and is sharded before the next one gets its own."""
    values: dict[str, Any] = MODELS[row.model]
    values = {**values, **{name: size for name, size in TINY.items() if is_tiny and name in values}}
    with meta_parameters():
        model: Any = transformers_model(values, attention="sdpa")()
    model.train()
    if row.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if row.is_lora:
        import peft

        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        with meta_parameters():
            model = peft.get_peft_model(model, peft.LoraConfig(r=LORA_RANK, target_modules=attention))
    shard: Any = fullshard.fully_shard if engine == "fullshard" else fsdp.fully_shard
    policy: Any = (fullshard if engine == "fullshard" else fsdp).MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    torch.manual_seed(0)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for router in (module for module in model.modules() if type(module).__name__.endswith("TopKRouter")):
        router.register_forward_hook(spread)
    for part in (*layers, model):
        materialize(part, device)
        if part is not model and row.form and engine == "fullshard":
            fullshard.quantize(part, row.form)
        shard(part, mp_policy=policy)
    return model  # type: ignore[no-any-return]


def spread(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Let a router choose all experts equally often. The weights that copies of rank 0 give it would choose a few."""
    logits, scores, chosen = output
    return logits, scores, (torch.arange(chosen.numel(), device=chosen.device) % router.num_experts).view_as(chosen)


def materialize(part: nn.Module, device: torch.device) -> None:
    """Give random values to the parameters of a part that have none."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # because modules may share a parameter
    for module in part.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in made:
                dtype = torch.float32 if param.requires_grad else torch.bfloat16
                value = torch.ones(param.shape, dtype=dtype, device=device)
                made[param] = nn.Parameter(value if param.ndim == 1 else value.normal_(0, 0.02), param.requires_grad)
            module._parameters[name] = made[param]


@contextlib.contextmanager
def rehearsed(ranks: int, device: torch.device) -> Iterator[Links]:
    """Be rank 0 of so many H100, 8 on each host."""
    cluster = parse_cluster(f"{ranks}xH100")
    sizes = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": cluster.per_host}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    links = Links(cluster)
    with register(links.line), contextlib.ExitStack() as stack:
        for place, function in replacements().items():
            stack.enter_context(instead(place.owner, place.name, function))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=ranks, store=dist.HashStore())
        try:
            yield links
        finally:
            dist.destroy_process_group()


def measure(model: nn.Module, row: Row, links: Links, device: torch.device, *, steps: int, tokens: int) -> Any:
    """Train, and return what is measured: seconds, bytes, and one loss per step, warm-up included."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batch = torch.randint(TINY["vocab_size"], (1, tokens), device=device)
    losses, ends = [], list[tuple[Any, bool]]()
    for step in range(WARM_UP + steps):
        links.is_free = step > WARM_UP and (step - WARM_UP) % 2 == 1
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        ends.append((now(), links.is_free))
        if step == WARM_UP - 1 and device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
    spans: dict[bool, list[float]] = {False: [], True: []}
    for (before, _), (end, is_free) in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False):
        spans[is_free].append(seconds_between(before, end))
    linked, free = (statistics.median(spans[kind]) for kind in (False, True))
    is_cpu = device.type == "cpu"
    return {
        "step_seconds": linked,
        "exposed_seconds": max(0.0, linked - free),
        "allocated_nbytes": 0 if is_cpu else torch.accelerator.max_memory_allocated(),
        "reserved_nbytes": 0 if is_cpu else torch.accelerator.max_memory_reserved(),
        "losses": [float(loss) for loss in losses],
    }


def turn(row: Row, ranks: int, engine: str, device: torch.device, *, steps: int, is_tiny: bool) -> dict[str, Any]:
    """Return what an engine measures, or its error. Nothing of it stays in memory."""
    try:
        with rehearsed(ranks, device) as links:
            model = build(row, engine, device, is_tiny=is_tiny)
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
            tokens = 32 if is_tiny else row.tokens
            found: dict[str, Any] = measure(model, row, links, device, steps=steps, tokens=tokens)
    except (RuntimeError, FullshardError) as error:
        found = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    model = None  # type: ignore[assignment]
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return {"engine": engine, **found}


def ratios(turns: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return ours / FSDP2's: the medians of the ratios within pairs of turns, or None where there is nothing."""
    by_engine = {engine: [found for found in turns if found["engine"] == engine] for engine in ENGINES}
    pairs = [
        (ours, theirs) for ours, theirs in zip(*by_engine.values(), strict=True) if not {"error"} & {*ours, *theirs}
    ]
    return {
        name: statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
        if pairs and all(theirs[name] for _, theirs in pairs)
        else None
        for name in MEASURED
    }


def opened(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the record to append to: the one in the file, or else a new one.

    Raises:
        SystemExit: the file's record is of another commit or accelerator.
    """
    if not path.is_file():
        return fresh
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, part in (("commit", "commit"), ("dirty", "dirty"), ("is_quick", "is_quick"), ("machine", "accelerators")):
        before, here = (found[name] if name == part else found[name][part] for found in (record, fresh))
        if before != here:
            sys.exit(f"{path.name} was measured with {part} {before}, here it is {here}: delete it to measure anew")
    record["commands"] += fresh["commands"]
    return record


def missing(record: dict[str, Any], rows: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Return what a record does not have yet, in order."""
    found = {(row["row"], row["ranks"]) for row in record["rows"]}
    return [(row, count) for row in rows for count in ranks if (row, count) not in found]


def fill(
    record: dict[str, Any], path: Path, left: Sequence[tuple[str, int]], run: Callable[[str, int, str], Any], *,
    repeats: int, until: float,
) -> int:  # fmt: skip
    """Measure what is left, and write the record after each row. Return how many rows were left out for want of time.

    The engines take turns, and each repeat begins with the other one.
    """
    for number, (name, ranks) in enumerate(left):
        if time.monotonic() > until:
            return len(left) - number
        turns = [run(name, ranks, engine) for repeat in range(repeats) for engine in ENGINES[:: (-1) ** repeat]]
        row = {"row": name, **dataclasses.asdict(ROWS[name]), "ranks": ranks, "turns": turns, "ratios": ratios(turns)}
        record["rows"].append(row)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for found in turns:
            print(f"{name}, {ranks} ranks, {found['engine']}: {_said(found)}", flush=True)
        shown = {key: ratio and round(ratio, 3) for key, ratio in row["ratios"].items()}
        print(f"{name}, {ranks} ranks, fullshard / FSDP2: {shown}", flush=True)
    return 0


def _said(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    times = ", ".join(f"{name.partition('_')[0]} {1e3 * found[name]:.1f} ms" for name in MEASURED[:2])
    sizes = ", ".join(f"{name.partition('_')[0]} {found[name] / 2**30:.2f} GiB" for name in MEASURED[2:])
    return f"{times}, {sizes}, losses {' '.join(f'{loss:.4f}' for loss in found['losses'])}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="after the warm-up, half of them with free links")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row later than this")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps: expected 2 or more, because one in two has free links")
    device, until = torch.device(options.device), time.monotonic() + options.seconds
    path = options.output or RESULTS / f"{options.device}-rehearsal{'-quick' * options.quick}.json"
    commit, dirty = git_state()
    fresh = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commands": [shlex.join(["python", "-m", "benchmarks.rehearsal", *arguments])],
        "commit": commit,
        "dirty": dirty,
        "machine": dataclasses.asdict(describe_machine()),
        "is_quick": options.quick,
        "rows": [],
    }
    record = opened(path, fresh)

    def run(name: str, ranks: int, engine: str) -> Any:
        return turn(ROWS[name], ranks, engine, device, steps=options.steps, is_tiny=options.quick)

    print(f"on {', '.join(record['machine']['accelerators']) or record['machine']['cpu']}")
    left = missing(record, options.rows, options.ranks)
    waiting = fill(record, path, left, run, repeats=options.repeats, until=until)
    print(f"{waiting} rows left: run the same command again" if waiting else "nothing is left", f"record: {path}")
    return int(any("error" in found for row in record["rows"] for found in row["turns"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
