"""Optimizers of others on whole matrices of sharded models: their own numbers, whoever owns a matrix.

pytest tests/optim/test_on_owners.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.core.events import Event, EventKind
from fullshard.features import ShardedParameter, repoint, shard_model
from fullshard.optim import MatrixRule, OnOwners
from tests import optimizers, trainers
from tests.differential import check, compare, parameters
from tests.distributed import run_ranks
from tests.matrices import sent_numel
from tests.offload import POLICIES
from tests.optim.test_muon import RATE, ROUNDED, Model, model_of, sharded
from tests.trainers import close

STEPS = 6
step_with = partial(optimizers.step_with, steps=STEPS, leaves_out=lambda name, step: step == 1 and "unused" in name)


class Whitened(optim.Optimizer):
    """Shampoo in short, whose state has the forms of pytorch_optimizer's: lists, None, a count in the group.

    A side of more than 40 has no factor.
    """

    def __init__(self, params: Any, lr: float = 0.1, every: int = 2, weight_decay: float = 0.1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}")
        super().__init__(params, {"lr": lr, "every": every, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                state, lines = self.state[p], (p.grad, p.grad.T)
                if not state:
                    state["factors"] = [x.new_zeros(len(x), len(x)) if len(x) <= 40 else [] for x in lines]
                    state["roots"] = None
                for factor, x in zip(state["factors"], lines, strict=True):
                    if len(factor):
                        factor.lerp_(x @ x.T, 0.1)
                if group["seen"] % group["every"] == 1:
                    state["roots"] = tuple(self._root(factor) for factor in state["factors"])
                moved = p.grad
                for root in state["roots"]:
                    moved = (root @ moved if len(root) else moved).T
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(moved, alpha=-group["lr"])

    @staticmethod
    def _root(factor: Any) -> Any:
        if not len(factor):
            return []
        sizes, vectors = torch.linalg.eigh(factor + 0.1 * torch.eye(len(factor), dtype=factor.dtype))
        return vectors @ torch.diag(sizes**-0.25) @ vectors.T


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Whitened": (Whitened, {"lr": RATE}),
    "Adafactor": (optim.Adafactor, {"lr": RATE, "weight_decay": 0.2}),
}
BOTH = pytest.mark.parametrize("name", ["Whitened", pytest.param("Adafactor", marks=pytest.mark.full)])


def made(model: nn.Module, name: str, **options: Any) -> OnOwners:
    cls, own = CLASSES[name]
    return OnOwners(model, cls, **{**own, **options})


class Apart:
    """The class for each whole matrix, and AdamW for the rest, as one would write it without us."""

    def __init__(self, model: nn.Module, name: str) -> None:
        cls, options = CLASSES[name]
        rule, self._matrices = MatrixRule.of(model), list[tuple[nn.Parameter, int, nn.Parameter, optim.Optimizer]]()
        for parameter in (*rule.matrices.values(), *rule.convolutions.values()):
            batch = parameter.detach()
            batch = batch if batch.dim() == 3 and parameter not in set(rule.convolutions.values()) else batch[None]
            for number, matrix in enumerate(batch):
                view = nn.Parameter(matrix.flatten(1))
                self._matrices.append((parameter, number, view, cls([view], **options)))
        others = [*rule.embeddings.values(), *rule.heads.values(), *rule.vectors.values()]
        self._adamw = optim.AdamW(others, lr=RATE, weight_decay=options.get("weight_decay", 0.1))

    def step(self) -> None:
        for parameter, number, view, optimizer in self._matrices:
            if parameter.grad is not None:
                view.grad = parameter.grad.view(-1, *view.shape)[number].clone()
                optimizer.step()
        self._adamw.step()

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for parameter, *_ in self._matrices:
            parameter.grad = None


def expected(name: str) -> dict[str, Any]:
    reference = model_of()
    step_with(reference, Apart(reference, name))
    return {"parameters": parameters(reference)}


def check_owned(optimizer: OnOwners) -> None:
    """Every matrix's state is on its owner, whole, and on no other rank."""
    for parameter in optimizer._members():
        keys = [key for key in optimizer.state.get(parameter, {}) if optimizer.is_owned(key)]
        assert {key.rpartition(".")[2] for key in keys} == set(map(str, optimizer.owned(parameter))) or not keys


