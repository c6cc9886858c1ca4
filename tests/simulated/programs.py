"""Programs that between them need every wait of the engine; run as a script, says which of them give a wrong number."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import sys
from pathlib import Path

import torch

from tests.simulated.features import (
    compare_replicas,
    fail_half_way,
    leave_out,
    look_at_whole,
    not_finite_on_one_rank,
    pretrained,
    save_meanwhile,
    take_views,
    update_beside,
)
from tests.simulated.steps import host_waits_as_known
from tests.simulated.training import (
    Case,
    Program,
    change,
    change_in_turn,
    differences,
    hook,
    look,
    on_the_cpu,
    stage,
    train,
)


def _of_axes(name: str, case: Case, kind: str) -> list[torch.Tensor]:
    """Only who runs these imports what they need, which takes seconds."""
    program: Program = getattr(importlib.import_module("tests.simulated.axes"), name)
    return program(case, kind)


_CONTEXT, _SEQUENCE, _EXPERT = (
    functools.partial(_of_axes, f"{what}_parallel") for what in ("context", "sequence", "expert")
)
AXES: dict[str, tuple[Program, Case]] = {
    "context parallel": (_CONTEXT, Case(ranks=2)),
    "context parallel, on host": (_CONTEXT, Case(ranks=2, offload="everything", activations="on host")),
    "context parallel, four ranks": (_CONTEXT, Case(ranks=4)),
    "sequence parallel": (_SEQUENCE, Case(ranks=2)),
    "sequence parallel, on host": (_SEQUENCE, Case(ranks=2, offload="everything", activations="on host")),
    "sequence parallel, four ranks": (_SEQUENCE, Case(ranks=4)),
    "expert parallel": (_EXPERT, Case(ranks=2)),
    "expert parallel, on host": (_EXPERT, Case(ranks=2, offload="everything")),
    "expert parallel, sharded": (_EXPERT, Case(ranks=4)),
}
"""Sequences or experts are divided among ranks."""

PROGRAMS: dict[str, tuple[Program, Case]] = {
    "two ranks": (train, Case(ranks=2)),
    "two ranks, bf16": (train, Case(ranks=2, precision="bf16", loop="accumulating")),
    "packed": (train, Case(ranks=2, precision="packed")),
    "main weights": (train, Case(offload="main weights", precision="bf16")),
    "everything": (train, Case(offload="everything")),
    "everything, two ranks": (train, Case(ranks=2, offload="everything", optimizer="SGD")),
    "optimizer state": (train, Case(offload="optimizer state")),
    "activations": (train, Case(activations="on host")),
    "compute shards": (train, Case(offload="compute shards", parameters="adapters", precision="bf16")),
    "scaled": (train, Case(offload="everything", precision="fp16")),
    "scaled, fused": (train, Case(offload="main weights", precision="fp16", optimizer="fused")),
    "changed at once": (change, Case(offload="everything", precision="bf16")),
    "changed at once, frozen": (change, Case(offload="compute shards", parameters="frozen")),
    "changed at once, all frozen but some": (change, Case(offload="everything", parameters="adapters")),
    "changed at once, in turn": (change_in_turn, Case(offload="everything")),
    "state looked at": (look, Case(offload="optimizer state")),
    "staged": (stage, Case()),
    "hook": (hook, Case()),
    "hook, main weights": (hook, Case(offload="main weights")),
    "matrices": (train, Case(ranks=2, optimizer="Muon")),
    "matrices of replicas": (train, Case(ranks=2, strategy="NO_SHARD", optimizer="on owners")),
    "extended": (train, Case(ranks=2, parameters="extended")),
    "composed": (train, Case(ranks=2, parameters="composed")),
    "coded": (train, Case(ranks=2, parameters="coded", precision="bf16")),
    "coded, everything": (train, Case(ranks=2, parameters="coded", offload="everything")),
    "coded, compute shards": (train, Case(parameters="coded", offload="compute shards", precision="bf16")),
    "left out": (leave_out, Case(ranks=2)),
    "updated beside": (update_beside, Case(ranks=2)),
    "failed half-way": (fail_half_way, Case(ranks=2)),
    "not finite on one rank": (not_finite_on_one_rank, Case(ranks=2)),
    "replicas": (compare_replicas, Case(ranks=3, strategy="NO_SHARD")),
    "looked at whole": (look_at_whole, Case(ranks=2, precision="bf16")),
    "looked at whole, everything": (look_at_whole, Case(offload="everything")),
    "views": (take_views, Case(ranks=2)),
    "saved meanwhile": (save_meanwhile, Case(offload="main weights")),
    "saved": (save_meanwhile, Case(ranks=2)),
    "host waits": (host_waits_as_known, Case()),
    "host waits, two ranks": (host_waits_as_known, Case(ranks=2)),
    "pretrained": (pretrained, Case(ranks=2)),
    **AXES,
}


def main(expected: str, names: list[str]) -> None:
    """Say which of these programs, or of all, do not give what a file expects, which is made if there is none."""
    import tests.simulated.group  # noqa: F401 -- makes the device the accelerator

    faulthandler.enable()
    if not Path(expected).exists():
        torch.save({name: on_the_cpu(case, program) for name, (program, case) in PROGRAMS.items()}, expected)
        return
    values = torch.load(expected)
    for name in names or PROGRAMS:
        program, case = PROGRAMS[name]
        if wrong := differences(case, 1, program, values[name]):
            print(f"{name} ({', '.join(line.split(':')[0] for line in wrong)})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # a program that went wrong may have left threads inside a backward, which the end of Python aborts
