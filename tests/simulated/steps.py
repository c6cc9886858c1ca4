"""A step in steady state, looked at: where the host waits, which collectives there are. And torch's own engine."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from fullshard.checkpoint.staging import HostMemory
from fullshard.features import clip_grad_norm_, shard_model
from tests.distributed import place_of
from tests.simulated.training import MATRICES, Case, Model, batch, made, optimizer_of

ALARM = "aten::_local_scalar_dense in features/nonfinite.py:is_alarmed"
"""Whether gradients are finite decides whether the optimizer steps."""
SETTLED = "event.synchronize in offload/host.py:settle"
"""The script may change what was gathered from, on the host, after a forward and after a backward."""
GRADIENT = "event.synchronize in offload/host.py:wait"
"""A gradient goes to the host, where anybody may read it: one for each unit."""
NORM = {
    "copy to the device in torch_tools/install.py:_group_norm": 1,
    "copy to the host in torch_tools/install.py:clip_grad_norm_": 1,
}
"""The norm of gradients on the host is summed on the device."""

MESSAGE = "collective between hosts in engine/end_of_backward.py:exchange"
"""Which parameters were used on any rank."""

WAITS: dict[Case, dict[str, int]] = {
    Case(): {ALARM: 1},
    Case(activations="on host"): {ALARM: 1},
    Case(reshard="auto", loss="in chunks"): {ALARM: 1},
    Case(offload="optimizer state"): {ALARM: 1, "stream.synchronize in offload/host.py:finish": 1},
    Case(offload="main weights"): {ALARM: 1, SETTLED: 1, GRADIENT: 4, **NORM},
    Case(offload="main weights", precision="bf16"): {ALARM: 1, SETTLED: 1, GRADIENT: 4, **NORM},
    Case(offload="everything"): {ALARM: 1, SETTLED: 2, GRADIENT: 4, **NORM},
    Case(ranks=2): {ALARM: 1, MESSAGE: 1},
    **{Case(ranks=2, optimizer=name): {ALARM: 1, MESSAGE: 1} for name in MATRICES},
    **{Case(ranks=2, parameters=kind): {ALARM: 1, MESSAGE: 1} for kind in ("extended", "composed")},
    Case(ranks=2, offload="everything", precision="packed"): {ALARM: 1, MESSAGE: 1, SETTLED: 2, GRADIENT: 4, **NORM},
}
STAGED = {"device.synchronize in checkpoint/staging.py:copy": 1}
"""Of a save."""


def waits_of_a_step(case: Case, clips: bool = True) -> dict[str, int]:
    """Where the host waits for the device in the third step, and how often; the loss is not read."""
    from tests.simulated.device import host_waits

    place = torch.device("simulated", dist.get_rank())
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    found: Counter[str] = Counter()
    for step in range(3):
        tokens, targets = batch(step, 0, place)
        dist.barrier()
        with host_waits() as waits:
            functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
            if clips:
                clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found = Counter(waits)
        dist.barrier()
    return dict(found)


def memory_between_steps(case: Case, steps: int = 5) -> tuple[int, list[int]]:
    """Bytes of the device that a model takes as it is sharded, and after each step, whose gradients are cleared."""
    place = torch.device("simulated", dist.get_rank())
    gc.collect()  # models of earlier programs
    dist.barrier()
    model: Any = made(case, place)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    made_nbytes, found = torch.accelerator.memory_allocated(place), []
    for step in range(steps):
        tokens, targets = batch(step, 0, place)
        functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        del tokens, targets
        torch.accelerator.synchronize(place)
        found.append(torch.accelerator.memory_allocated(place))
    return made_nbytes, found


def train_on_host_batches(kind: str) -> list[torch.Tensor]:
    """Batches and masks stay on the host, some in dicts: it is the model that takes them to its device."""
    place = place_of(kind)
    torch.manual_seed(1)
    model: Any = nn.Sequential(_Gated(), _Gated())
    shard_model(model[1], unit_modules=[], device=place)
    shard_model(model[0], unit_modules=[model[0].linear], device=place)
    found = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        seen = _Seen(x, 0)
        out = model[1]({"x": model[0]({"x": x}, gates=[x > 0, seen])}, gates=(torch.ones(4, 8),))
        out.square().mean().backward()
        packed = pack_sequence([x[:2], x[2:]])
        out = checkpoint(model[1], {"x": packed, "own": seen}, gates=[torch.ones(4, 8)], use_reentrant=False)
        out.square().mean().backward()
        assert (seen.x is x, seen.count) == (True, 2)  # once more for backward
        found += [out.detach().cpu(), clip_grad_norm_(model[0], 1.0).cpu()]
    return found


class _Seen:
    """A container that torch's engine leaves alone, too."""

    def __init__(self, x: torch.Tensor, count: int) -> None:
        self.x, self.count = x, count


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any], *, gates: Any) -> torch.Tensor:
        x: Any = batch["x"]
        if isinstance(x, PackedSequence):
            assert x.batch_sizes.device.type == "cpu"
            batch["own"].count += 1
            x = x.data
        out: torch.Tensor = self.linear(x) * gates[0]
        return out


