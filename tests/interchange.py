"""Checkpoints of other programs for tests: made by those programs where they run here, else as documented."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import save_checkpoint
from fullshard.features import shard_model


class Net(nn.Module):
    """Tied and frozen parameters, odd shapes, a scalar, persistent buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6)) for _ in range(3)]
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + self.frozen(layer(hidden))
        output: torch.Tensor = self.head(hidden * self.scale)
        return output


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, frozen parameters left out."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def files_in_use(directory: Path) -> list[str]:
    """Files below `directory` that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    opened = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return sorted(path for path in mapped | opened if path.startswith(str(directory)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """A few steps, the same on every rank; returns the losses."""
    losses = []
    for step in range(steps):
        tokens = torch.arange(8).add(step).remainder(13)
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_job(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """An unsharded model with AdamW."""
    net = Net(seed)
    return net, torch.optim.AdamW(groups(net), lr=1e-2)


def sharded_job(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """The same on our engine."""
    net = Net(seed)
    shard_model(net, unit_modules=list(net.layers))
    # 1-D slices: the groups are those of the plain model by name
    matrices = {n for n, p in Net(seed).named_parameters() if p.ndim > 1}
    trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    parts = [
        {"params": [p for n, p in trained if n in matrices], "weight_decay": 0.1},
        {"params": [p for n, p in trained if n not in matrices], "weight_decay": 0.0},
    ]
    return net, torch.optim.AdamW(parts, lr=1e-2)


def save_native(directory: str) -> None:
    """Train on the ranks of this process group and save; a collective."""
    model, optimizer = sharded_job()
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    save_checkpoint(
        directory, model=model, optimizer=optimizer, scheduler=scheduler, extra={"step": 2, "t": torch.ones(3)}
    )


def reference() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The state of the plain model and of its optimizer (by name) after the same steps."""
    net, optimizer = plain_job()
    train(net, optimizer)
    names = {id(p): n for n, p in net.named_parameters()}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items()}
    return {n: t.detach().clone() for n, t in net.state_dict().items()}, state


_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


def _shards(whole: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """1-D shards, padded to a multiple of 128 per rank."""
    flat = whole.detach().reshape(-1)
    length = math.ceil(flat.numel() / (world_size * 128)) * world_size * 128
    return [part.clone() for part in torch.cat([flat, flat.new_zeros(length - flat.numel())]).chunk(world_size)]


def write_xla(
    directory: Path,
    net: nn.Module,
    units: list[str],
    world_size: int,
    *,
    flat: bool,
    outer: str = "",
    name: str = "rank-{r}-of-{w}.pth",
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Per-rank files as torch_xla's FSDP writes them: `outer` units inside one root unit.

    Args:
        directory: where to write.
        net: the unsharded model.
        units: names of the modules that are units besides the root.
        world_size: number of files.
        flat: with `flatten_parameters`.
        outer: leading names that TorchAcc's wrappers add.
        name: file name.
        optimizer: its state goes into files of its own, cut in the same way.
    """
    info: dict[str, dict[str, Any]] = {}
    flatten: dict[str, Any] = {}
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(world_size)]
    sharded: list[list[nn.Parameter]] = []
    buffers: dict[str, Any] = {}
    for unit in ["", *units]:
        members = [
            (n.removeprefix(f"{unit}." if unit else ""), p)
            for n, p in net.named_parameters()
            if _owner(n, units) == unit
        ]
        # outside a unit its inner modules stand behind `_fsdp_wrapped_module`; `_fpw_module` is stripped from keys
        path = outer + ".".join(filter(None, ["_fsdp_wrapped_module" if unit else "", unit])).rstrip(".")
        path = path.rstrip(".")
        holder = f"{path}." if path else ""
        info[path] = {}
        if flat and members:
            local = "_fsdp_wrapped_module.flat_param_0"
            flatten[holder + local] = (
                [f"_fpw_module.{n}" for n, _ in members],
                [p.shape for _, p in members],
                [p.numel() for _, p in members],
            )
            members_of = [(local, torch.cat([p.detach().reshape(-1) for _, p in members]), [p for _, p in members])]
        else:
            members_of = [(f"_fsdp_wrapped_module._fpw_module.{n}", p.detach(), [p]) for n, p in members]
        for local, whole, parameters in members_of:
            key = f"_fsdp_shard.{local}".replace(".", _SEPARATOR)
            info[path][key] = {"_orig_name": local, "_orig_size": whole.shape}
            sharded.append(parameters)
            for rank, part in enumerate(_shards(whole, world_size)):
                states[rank][holder + key] = part
        for n, buffer in net.named_buffers():
            if _owner(n, units) == unit:
                key = holder + "_fsdp_wrapped_module." + n.removeprefix(f"{unit}." if unit else "")
                if buffer.is_floating_point():
                    buffers[key] = {"_orig_dtype": buffer.dtype}
                for state in states:
                    state[key] = buffer.clone()
    for rank, state in enumerate(states):
        metadata = {
            "shard_info": info, "flatten_info": flatten, "buffer_info": buffers, "world_size": world_size, "rank": rank,
        }  # fmt: skip
        path_of = directory / name.format(r=rank, w=world_size)
        torch.save({"model": state, "shard_metadata": metadata}, path_of)
        if optimizer is not None:
            cut = _optimizer_shards(optimizer, sharded, rank, world_size)
            target = path_of.with_name(path_of.name.replace("model", "optim"))
            torch.save({"optimizer": cut, "shard_metadata": metadata}, target)


def _optimizer_shards(
    optimizer: torch.optim.Optimizer, sharded: list[list[nn.Parameter]], rank: int, world_size: int
) -> dict[str, Any]:
    """What `optimizer.state_dict()` is on one rank, where the optimizer holds the shards."""
    state: dict[int, dict[str, Any]] = {}
    for number, parameters in enumerate(sharded):
        values: dict[str, Any] = {"step": optimizer.state[parameters[0]]["step"].clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            whole = torch.cat([optimizer.state[p][key].reshape(-1) for p in parameters])
            values[key] = _shards(whole, world_size)[rank]
        state[number] = values
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return {"state": state, "param_groups": [{**group, "params": list(range(len(sharded)))}]}


def _owner(name: str, units: list[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")
