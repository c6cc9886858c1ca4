"""The ranks of `fullshard doctor --run`, which measure their links, and check the collectives and a sharded step.

Run this module with three arguments: the path of the file for the outcomes, the device, and the number of seconds to
wait for other ranks. Rank 0 writes the file before every measurement and after every check, so that it shows what hung.
"""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.comm.base import Collectives
from fullshard.comm.select import choices_for
from fullshard.features import ShardedParameter, fully_shard
from fullshard.launch.device import name_of, synchronize
from fullshard.launch.environment import (
    RankEnvironment,
    init_process_group_from_environment,
    rank_device,
    read_rank_environment,
)
from fullshard.launch.network import interface_of, resolve
from fullshard.launch.worker import run_worker
from fullshard.plan.hardware import GB

_STEPS = 3
_TOLERANCE = 1e-5
_SYS, _NVIDIA = Path("/sys"), 0x10DE


def check_ranks(path: Path, kind: str, timeout: float) -> None:
    """Join the process group, measure links, run the checks, and write the outcomes. All ranks do this together."""
    device, log = rank_device(read_rank_environment(), kind), path.with_name(f"nccl{os.getpid()}.log")
    if device.type == "cuda" and "NCCL_DEBUG" not in os.environ:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    environment = init_process_group_from_environment(device, timeout_seconds=timeout)
    chosen = choices_for(dist.group.WORLD, device)[0]
    facts: dict[str, Any] = {
        "world size": environment.world_size,
        "device": device.type,
        "backend": dist.get_backend(),
        "collectives": chosen.name,
        "because": chosen.reason,
        "threads per rank": torch.get_num_threads(),
    }
    checks, links, ranks = dict[str, str](), list[dict[str, Any]](), _of_all(_facts(device, environment))
    outcome = {"checks": checks, "facts": facts, "links": links, "ranks": ranks}

    def write() -> None:
        if environment.is_main:
            path.write_text(json.dumps(outcome), encoding="utf-8")

    hosts = [rank["host"] for rank in ranks]
    for source, target in _pairs(hosts, shares_card=device.type == "cpu"):
        name, is_inside = f"{hosts[source]} to {hosts[target]}", hosts[source] == hosts[target]
        link = {
            "source": source,
            "target": target,
            "name": hosts[source] if is_inside else name,
            "is_inside": is_inside,
        }
        links.append(link | {"rate": 0.0, "lost": 0.0})  # what it is if this hangs
        write()
        links[-1] |= _of_all(_measure(source, target, device) if environment.rank in (source, target) else {})[source]
        facts[f"rank {source} to {target}"] = f"{links[-1]['rate'] / GB:.3g} GB/s"
    for rank, ways in zip(ranks, _of_all(ways_in(log.read_text() if log.exists() else "")), strict=True):
        rank["ways"] = ways
    for name, check in (
        ("all-gather and reduce-scatter", lambda: _check_collectives(chosen.collectives, device)),
        ("sharded steps against DDP", lambda: _check_step(device)),
    ):
        checks[name] = _worst(check())
        write()
    dist.barrier()
    dist.destroy_process_group()


def ways_in(log: str) -> list[str]:
    """Return the kinds of connections that NCCL's log mentions: P2P, SHM, NET/IB, NET/Socket."""
    return sorted(set(re.findall(r" via (P2P|SHM|NET/\w+)", log)))


def _facts(device: torch.device, environment: RankEnvironment) -> dict[str, Any]:
    """Return what this rank knows about its host: network, RDMA ports, variables, and what nvidia-smi says."""
    master = resolve(os.environ["MASTER_ADDR"], 5)
    with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((master, 9))  # sends nothing
        address = route.getsockname()[0]
    interface, fabric = interface_of(address) or "lo", {}
    for port in _SYS.glob("class/infiniband/*/ports/*"):
        if _number(port / "state") == 4:  # active
            card = next(port.parents[1].glob("device/net/*"), port)
            speed, mtu = _number(port / "rate") * GB / 8, _number(card / "mtu")
            fabric[port.parts[-3]] = {"port": card.name, "speed": speed, "mtu": mtu}
    slots = [slot for slot in _SYS.glob("bus/pci/devices/*") if _number(slot / "vendor") == _NVIDIA]
    gpus = [slot for slot in slots if _number(slot / "class") >> 16 == 3]  # displays
    smi = shutil.which("nvidia-smi") if device.type == "cuda" and environment.local_rank == 0 else None
    asked = {"topology": ["topo", "-m"], "peers": ["topo", "-p2p", "r"]}
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    return {
        "host": f"{socket.gethostname()} {address}",
        "device": name_of(device),
        "interface": interface,
        "mtu": _number(_SYS / "class/net" / interface / "mtu"),
        "speed": _number(_SYS / "class/net" / interface / "speed") * GB / 8000,
        "fabric": fabric,
        "lanes": {slot.name: [_number(slot / f"{which}_link_width") for which in ("current", "max")] for slot in gpus},
        "environ": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "ways": [],
    } | {name: run([smi, *words]).stdout if smi else "" for name, words in asked.items()}