def check_numbers(name: str, sharding: dict[str, Any]) -> dict[str, float]:
    events: list[Event] = []
    model = sharded(event_sink=events.append, **sharding)
    optimizer = made(model, name)
    step_with(model, optimizer)
    check_owned(optimizer)
    [whole] = optimizer._whole
    there, *others = sent_numel(whole.dealing, whole.mesh.replicate_rank, whole.mesh.shard_rank)
    sent = sum(event.nbytes for event in events if event.kind is EventKind.PIECES_SENT)
    most = STEPS * (16 * there + 8 * sum(others))  # one step leaves the unused out
    assert (STEPS - 1) / STEPS * most <= sent <= most
    return compare({"parameters": parameters(model)}, expected(name))


@pytest.mark.parametrize(
    ("name", "world_size", "sharding"),
    [
        ("Whitened", 2, {}),
        ("Adafactor", 1, {}),
        *(
            pytest.param(name, world_size, sharding, marks=pytest.mark.full)
            for name in CLASSES
            for world_size, sharding in (
                (3, {}),
                (2, {"strategy": "NO_SHARD"}),
                (4, {"strategy": "HYBRID_SHARD", "shard_size": 2}),
                (2, {"strategy": "SHARD_GRAD_OPTIMIZER"}),
            )
        ),
    ],
)
def test_sharded(name: str, world_size: int, sharding: dict[str, Any]) -> None:
    """Each matrix is computed whole, so the number of ranks changes nothing: not to a rounding, at all."""
    check(run_ranks(check_numbers, world_size, name, sharding), exact=True, tolerance=ROUNDED)


def check_ways(name: str) -> dict[str, float]:
    """Made before the model is sharded and after a step of its own; with state and weights on the host."""
    model: Any = model_of()
    optimizer = made(model, name)
    step_with(model, optimizer, steps=3)
    shard_model(model, unit_modules=list(model.blocks))
    repoint(optimizer, model)
    step_with(model, optimizer, first=3)
    check_owned(optimizer)
    found = compare({"parameters": parameters(model)}, expected(name))
    for policy in ("everything", "optimizer state"):
        model = sharded(offload_policy=POLICIES[policy])
        step_with(model, made(model, name))
        more = compare({"parameters": parameters(model)}, expected(name))
        found |= {f"{policy}: {kind}": value for kind, value in more.items()}
    return found


@pytest.mark.usefixtures("rehearsed")
@BOTH
def test_ways_to_make_it(name: str) -> None:
    check(run_ranks(check_ways, 2, name), exact=True, tolerance=ROUNDED)


# -- state --------------------------------------------------------------------------------------------------------


def save(directory: str, name: str) -> None:
    model = sharded()
    optimizer = made(model, name)
    step_with(model, optimizer, steps=STEPS - 2)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    with pytest.raises(OptimizerError, match=r"is stored by the ranks that own its matrices\n.*save_checkpoint"):
        optimizer.state_dict()


def resume(directory: str, name: str) -> dict[str, float]:
    """The last steps, by another optimizer on another number of ranks, against a run in one piece."""
    torch.manual_seed(9)
    model = Model().double()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer = made(model, name, lr=0.5)
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    check_owned(optimizer)
    step_with(model, optimizer, first=STEPS - 2)
    return compare({"parameters": parameters(model)}, expected(name))


@BOTH
def test_saved_on_two_ranks_resumed_on_others(name: str, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), name)
    for world_size in (3, 1):
        check(run_ranks(resume, world_size, str(tmp_path), name), exact=True, tolerance=ROUNDED)


def check_state_dict_of_one(name: str) -> dict[str, float]:
    """In one process torch's state dict is whole."""
    model = sharded()
    first, second = made(model, name), made(model, name)
    step_with(model, first, steps=3)
    second.load_state_dict(first.state_dict())
    step_with(model, second, first=3)
    return compare({"parameters": parameters(model)}, expected(name))


