"""Random training programs, run by a sharded model and by a plain one side by side.

A program is a list of operations that a training script could do in that order. The plain model's gradients are
averaged over the ranks by hand, in float64; after each operation both must have the same outputs, gradients and
weights. What a program may not do (step while gradients are kept unreduced) is never drawn.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from fullshard.checkpoint import full_state_dict, load_checkpoint, load_full_state_dict, save_checkpoint
from fullshard.config.switches import OFFLOAD
from fullshard.features import clip_grad_norm_, no_sync, park, shard_model, unpark, unsharded
from tests.differential import own_part
from tests.distributed import place_of
from tests.traps import own_elements, sharded_parameters

WIDTH = 6
BLOCKS = 3
EXACT = 1e-9
"""Relative to a tensor's largest element, in float64: sums in another order, over some steps, and Adam's division by
gradients that are nearly zero."""

Operation = tuple[Any, ...]


class Injected(Exception):
    """An error of the user's own code, in forward or backward."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> Any:
        raise Injected("in backward")


class Block(nn.Module):
    """Two layers of which a rank may use one, the other or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, branch: int, fault: str) -> torch.Tensor:
        if fault == "forward":
            raise Injected("in forward")
        if fault == "backward":
            x = _Raises.apply(x)
        if branch != 1:
            x = x + self.first(x).tanh()
        if branch != 2:
            x = x + self.second(x).tanh() * self.scale
        return x


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, tokens: torch.Tensor, skipped: int = -1, branch: int = 0, fault: str = "", at: int = 0
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x, branch, fault if index == at else "")
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Program:
    """What is sharded how, and what is done with it."""

    world_size: int
    strategy: str
    units: tuple[int, ...]
    optimizers: tuple[str, ...]
    operations: tuple[Operation, ...]


# -- drawing ----------------------------------------------------------------------------------------------------


def weighted(*choices: tuple[int, st.SearchStrategy[Operation]]) -> st.SearchStrategy[Operation]:
    """One of them, those with larger numbers more often: of repetitions `one_of` keeps one."""
    repeated = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.integers(0, len(repeated) - 1).flatmap(repeated.__getitem__)


def _operations() -> st.SearchStrategy[Operation]:
    block = st.integers(0, BLOCKS - 1)
    passes = st.tuples(
        st.just("train"),
        st.integers(-1, BLOCKS - 1),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        st.integers(1, 2),
    )
    return weighted(
        (10, passes),
        (3, st.tuples(st.just("step"), st.integers(0, 1))),
        (1, st.tuples(st.just("zero_grad"), st.booleans())),
        (1, st.tuples(st.just("freeze"), st.integers(0, 11))),
        (1, st.tuples(st.just("unfreeze"), st.integers(0, 11))),
        (1, st.tuples(st.just("fail"), st.sampled_from(["forward", "backward"]), block)),
        (1, st.tuples(st.just("evaluate"), st.booleans())),
        (1, st.tuples(st.just("clip"), st.sampled_from([0.01, 1.0]))),
        (1, st.tuples(st.just("keep_after_backward"), st.booleans())),
        (1, st.tuples(st.just("keep_after_forward"), st.booleans())),
        (1, st.just(("load_whole",))),
        (1, st.just(("save",))),
        (1, st.just(("restore",))),
        (1, st.just(("look",))),
        (1, parkings()),
    )


def parkings() -> st.SearchStrategy[Operation]:
    return st.tuples(
        st.just("park"), st.sampled_from([None, "weights"]), st.sampled_from(["nothing", "save", "change"])
    )


@st.composite
def programs(draw: st.DrawFn, world_sizes: tuple[int, ...] = (1, 2, 3)) -> Program:
    """Programs of up to 12 operations."""
    return Program(
        world_size=draw(st.sampled_from(world_sizes)),
        strategy=draw(
            st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRAD_OPTIMIZER", "SHARD_OPTIMIZER"])
        ),
        units=tuple(draw(st.sets(st.integers(0, BLOCKS - 1)))),
        optimizers=tuple(draw(st.lists(st.sampled_from(["adamw", "momentum"]), min_size=1, max_size=2))),
        operations=tuple(draw(st.lists(_operations(), min_size=1, max_size=12))),
    )


@st.composite
def parked_programs(draw: st.DrawFn, world_sizes: tuple[int, ...] = (1, 2, 3)) -> Program:
    """Programs that park the model after any of their operations, and after at least one."""
    program = draw(programs(world_sizes))
    count = len(program.operations)
    after = draw(st.sets(st.integers(0, count - 1), min_size=1))
    several = (
        [operation, draw(parkings())] if index in after else [operation]
        for index, operation in enumerate(program.operations)
    )
    return replace(program, operations=tuple(itertools.chain.from_iterable(several)))


# -- running ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def _optimizers(names: tuple[str, ...], model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [OPTIMIZERS[name](parameters[index :: len(names)]) for index, name in enumerate(names)]


@dataclass
class Run:
    """The two models of a program, and what they did so far."""

    program: Program
    folder: Path
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sharded: Any = None
    plain: Any = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    references: list[torch.optim.Optimizer] = field(default_factory=list)
    unreduced: dict[int, torch.Tensor] = field(default_factory=dict)
    is_kept: bool = False
    saved: Any = None
    count: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        self.plain = Net().to(self.place)
        model = copy.deepcopy(self.plain)
        units = [model.blocks[index] for index in self.program.units]
        self.sharded = shard_model(model, unit_modules=units, strategy=self.program.strategy, device=self.place)
        self.optimizers = _optimizers(self.program.optimizers, self.sharded)
        self.references = _optimizers(self.program.optimizers, self.plain)

    def run(self) -> None:
        for index, operation in enumerate(self.program.operations):
            name, *arguments = operation
            getattr(self, f"do_{name}")(*arguments)
            self.compare(f"operation {index}, {operation}")
        self.compare_whole()

    def tokens(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return torch.randint(0, 7, (2, 3), generator=generator).to(self.place)

    # What a program does.

    def do_train(self, skipped: int, branch: int, differs: bool, syncs: bool, forwards: int) -> None:
        if differs and dist.get_rank() == 0:
            branch = 0
        self.count += 1

        def loss_of(model: nn.Module) -> torch.Tensor:
            batches = [self.tokens(1000 * self.count + turn) for turn in range(forwards)]
            return sum((model(b, skipped, branch).square().mean() for b in batches), torch.zeros((), device=self.place))

        expected = loss_of(self.plain)
        learns = any(p.requires_grad for p in self.plain.parameters())
        before = {index: p.grad for index, p in enumerate(self.plain.parameters())}
        for parameter in self.plain.parameters():
            parameter.grad = None
        if learns:
            expected.backward()
        self.collect(before, syncs=syncs)
        if syncs:
            loss = loss_of(self.sharded)
            if learns:
                loss.backward()
        else:
            with no_sync(self.sharded):
                loss = loss_of(self.sharded)
                if learns:
                    loss.backward()
        self.is_kept = not syncs and (self.is_kept or learns)
        assert_close("loss", loss.detach(), expected.detach())

    def collect(self, before: dict[int, torch.Tensor | None], *, syncs: bool) -> None:
        """The plain model's new gradients are averaged, with those kept unreduced before, and added."""
        for index, parameter in enumerate(self.plain.parameters()):
            new, kept = parameter.grad, self.unreduced.pop(index, None)
            parameter.grad = before[index]
            if kept is not None:
                new = kept if new is None else kept + new
            if not syncs:
                if new is not None:
                    self.unreduced[index] = new
                continue
            is_used = torch.tensor([float(new is not None)], device=self.place)
            dist.all_reduce(is_used)
            if is_used.item():
                total = torch.zeros_like(parameter) if new is None else new.clone()
                dist.all_reduce(total)
                total /= dist.get_world_size()
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def do_step(self, which: int) -> None:
        if not self.is_kept:
            self.optimizers[which % len(self.optimizers)].step()
            self.references[which % len(self.optimizers)].step()

    def do_zero_grad(self, set_to_none: bool) -> None:
        if not self.is_kept:
            self.sharded.zero_grad(set_to_none=set_to_none)
            self.plain.zero_grad(set_to_none=set_to_none)

    def do_freeze(self, which: int) -> None:
        self.require_grad(which, False)

    def do_unfreeze(self, which: int) -> None:
        self.require_grad(which, True)

    def require_grad(self, which: int, value: bool) -> None:
        if not self.is_kept:
            for model in (self.sharded, self.plain):
                parameters = list(model.parameters())
                parameters[which % len(parameters)].requires_grad_(value)

    def do_fail(self, where: str, block: int) -> None:
        if self.is_kept or not all(p.requires_grad for p in self.plain.parameters()):
            return
        try:
            self.sharded(self.tokens(0), fault=where, at=block).sum().backward()
        except Injected:
            pass
        else:
            raise AssertionError(f"no error came out of {where}")
        self.do_zero_grad(True)

    def do_evaluate(self, training: bool) -> None:
        self.sharded.train(training)
        with torch.no_grad():
            assert_close("evaluation", self.sharded(self.tokens(7)), self.plain(self.tokens(7)))
        self.sharded.train()

    def do_clip(self, limit: float) -> None:
        if not self.is_kept:
            got = clip_grad_norm_(self.sharded.parameters(), limit)
            expected = nn.utils.clip_grad_norm_(self.plain.parameters(), limit)
            assert_close("norm", torch.as_tensor(got), expected)

    def do_keep_after_backward(self, keeps: bool) -> None:
        self.sharded.set_reshard_after_backward(not keeps)

    def do_keep_after_forward(self, keeps: bool) -> None:
        self.sharded.set_reshard_after_forward(not keeps)

    def do_load_whole(self) -> None:
        state = {name: value + 0.01 for name, value in self.plain.state_dict().items()}
        self.plain.load_state_dict(state)
        load_full_state_dict(self.sharded, state)

    def do_save(self) -> None:
        if self.is_kept:
            return
        save_checkpoint(self.folder, model=self.sharded, optimizer=self.only_optimizer(), overwrite=True)
        self.saved = copy.deepcopy((self.plain.state_dict(), self.references[0].state_dict()))

    def do_restore(self) -> None:
        if self.saved is None or self.is_kept:
            return
        load_checkpoint(self.folder, model=self.sharded, optimizer=self.only_optimizer())
        weights, state = copy.deepcopy(self.saved)
        self.plain.load_state_dict(weights)
        if self.only_optimizer() is not None:
            self.references[0].load_state_dict(state)

    def only_optimizer(self) -> torch.optim.Optimizer | None:
        """A checkpoint holds one; of several none is saved, and they keep their states."""
        return self.optimizers[0] if len(self.optimizers) == 1 else None

    def do_look(self) -> None:
        with unsharded(self.sharded):
            for name, parameter in self.sharded.named_parameters():
                assert_close(name, parameter.detach(), self.plain.get_parameter(name).detach())

    def do_park(self, keep: Literal["weights"] | None, meanwhile: str) -> None:
        """Park both the model and its optimizers; what is parked can be read, saved and changed."""
        with pytest.MonkeyPatch.context() as within:
            within.setenv(OFFLOAD.name, "rehearse")  # moves memory on a CPU, too
            park(self.sharded, self.optimizers, keep=keep)
        self.compare("while the model is parked")
        if meanwhile == "save":
            self.do_save()
        elif meanwhile == "change":
            with torch.no_grad():
                for parameter in (*self.sharded.parameters(), *self.plain.parameters()):
                    parameter.mul_(0.99)
        unpark(self.sharded, self.optimizers)

    def compare(self, place: str) -> None:
        """Weights and gradients: each rank its elements."""
        expected = dict(self.plain.named_parameters())
        for name, parameter in sharded_parameters(self.sharded).items():
            own = own_part(parameter).reshape(-1)
            assert_close(f"{place}: {name}", own, own_elements(parameter, expected[name]))
            if self.is_kept:
                continue
            grad, reference = parameter.grad, expected[name].grad
            assert (grad is None) == (reference is None), f"{place}: gradient of {name}: {grad}, expected {reference}"
            if grad is not None and reference is not None:
                own = own_part(grad).reshape(-1)
                assert_close(f"{place}: gradient of {name}", own, own_elements(parameter, reference))

    def compare_whole(self) -> None:
        """Weights as they are saved."""
        expected = self.plain.state_dict()
        for name, value in full_state_dict(self.sharded, rank0_only=False).items():
            assert_close(f"at the end: {name}", value, expected[name])


def assert_close(name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    if not expected.numel():
        assert not value.numel(), name
        return
    expected = expected.to(value.device)
    scale = max(expected.abs().max().item(), 1e-6)
    apart = (value - expected).abs().max().item() / scale
    assert apart <= EXACT, f"{name}: {apart:.2e} apart"


def run_program(program: Program, folder: str, kind: str = "cpu") -> None:
    """On each rank, on its device of this kind."""
    try:
        Run(program, Path(folder) / "checkpoint", place_of(kind)).run()
    finally:
        torch.set_default_dtype(torch.float32)
