"""What ranks on simulated TPUs run: cases of `tests.simulated.training`, a checkpoint, a script's own loop.

fullshard launch --device tpu tests/simulated/tpu/script.py OUTCOME CASES

OUTCOME: a file for what is wrong, written by rank 0. CASES: JSON, a list of dicts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.comm.mesh import init_mesh
from fullshard.core.errors import ConfigError
from tests.simulated.training import Case, Model, made, optimizer_of, small_activations, train


def differences(cases: list[Case]) -> list[str]:
    """Those that do not give what they give on the CPU."""
    wrong = []
    with small_activations():
        for case in cases:
            try:
                found, expected = train(case, "tpu"), train(case, "cpu")
            except Exception as error:
                error.add_note(str(case))
                raise
            if not all(map(torch.equal, found, expected)):
                wrong.append(str(case))
    return wrong


def neighbours() -> list[str]:
    """Four ranks as two replicas, whose shards are on chips that are linked, as the documentation has it."""
    if dist.get_world_size() != 4:
        return []
    ranks = torch.get_device_module("tpu").distributed.topology_aware_mesh((2, 2)).sort(dim=1).values
    assert ranks.tolist() == [[0, 2], [1, 3]]
    found = []
    for device in (torch.device("tpu", 0), torch.device("cpu")):
        device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("replicate", "shard"))
        model = made(Case(), device, mesh=init_mesh(device=device, device_mesh=device_mesh))
        optimizer = optimizer_of(Case(), model)
        for step in range(2):
            tokens = (torch.arange(12, device=device).view(2, 6) + step + dist.get_rank()) % 11
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model, optimizer))
    return [] if all(map(torch.equal, *found)) else ["a mesh in the order of the links"]


def whole(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and their moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.full_tensor().detach().cpu() for p in parameters]
    return found + [optimizer.state[p]["exp_avg"].full_tensor().cpu() for p in parameters]


def move(directory: Path) -> list[str]:
    """Train on the TPU, save, and load on the CPU; and back."""
    wrong = []
    for here, there in (("tpu", "cpu"), ("cpu", "tpu")):
        found = []
        for kind in (here, there):
            model: Any = made(Case(), torch.device(kind))
            optimizer = optimizer_of(Case(), model)
            if kind == here:
                tokens = torch.arange(12, device=kind).view(2, 6) % 11
                model(tokens).float().square().mean().backward()
                optimizer.step()
                save_checkpoint(directory / here, model=model, optimizer=optimizer)
            else:
                load_checkpoint(directory / here, model=model, optimizer=optimizer)
            found.append(whole(model, optimizer))
        if not all(map(torch.equal, *found)):
            wrong.append(f"a checkpoint of the {here} on the {there}")
    return wrong


def loop() -> list[str]:
    """A script of Accelerate's kind."""
    accelerator = fullshard.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.device.type == "tpu", accelerator.device
    torch.manual_seed(1)
    model = Model(Case())
    rows: Any = [torch.arange(6)] * 8 * accelerator.num_processes
    data: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data)
    losses = []
    for tokens in loader:
        with accelerator.accumulate(model):
            assert tokens.device.type == "tpu"
            loss = model(tokens % 11).float().square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    accelerator.free_memory()
    return [] if losses[-1] < losses[0] else [f"losses {losses}"]


def refused() -> list[str]:
    """What is float16."""
    wrong = []
    try:
        made(Case(precision="fp16"), torch.device("tpu"))
        wrong.append("float16 is taken")
    except ConfigError as error:
        wrong += [] if "a TPU computes in bfloat16 and float32" in str(error) else [str(error)]
    model: Any = made(Case(), torch.device("tpu"))
    optimizer, scaler = optimizer_of(Case(), model), torch.amp.GradScaler("tpu")
    scaler.scale(model(torch.zeros(1, 3, dtype=torch.long, device="tpu")).sum()).backward()
    try:
        scaler.step(optimizer)
        wrong.append("a scaler is taken")
    except ConfigError as error:
        wrong += [] if "GradScaler is for float16" in str(error) else [str(error)]
    return wrong


def main() -> None:
    outcome, cases = Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])]
    wrong = loop() + refused() + differences(cases) + move(outcome.parent) + neighbours()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    if dist.get_rank() == 0:
        outcome.write_text(json.dumps({"wrong": everyone, "backend": str(dist.get_backend_config())}))


if __name__ == "__main__":
    main()