def _number(path: Path) -> int:
    """Return the number at the beginning of a file in /sys, or 0 if the kernel does not know it."""
    try:
        return max(0, int(path.read_text().split()[0].rstrip(":"), 0))
    except (OSError, ValueError, IndexError):
        return 0


def _pairs(hosts: Sequence[str], *, shares_card: bool) -> Iterator[tuple[int, int]]:
    """Yield the links of a ring: neighbors in each host, and ranks of equal number in neighboring hosts."""
    groups = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    across = list(map(list, zip(*groups, strict=False)))
    for row in across[:1] if shares_card else [*groups, *across]:
        for one, other in zip(row, row[1:] + row[:1] * (len(row) > 2), strict=False):
            yield from ((one, other), (other, one))


def _measure(source: int, target: int, device: torch.device) -> dict[str, float]:
    """Measure one direction of a link as one of its ends. Return bytes per second, and the fraction of lost packets."""
    steps = [dist.send, dist.recv] if dist.get_rank() == source else [dist.recv, dist.send]
    other = target if dist.get_rank() == source else source

    def fastest(nbytes: int, times: int) -> float:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            for step, size in zip(steps, (nbytes, 1), strict=True):  # the second is the answer
                step(torch.empty(size, dtype=torch.uint8, device=device), other)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    before = _packets()
    least = fastest(2**10, 500)  # small, so that no queue is ever full: what is sent again was lost
    sent, again = (now - then for now, then in zip(_packets(), before, strict=True))
    nbytes = 2**23 if device.type == "cpu" else 2**28
    rate = nbytes / max(fastest(nbytes, 4) - least, 1e-9)
    return {"rate": rate, "lost": again / sent if again > 2 else 0.0}  # a busy host may be late once or twice


def _packets() -> tuple[int, int]:
    """Return how many TCP packets this host has sent, and how many of them again."""
    path = Path("/proc/net/snmp")  # Linux
    rows = [line.split() for line in path.read_text().splitlines() if line[:4] == "Tcp:"] if path.exists() else [[], []]
    counts = dict(zip(*rows, strict=True))
    return int(counts.get("OutSegs", 0)), int(counts.get("RetransSegs", 0))


def _of_all(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _worst(outcome: str) -> str:
    """Return, on every rank, the outcome of the first rank whose check failed, or of rank 0 if none failed."""
    outcomes = _of_all(outcome)
    wrong = [f"{text} (rank {rank})" for rank, text in enumerate(outcomes) if text.startswith("wrong")]
    return wrong[0] if wrong else outcomes[0]


def _check_collectives(collectives: Collectives, device: torch.device) -> str:
    size, rank, numel = collectives.size, collectives.rank, 1000
    buffer = collectives.full_buffer(size * numel, torch.float32, device, holds_main=False)
    gathered = buffer.gather(torch.full((numel,), rank + 1.0, device=device), tag=0).wait()
    expected = torch.arange(1, size + 1, device=device).repeat_interleave(numel)
    if not torch.equal(gathered, expected.to(gathered.dtype)):
        return "wrong: an all-gather returned different elements from those that the ranks sent"
    reduced = collectives.reduce_scatter(gathered.clone() * (rank + 1), tag=1).wait()
    wanted = (rank + 1) * size * (size + 1) / 2
    if not bool((reduced == wanted).all()):
        return f"wrong: a reduce-scatter gave {reduced.unique().tolist()[:4]}, expected {wanted}"
    return "right"


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).to(device)


def _check_step(device: torch.device) -> str:
    """Train a model with DDP and an equal one sharded. Return whether their losses and parameters agree."""
    ours, theirs = _model(device), _model(device)
    replicated = DistributedDataParallel(theirs)
    for layer in (ours[0], ours[2], ours[4]):
        fully_shard(layer)
    fully_shard(ours)
    losses = torch.tensor([_train(model, device) for model in (ours, replicated)])
    apart = _apart(*losses)
    if not apart <= _TOLERANCE:
        return f"wrong: the losses are {losses[0].tolist()}, but {losses[1].tolist()} with DDP"
    for (name, mine), same in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not isinstance(mine, ShardedParameter):
            return f"wrong: {name} is not sharded"
        difference = _apart(mine.full_tensor(), same)
        if not difference <= _TOLERANCE:
            return f"wrong: after {_STEPS} steps {name} differs from DDP's by {difference:.1e}"
        apart = max(apart, difference)
    return f"right: {_STEPS} steps, losses and parameters within {apart:.1e} (relative)"


@torch.no_grad()
def _apart(mine: torch.Tensor, same: torch.Tensor) -> float:
    return float((mine - same).abs().max() / same.abs().max())


def _train(model: nn.Module, device: torch.device) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has different data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(_STEPS):
        inputs, targets = (torch.randn(16, size, generator=generator).to(device) for size in (64, 8))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run_worker(lambda: check_ranks(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