@BOTH
def test_state_dict_of_one_process(name: str) -> None:
    check(run_ranks(check_state_dict_of_one, 1, name), exact=True, tolerance=ROUNDED)


def accelerated(directory: str, name: str, loads: bool) -> dict[str, float]:
    model: Any = model_of()
    accelerator = fullshard.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, made(model, name))
    if not loads:
        step_with(model, optimizer, steps=3)
        accelerator.save_state(directory)
    accelerator.load_state(directory)
    step_with(model, optimizer, first=3)
    return compare({"parameters": parameters(model)}, expected(name))


@BOTH
def test_accelerator(name: str, tmp_path: Path) -> None:
    check(run_ranks(accelerated, 2, str(tmp_path / "state"), name, False), exact=True, tolerance=ROUNDED)
    check(run_ranks(accelerated, 1, str(tmp_path / "state"), name, True), exact=True, tolerance=ROUNDED)


def check_schedule() -> None:
    """A learning rate that is set on the group is the class's, in the step after it."""
    model = sharded()
    optimizer = made(model, "Whitened", weight_decay=0.0)
    step_with(model, optimizer, steps=1)
    before = {name: value.clone() for name, value in parameters(model).items() if value is not None}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step_with(model, optimizer, first=1, steps=2)
    after = parameters(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())  # type: ignore[arg-type]


def test_a_schedule_sets_the_learning_rate() -> None:
    run_ranks(check_schedule, 2)


# -- what is refused ----------------------------------------------------------------------------------------------


def check_refused() -> None:
    """Of a large matrix and two small ones one rank has the large one, until that is frozen."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), *(nn.Linear(8, 8, bias=False) for _ in range(2)))
    shard_model(model, unit_modules=[])
    optimizer = OnOwners(model.parameters(), Whitened)
    step_with(model, optimizer, steps=2)
    model[0].requires_grad_(False)
    with pytest.raises(
        OptimizerError, match=r"would get a new owner that does not have its state\nhint: save a checkpoint"
    ):
        step_with(model, optimizer, first=2, steps=3)


def test_what_is_refused() -> None:
    run_ranks(check_refused, 2)
    for name in ("SOAP", "Shampoo"):
        model = sharded()
        theirs = {"__module__": "pytorch_optimizer.optimizer"}
        optimizer = type(name, (optim.SGD,), theirs)(model.parameters(), lr=0.1)
        with pytest.raises(OptimizerError, match=rf"hint: write fullshard\.optim\.OnOwners\(model, {name}, "):
            optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"lr": -1.0}, ConfigError, "Whitened, parameter group 0: lr is -1.0"),
        ({"every": 0}, ValueError, "every is 0"),
        ({"beta": 0.9}, TypeError, "beta"),
        ({"adamw_betas": (0.9, 1.5)}, ValueError, "beta"),
    ],
)
def test_values_that_cannot_be(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(model_of(), "Whitened", **arguments)


# -- Trainer ------------------------------------------------------------------------------------------------------


def train(output: str, resumes: bool) -> list[float]:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make: Callable[..., OnOwners] = partial(OnOwners, optimizer=Whitened)
    trainer = trainers.trainer(
        trainers.build("tied"),
        trainers.arguments(output, **settings),
        optimizer_cls_and_kwargs=(lambda: make, {"lr": 1e-2}),
    )
    trainer.train(resume_from_checkpoint=f"{output}/checkpoint-2" if resumes else None)
    assert any(isinstance(parameter, ShardedParameter) for parameter in trainer.optimizer.optimizer._members())
    losses: list[float] = trainers.logged(trainer)["losses"]
    return losses


def test_trainer(tmp_path: Path) -> None:
    """The losses of one rank on two; and it goes on from its checkpoint."""
    [alone] = run_ranks(train, 1, str(tmp_path / "one"), False)
    two = run_ranks(train, 2, str(tmp_path / "two"), False)[0]
    assert close(two, alone, 1e-3)  # gradients add in another order
    [resumed] = run_ranks(train, 1, str(tmp_path / "two"), True)
    assert close(resumed, two, 1e-3)
