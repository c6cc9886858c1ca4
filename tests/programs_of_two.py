"""Random training programs of two models that share backwards, beside plain ones.

What ranks may do otherwise than others is drawn: which parameters they use, whose graphs they keep, when they collect
garbage. Garbage is collected where a program says so and nowhere else. Each rank computes the plain models' gradients
of all ranks by itself, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.checkpoint import load_checkpoint, load_full_state_dict, save_checkpoint
from fullshard.features import fully_shard, no_sync, shard_model
from tests.differential import own_part
from tests.distributed import place_of
from tests.programs import OPTIMIZERS, WIDTH, Block, Injected, Operation, assert_close, weighted
from tests.traps import own_elements, sharded_parameters

FREEZABLE = ("head.weight", "blocks.0.first.weight", "blocks.0.first.bias", "blocks.0.scale")


@dataclass(frozen=True, slots=True)
class Tower:
    """How both models are made.

    Attributes:
        depth: blocks.
        checkpoints: how each block is run again in backward: not, or as torch's two ways do.
        is_bare: on the branch that leaves out the first layer, nothing takes its place, so that the first unit's input
            wants no gradient.
    """

    depth: int
    checkpoints: str
    is_bare: bool


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower
        self.first, self.instead = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(tower.depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, branch: int, fault: str = "") -> torch.Tensor:
        if branch != 1:
            x = self.first(x)
        elif not self.tower.is_bare:
            x = x + self.instead(x)
        for index, block in enumerate(self.blocks):
            again = self.tower.checkpoints if self.training and torch.is_grad_enabled() else ""
            arguments = (x, branch, fault if index == 0 else "")
            x = checkpoint(block, *arguments, use_reentrant=again == "reentrant") if again else block(*arguments)
        return self.head(x)  # type: ignore[no-any-return]


Branches = tuple[tuple[int, int], ...]
"""For each rank, those of the first and of the later calls."""

_Loss = Callable[[nn.Module, nn.Module, torch.Tensor, int, int], torch.Tensor]
LOSSES: dict[str, _Loss] = {
    "A": lambda a, b, x, i, j: a(x, i).square().mean(),
    "B": lambda a, b, x, i, j: b(x, j).square().mean(),
    "A+B": lambda a, b, x, i, j: a(x, i).square().mean() + 2 * b(x + 1, j).abs().mean(),
    "A then B": lambda a, b, x, i, j: b(a(x, i), j).square().mean(),
    "B and A then B": lambda a, b, x, i, j: b(x, i).square().mean() + b(a(x, i), j).square().mean(),
    "A twice": lambda a, b, x, i, j: a(x, i).square().mean() + a(x + 1, j).abs().mean(),
    "A, B, A": lambda a, b, x, i, j: a(x, i).square().mean() + b(x, j).abs().mean() + a(x + 2, j).abs().mean(),
}


@dataclass(frozen=True, slots=True)
class ProgramOfTwo:
    """What is sharded how, and what is done with it."""

    world_size: int
    comm: str
    strategy: str
    units: str
    are_twins: bool
    tower: Tower
    optimizers: tuple[str, str]
    operations: tuple[Operation, ...]


# -- drawing ----------------------------------------------------------------------------------------------------


def _operations(world_size: int) -> st.SearchStrategy[Operation]:
    model, loss = st.integers(0, 1), st.sampled_from(sorted(LOSSES))
    rank = st.integers(-1, world_size - 1)
    branch = st.integers(0, 2)
    branches = st.tuples(*[st.tuples(branch, branch)] * world_size)
    how = st.sampled_from(["once", "once", "once", "twice", "no_sync", "two at once", "two in turn"])
    passes = st.tuples(st.just("train"), loss, branches, how, rank)
    return weighted(
        (15, passes),
        (1, st.tuples(st.just("evaluate"), loss, branches, st.booleans(), rank)),
        (1, st.tuples(st.just("collect"), rank)),
        (1, st.tuples(st.just("forget"), rank)),
        (3, st.tuples(st.just("step"), st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))),
        (1, st.tuples(st.just("zero_grad"), model, st.booleans())),
        (1, st.tuples(st.just("require_grad"), model, st.sampled_from(FREEZABLE), st.booleans())),
        (1, st.tuples(st.just("fail"), st.sampled_from(["forward", "backward"]), loss)),
        (1, st.tuples(st.just("rebuild"), model)),
        (1, st.tuples(st.just("load_whole"), model)),
        (1, st.tuples(st.just("save"), model)),
        (1, st.tuples(st.just("restore"), model)),
    )


@st.composite
def programs_of_two(draw: st.DrawFn, world_sizes: tuple[int, ...] = (2, 2, 3)) -> ProgramOfTwo:
    """Programs of up to 12 operations."""
    world_size = draw(st.sampled_from(world_sizes))
    checkpoints = draw(st.sampled_from(["", "", "reentrant", "not reentrant"]))
    # torch's reentrant checkpoint gives no gradients at all where no input wants one.
    is_bare = draw(st.booleans()) and checkpoints != "reentrant"
    optimizer = st.sampled_from(sorted(OPTIMIZERS))
    return ProgramOfTwo(
        world_size=world_size,
        comm=draw(st.sampled_from(["auto", "gloo"])),
        strategy=draw(
            st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRAD_OPTIMIZER", "SHARD_OPTIMIZER"])
        ),
        units=draw(st.sampled_from(["one", "blocks", "blocks", "one by one"])),
        are_twins=draw(st.booleans()),
        tower=Tower(draw(st.integers(1, 3)), checkpoints, is_bare),
        optimizers=(draw(optimizer), draw(optimizer)),
        operations=tuple(draw(st.lists(_operations(world_size), min_size=3, max_size=12))),
    )


# -- running ----------------------------------------------------------------------------------------------------


@dataclass
class RunOfTwo:
    """The models of a program, and what they did so far."""

    program: ProgramOfTwo
    folder: Path
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plain: list[Net] = field(default_factory=list)
    sharded: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    references: list[torch.optim.Optimizer] = field(default_factory=list)
    unreduced: set[int] = field(default_factory=set)
    kept: list[torch.Tensor] = field(default_factory=list)
    saved: dict[int, Any] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.plain = [Net(self.program.tower).to(self.place) for _ in range(2)]
        if self.program.are_twins:
            self.plain[1] = copy.deepcopy(self.plain[0])
        self.sharded = [self.shard(model) for model in self.plain]
        names = self.program.optimizers
        self.optimizers = [OPTIMIZERS[n](m.parameters()) for n, m in zip(names, self.sharded, strict=True)]
        self.references = [OPTIMIZERS[n](m.parameters()) for n, m in zip(names, self.plain, strict=True)]

    def shard(self, plain: Net) -> nn.Module:
        model, how = copy.deepcopy(plain), self.program.units
        if how == "one by one":
            for unit in [*model.blocks, model.head]:
                fully_shard(unit)
            return fully_shard(model)  # type: ignore[no-any-return]
        units = list(model.blocks) if how == "blocks" else []
        return shard_model(model, unit_modules=units, strategy=self.program.strategy, device=self.place)

    def run(self) -> None:
        for index, operation in enumerate(self.program.operations):
            name, *arguments = operation
            getattr(self, f"do_{name}")(*arguments)
            self.compare(f"operation {index}, {operation}")

    def loss(self, models: list[Any], loss: str, branches: Branches, rank: int, turn: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.count + 10 * turn + rank)
        x = torch.rand(4, WIDTH, generator=generator).to(self.place)
        (a, b), (i, j) = models, branches[rank]
        return LOSSES[loss](a, b, x, i, j)

    def backward(self, models: list[Any], loss: str, branches: Branches, how: str, rank: int) -> torch.Tensor:
        """Of one rank; the models' gradients are their own business."""
        first = self.loss(models, loss, branches, rank)
        if how in ("two at once", "two in turn"):
            second = self.loss(models, "A+B", branches, rank, turn=1)
            if how == "two at once":
                (first + second).backward()
            else:
                second.backward()
                first.backward()
        else:
            first.backward(retain_graph=how == "twice")
            if how == "twice":
                (2 * first).backward()
        return first

    # What a program does.

    def do_train(self, loss: str, branches: Branches, how: str, keeper: int) -> None:
        self.count += 1
        has = {0} if loss.startswith("A tw") or loss == "A" else {1} if loss == "B" else {0, 1}
        has |= {0, 1} if how.startswith("two ") else set()
        with contextlib.ExitStack() as stack:
            for model in self.sharded if how == "no_sync" else ():
                stack.enter_context(no_sync(model))
            mine = self.backward(self.sharded, loss, branches, how, dist.get_rank())
        self.unreduced = self.unreduced | has if how == "no_sync" else self.unreduced - has
        if keeper == dist.get_rank():
            self.kept.append(mine)
        before = [parameter.grad for model in self.plain for parameter in model.parameters()]
        for model in self.plain:
            model.zero_grad()
        for rank in range(dist.get_world_size()):
            self.backward(self.plain, loss, branches, how, rank)
        parameters = [parameter for model in self.plain for parameter in model.parameters()]
        for parameter, old in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                parameter.grad += 0 if old is None else old
            else:
                parameter.grad = old

    def do_evaluate(self, loss: str, branches: Branches, has_graph: bool, keeper: int) -> None:
        for model in (*self.sharded, *self.plain):
            model.eval()
        with torch.set_grad_enabled(has_graph):
            value = self.loss(self.sharded, loss, branches, dist.get_rank())
            assert_close("evaluation", value.detach(), self.loss(self.plain, loss, branches, dist.get_rank()).detach())
        if keeper == dist.get_rank():
            self.kept.append(value)
        for model in (*self.sharded, *self.plain):
            model.train()

    def do_collect(self, rank: int) -> None:
        if rank == dist.get_rank():
            gc.collect()

    def do_forget(self, rank: int) -> None:
        if rank == dist.get_rank():
            self.kept.clear()

    def do_step(self, which: tuple[int, ...]) -> None:
        for index in which:
            if index not in self.unreduced:
                for optimizer in (self.optimizers[index], self.references[index]):
                    optimizer.step()
                    optimizer.zero_grad()

    def do_zero_grad(self, which: int, set_to_none: bool) -> None:
        if which not in self.unreduced:
            for optimizer in (self.optimizers[which], self.references[which]):
                optimizer.zero_grad(set_to_none=set_to_none)

    def do_require_grad(self, which: int, name: str, value: bool) -> None:
        if which not in self.unreduced:
            for model in (self.sharded[which], self.plain[which]):
                model.get_parameter(name).requires_grad_(value)

    def do_fail(self, where: str, loss: str) -> None:
        if self.unreduced:
            return
        models: list[Any] = [_Faulty(model, where) for model in self.sharded]
        with contextlib.suppress(Injected):
            self.loss(models, loss, ((0, 0),) * dist.get_world_size(), dist.get_rank()).backward()
            raise AssertionError(f"no error came out of {where}")
        for which in (0, 1):
            self.do_zero_grad(which, True)

    def do_rebuild(self, which: int) -> None:
        """Another model and optimizer in place of these, which are garbage until somebody collects them."""
        self.unreduced -= {which}
        self.plain[which].zero_grad()
        self.sharded[which] = self.shard(self.plain[which])
        make = OPTIMIZERS[self.program.optimizers[which]]
        self.optimizers[which] = make(self.sharded[which].parameters())
        self.references[which] = make(self.plain[which].parameters())

    def do_load_whole(self, which: int) -> None:
        state = {name: value + 0.01 for name, value in self.plain[which].state_dict().items()}
        self.plain[which].load_state_dict(state)
        load_full_state_dict(self.sharded[which], state)

    def do_save(self, which: int) -> None:
        if which in self.unreduced:
            return
        folder = self.folder / str(which)
        save_checkpoint(folder, model=self.sharded[which], optimizer=self.optimizers[which], overwrite=True)
        self.saved[which] = copy.deepcopy((self.plain[which].state_dict(), self.references[which].state_dict()))

    def do_restore(self, which: int) -> None:
        if which not in self.saved or which in self.unreduced:
            return
        load_checkpoint(self.folder / str(which), model=self.sharded[which], optimizer=self.optimizers[which])
        weights, state = copy.deepcopy(self.saved[which])
        self.plain[which].load_state_dict(weights)
        self.references[which].load_state_dict(state)

    def compare(self, place: str) -> None:
        """Weights and gradients: each rank its elements."""
        for index, (model, plain) in enumerate(zip(self.sharded, self.plain, strict=True)):
            for name, parameter in sharded_parameters(model).items():
                expected = plain.get_parameter(name)
                where = f"{place}: model {index}, {name}"
                assert_close(where, own_part(parameter).reshape(-1), own_elements(parameter, expected))
                if index in self.unreduced:
                    continue
                grad, reference = parameter.grad, expected.grad
                assert (grad is None) == (reference is None), f"{where}: gradient {grad}, expected {reference}"
                if grad is not None and reference is not None:
                    own = own_part(grad).reshape(-1)
                    assert_close(f"{where}: gradient", own, own_elements(parameter, reference))


class _Faulty:
    """A model whose first block fails."""

    def __init__(self, model: nn.Module, where: str) -> None:
        self._model, self._where = model, where

    def __call__(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self._model(x, branch, self._where)  # type: ignore[no-any-return]


def run_program_of_two(program: ProgramOfTwo, folder: str, kind: str = "cpu") -> None:
    """On each rank, on its device of this kind."""
    os.environ["FULLSHARD_COMM"] = program.comm
    torch.set_default_dtype(torch.float64)
    gc.disable()
    try:
        RunOfTwo(program, Path(folder), place_of(kind)).run()
    finally:
        gc.enable()
        torch.set_default_dtype(torch.float32)