def host_waits_as_known(case: Case, kind: str) -> list[torch.Tensor]:
    """Whether the host waits where it is known to, with so many ranks, one in a save, too; on the CPU: that it does."""
    some = [each for each in WAITS if each.ranks == case.ranks]
    found = [kind == "cpu" or waits_of_a_step(each) == WAITS[each] for each in some]
    if case.ranks == 1:
        found.append(kind == "cpu" or _waits_of_a_save() == STAGED)
    return [torch.tensor(is_known) for is_known in found]


def _waits_of_a_save() -> dict[str, int]:
    from tests.simulated.device import host_waits

    model: Any = made(Case(), torch.device("simulated", dist.get_rank()))
    state = {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}
    with host_waits() as waits:
        HostMemory().copy({"model": state})
    return {place: times for place, times in waits.items() if not place.startswith(" in ")}  # of each stream again


@contextlib.contextmanager
def collectives() -> Iterator[set[str]]:
    """Kinds of collectives on devices inside, with the number of the reduction (0 a sum, 4 a maximum)."""
    from tests.simulated.group import SimulatedGroup

    seen: set[str] = set()
    meet = SimulatedGroup._meet

    def noted(self: Any, what: str, outputs: Any, inputs: Any, options: Any = None, root: int = 0) -> Any:
        if (outputs or inputs)[0].device.type != "cpu":
            seen.add(what if options is None else f"{what} {int(getattr(options.reduceOp, 'op', options.reduceOp))}")
        return meet(self, what, outputs, inputs, options, root)

    with pytest.MonkeyPatch.context() as within:
        within.setattr(SimulatedGroup, "_meet", noted)
        yield seen


def train_with_torch(offloads: bool, kind: str) -> list[torch.Tensor]:
    """Torch's `fully_shard` on the same model, as a control."""
    place = torch.device(kind, dist.get_rank()) if kind != "cpu" else torch.device(kind)
    torch.manual_seed(1)
    model: Any = Model(Case()).to(place)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = []
    for step in range(3):
        tokens, targets = batch(step, 0, place)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [value.cpu() for value in (*found, *(parameter.to_local().detach() for parameter in model.parameters()))]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, all_of_it: bool) -> torch.Tensor:
        x = self.always(x).tanh()
        return self.sometimes(x) if all_of_it else x


class Towers(nn.Module):
    """Two towers over one input that wants no gradient, so that nothing tells the end of a first block's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(_Block() for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        sides = []
        for tower in (self.left, self.right):
            y = x
            for number, block in enumerate(tower):
                y = block(y, all_of_it=number != left_out)
            sides.append(y)
        return sides[0] * sides[1]


def use_different_parameters(kind: str, prefetch: str) -> list[torch.Tensor]:
    """Train a model of which each rank uses other parameters: losses and this rank's weights."""
    rank = dist.get_rank()
    place = torch.device(kind, rank) if kind != "cpu" else torch.device(kind)
    torch.manual_seed(1)
    model: Any = Towers()
    units = [*model.left, *model.right]
    shard_model(model, unit_modules=units, device=place, backward_prefetch=prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(place)
        loss = model(x, left_out=(step + rank) % 3 if rank else -1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [value.cpu() for value in (*found, *(p.to_local().detach() for p in model.parameters()))]
