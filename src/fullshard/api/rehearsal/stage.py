"""Prepares a process so that a script runs in it as one rank of many, then runs and measures the script.

`fullshard rehearse` calls `main` in a new process, whose arguments are OPTIONS script PATH ARGUMENTS...
`OPTIONS` are the options of `fullshard rehearse` as JSON, and its output file. The rest is as for `launch/bootstrap`.
"""

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch.distributed import fsdp

import fullshard
from fullshard.api import torch_private
from fullshard.api.rehearsal import saves, waits
from fullshard.api.rehearsal.group import NAME, RehearsedGroup, register, unknown
from fullshard.api.rehearsal.lines import Links, processor_seconds
from fullshard.api.rehearsal.messages import messages_of
from fullshard.api.rehearsal.meter import Meter
from fullshard.comm.select import register_backend
from fullshard.core.files import write_text
from fullshard.core.imports import Replaced, after_import, replace
from fullshard.launch import bootstrap, journal, take
from fullshard.plan.hardware import find_device, parse_cluster


def main() -> None:
    """Run the script that the command line names, and write the measurements if it succeeds."""
    options = json.loads(sys.argv.pop(1))
    cluster = of_links = parse_cluster(options["devices"])
    if options["links"] not in (None, "free"):
        of_links = dataclasses.replace(cluster, device=find_device(options["links"]))
    spent = processor_seconds() if cluster.device.is_cpu else 0.0
    links = Links(of_links, is_free=options["links"] == "free", processor=spent)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(_variables(options["rank"], cluster.count, cluster.per_host, store.port))
    if cluster.device.is_cpu:
        register_backend(messages_of)
    if options["engine"] == "torch":
        _use_torchs_engine()
    with register(links.line):
        replace(replacements())
        _write_below(f"{options['answer']}.output")
        meter = Meter(links, options["steps"], cluster)
        code: Any = 0
        try:
            bootstrap.main()
        except SystemExit as end:
            code = end.code
        write_text(Path(options["answer"]), json.dumps({"unknown": unknown} if code else meter.answer()))
        sys.exit(code)


def _write_below(folder: str) -> None:
    """Let Trainer, Accelerator and the journal write below a folder, so that files of real runs stay as they are."""

    def below(path: Any) -> Any:
        return path if not path or any(s in str(path) for s in ("://", folder)) else f"{folder}{Path(path).absolute()}"

    def settle(module: Any) -> None:
        begin = Replaced.of(module.TrainingArguments, "__post_init__")
        replace({begin: lambda t: begin.torchs(t) or t.__dict__.update(output_dir=below(t.output_dir))})

    after_import("transformers.training_args", settle)
    record, place = Replaced.of(journal, "record_events"), Replaced.of(ProjectConfiguration, "set_directories")
    replace({record: lambda d: record.torchs(below(d)), place: lambda config, d=None: place.torchs(config, below(d))})


def _use_torchs_engine() -> None:
    """Let the script import torch's `fully_shard` and its kin from fullshard, as `launch/take` does the other way."""
    for name in take.NAMES:
        setattr(fullshard, name, getattr(fsdp, name))
    vars(fullshard)["describe"] = lambda model: f"{type(model).__name__} is sharded by torch's engine"


def _variables(rank: int, count: int, per_host: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank."""
    devices = torch.accelerator.device_count() or per_host
    host, local = divmod(rank, per_host)
    values = {
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_RANK": local if local < devices else 0,  # the device at hand stands for the one of this rank
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": count // per_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # or rank 0 would wait for the others to connect
        "TORCHELASTIC_RUN_ID": NAME,
    }
    return {name: str(value) for name, value in values.items()}


def replacements() -> dict[Replaced, Any]:
    """Return replacements for torch's functions, so that groups with any backend are rehearsed."""
    groups = torch_private.groups_made

    def make_group(size: int, rank: int, ranks: Any, asked: str, *given: Any, **named: Any) -> Any:
        named = {**named, "backend_options": None, "device_id": None}
        group, store = groups.torchs(size, rank, ranks, dist.Backend(NAME), *given, **named)
        if isinstance(group, RehearsedGroup):
            torch_private.call_backend(group, asked)
        return group, store

    received = (Replaced.of(dist, f"{what}_object_list") for what in ("broadcast", "scatter", "recv"))
    return {
        groups: make_group,
        Replaced.of(dist, "split_group"): _split,
        **{r: _keep_objects(r) for r in received},
        **saves.replacements(),
        **waits.replacements(),
    }


def _split(
    parent_pg: Any = None, split_ranks: Any = (), timeout: Any = None, pg_options: Any = None, *given: Any, **named: Any
) -> Any:
    """Make the part of a group that this rank is in."""
    members, own = dist.get_process_group_ranks(parent_pg), dist.get_rank(parent_pg)
    ranks = next((ranks for ranks in split_ranks if own in ranks), None)
    backend = dist.get_backend(parent_pg)
    return ranks and dist.new_group([members[rank] for rank in ranks], timeout=timeout, backend=backend)


def _keep_objects(place: Replaced) -> Callable[..., Any]:
    """Wrap a function that receives objects, so that a list keeps its objects if another rank would send them."""
    signature = inspect.signature(place.torchs)

    @functools.wraps(place.torchs)
    def receive(*given: Any, **named: Any) -> Any:
        words = signature.bind(*given, **named).arguments
        if (root := waits.sender(words)) == dist.get_rank():
            return place.torchs(*given, **named)
        unknown[f"{place.name} from rank {root}"] += 1
        waits.note(f"{place.name} from rank {root}")
        return root

    return receive
