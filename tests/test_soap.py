"""SOAP and Shampoo on sharded models against their papers on whole tensors: the same numbers, whoever owns a matrix.

pytest tests/test_soap.py
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.core.events import Event, EventKind
from fullshard.features import ShardedParameter, init_mesh, repoint, shard_model
from fullshard.optim import SOAP, Shampoo
from fullshard.optim.preconditioned import PreconditionedMatrices
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests import optimizers, trainers
from tests.differential import check, compare, ddp, parameters, plain
from tests.distributed import run_ranks
from tests.offload import POLICIES
from tests.test_muon import RATE, ROUNDED, Model, as_record, model_of, sharded
from tests.test_muon import train as train_clipped
from tests.test_muon_runs import fullshard as fullshard_command
from tests.test_recipe_train import inputs as inputs
from tests.trainers import close

STEPS = 6
OPTIONS: dict[str, Any] = {
    "lr": RATE,
    "precondition_frequency": 2,
    "max_precond_dim": 40,
    "sent_as": torch.float64,
}
"""The factors of 72 rows or columns are left out."""
Class = type[PreconditionedMatrices]
BOTH = pytest.mark.parametrize("cls", [SOAP, pytest.param(Shampoo, marks=pytest.mark.full)])
step_with = partial(optimizers.step_with, steps=STEPS, leaves_out=lambda name, step: step == 1 and "unused" in name)

# -- numbers ------------------------------------------------------------------------------------------------------


class Paper:
    """Algorithm 3 of arXiv 2409.11321 for one matrix, with the order and the first step of the authors' program."""

    def __init__(
        self, weight: torch.Tensor, *, lr: float, betas: tuple[float, float], every: int, decay: float
    ) -> None:
        self.weight, self.lr, self.betas, self.every, self.decay = weight, lr, betas, every, decay
        self.factors = [torch.zeros(n, n, dtype=weight.dtype) for n in weight.shape]
        self.bases: list[torch.Tensor] = []
        self.mean, self.squares, self.steps = torch.zeros_like(weight), torch.zeros_like(weight), -1

    def step(self, grad: torch.Tensor) -> None:
        self.steps += 1
        first, second = self.betas
        if self.steps:
            left, right = self.bases
            self.mean = first * self.mean + (1 - first) * grad
            self.squares = second * self.squares + (1 - second) * (left.T @ grad @ right) ** 2
            rotated = left.T @ self.mean @ right / (self.squares.sqrt() + 1e-8)
            size = self.lr * (1 - second**self.steps) ** 0.5 / (1 - first**self.steps)
            self.weight -= size * left @ rotated @ right.T
            self.weight -= self.lr * self.decay * self.weight
        for factor, product in zip(self.factors, (grad @ grad.T, grad.T @ grad), strict=True):
            factor.lerp_(product, 1 - second)
        if not self.steps:
            self.bases = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in self.factors]
        elif self.steps % self.every == 0:
            for dim, factor in enumerate(self.factors):
                moved = factor @ self.bases[dim]
                order = torch.einsum("ij,ij->j", self.bases[dim], moved).argsort(descending=True)
                self.bases[dim] = torch.linalg.qr(moved[:, order]).Q
                self.squares = self.squares.index_select(dim, order)


@pytest.mark.numerics
@pytest.mark.parametrize("shape", [(6, 6), (12, 7), (5, 11)])
def test_the_papers_numbers(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    reference = Paper(weight.detach().clone(), lr=0.1, betas=(0.9, 0.8), every=3, decay=0.1)
    optimizer = SOAP([weight], lr=0.1, betas=(0.9, 0.8), precondition_frequency=3, weight_decay=0.1)
    for _ in range(10):
        weight.grad = torch.randn(shape, dtype=torch.float64)
        reference.step(weight.grad)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=ROUNDED, atol=ROUNDED)


class ShampoosPaper:
    """Algorithm 1 of arXiv 1802.09568 for one matrix, its sums averages, grafted to Adam as arXiv 2309.06497 has it."""

    def __init__(
        self, weight: torch.Tensor, *, lr: float, betas: tuple[float, float], every: int, decay: float, has: list[bool]
    ) -> None:
        self.weight, self.lr, self.betas, self.every, self.decay, self.has = weight, lr, betas, every, decay, has
        self.factors = [torch.zeros(n, n, dtype=torch.float64) for n in weight.shape]
        self.roots = [torch.eye(n, dtype=torch.float64) for n in weight.shape]
        self.mean = self.squares = torch.zeros_like(weight, dtype=torch.float64)
        self.steps = 0

    def step(self, grad: torch.Tensor) -> None:
        self.steps, grad, (first, second) = self.steps + 1, grad.double(), self.betas
        self.mean = first * self.mean + (1 - first) * grad
        self.squares = second * self.squares + (1 - second) * grad**2
        seen = 1 - second**self.steps
        for number, product in enumerate((grad @ grad.T, grad.T @ grad)):
            self.factors[number] = second * self.factors[number] + (1 - second) * product
            if self.steps % self.every == 0 and self.has[number]:
                left, sizes, _ = torch.linalg.svd(self.factors[number] / seen + 1e-12 * torch.eye(len(product)))
                self.roots[number] = left @ torch.diag(sizes ** (-1 / (2 * sum(self.has)))) @ left.T
        adam = self.mean / (1 - first**self.steps) / ((self.squares / seen).sqrt() + 1e-8)
        moved = self.roots[0] @ self.mean @ self.roots[1]
        moved = adam if self.steps < self.every or not any(self.has) else moved * adam.norm() / moved.norm()
        self.weight -= self.lr * self.decay * self.weight + self.lr * moved.to(self.weight.dtype)


@pytest.mark.parametrize("shape", [(6, 6), (8, 7), (5, 30), (30, 31)])
def test_shampoos_papers_numbers(shape: tuple[int, int]) -> None:
    """With a factor for both sides, for that of the rows alone, for neither."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    has = [n <= 10 for n in shape]
    reference = ShampoosPaper(weight.detach().clone(), lr=0.1, betas=(0.9, 0.8), every=3, decay=0.1, has=has)
    options: dict[str, Any] = {"precondition_frequency": 3, "weight_decay": 0.1, "max_precond_dim": 10}
    optimizer = Shampoo([weight], lr=0.1, betas=(0.9, 0.8), **options)
    for _ in range(10):
        weight.grad = torch.randn(shape, dtype=torch.float64)
        reference.step(weight.grad)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=ROUNDED, atol=ROUNDED)


def check_same_as_one(cls: Any, sharding: dict[str, Any]) -> dict[str, float]:
    reference = model_of()
    step_with(reference, cls(reference, **OPTIONS))
    events: list[Event] = []
    model = sharded(event_sink=events.append, **sharding)
    optimizer = cls(model, **OPTIONS)
    step_with(model, optimizer)
    check_owned(optimizer)
    [dealing], mesh = optimizer.dealings, init_mesh()
    sent = [event.nbytes for event in events if event.kind is EventKind.PIECES_SENT]
    if not sharding:
        given = STEPS * sum(dealing.sent_numel(mesh.replicate_rank, mesh.shard_rank))
        unused = [n for n, m in enumerate(dealing.matrices) if (m.rows, m.columns) == (24, 24)]
        own = sum(
            m.numel - m.interval.intersect(dealing.layouts[m.bucket].rank_interval(rank)).numel
            for m, (_, rank) in ((dealing.matrices[n], dealing.owners[n]) for n in unused)
        )
        assert 8 * (given - 2 * own) <= sum(sent) <= 8 * given  # one step leaves the unused out
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


def check_owned(optimizer: PreconditionedMatrices) -> None:
    """Every matrix's state is on its owner, whole, and on no other rank."""
    mesh = next(parameter.mesh for parameter in optimizer.state if isinstance(parameter, ShardedParameter))
    own = mesh.replicate_rank, mesh.shard_rank
    held = found = 0
    for parameter, state in optimizer.state.items():
        numbers = {key.rpartition(".")[2] for key in state if optimizer.is_owned(key)}
        assert numbers == set(map(str, optimizer.owned(parameter))) or not numbers
        found += sum(tensor.numel() for key, tensor in state.items() if optimizer.is_owned(key))
    for dealing in optimizer.dealings:
        held += sum(
            dealing.cost.kept(m.rows, m.columns)
            for m, o in zip(dealing.matrices, dealing.owners, strict=True)
            if o == own
        )
    assert found == held


@pytest.mark.parametrize(
    ("cls", "world_size", "sharding"),
    [
        (SOAP, 2, {}),
        (SOAP, 4, {"strategy": "HYBRID_SHARD", "shard_size": 2}),
        (Shampoo, 2, {}),
        *(
            pytest.param(cls, world_size, sharding, marks=pytest.mark.full)
            for cls in (SOAP, Shampoo)
            for world_size, sharding in (
                (1, {}),
                (3, {}),
                (4, {}),
                (3, {"strategy": "SHARD_GRAD_OP"}),
                (2, {"strategy": "NO_SHARD"}),
                (2, {"strategy": "SHARD_GRAD_OPTIMIZER"}),
            )
        ),
        pytest.param(Shampoo, 4, {"strategy": "HYBRID_SHARD", "shard_size": 2}, marks=pytest.mark.full),
    ],
)
def test_sharded(cls: Class, world_size: int, sharding: dict[str, Any]) -> None:
    """Each matrix is computed whole, so the number of ranks changes nothing: not to a rounding, at all."""
    check(run_ranks(check_same_as_one, world_size, cls, sharding), exact=True, tolerance=ROUNDED)


def check_ways(cls: Any) -> dict[str, float]:
    """Made before the model is sharded and after a step of its own; state on the host; sent in single precision."""
    reference = model_of()
    step_with(reference, cls(reference, **OPTIONS))
    expected = {"parameters": parameters(reference)}
    model: Any = model_of()
    optimizer = cls(model, **OPTIONS)
    step_with(model, optimizer, steps=3)
    shard_model(model, unit_modules=list(model.blocks))
    repoint(optimizer, model)
    step_with(model, optimizer, first=3)
    check_owned(optimizer)
    found = compare({"parameters": parameters(model)}, expected)
    for policy in ("everything", "optimizer state"):
        model = sharded(offload_policy=POLICIES[policy])
        step_with(model, cls(model, **OPTIONS))
        found |= {f"{policy}: {k}": v for k, v in compare({"parameters": parameters(model)}, expected).items()}
    sent = []
    for dtype in (torch.float64, torch.float32):
        events: list[Event] = []
        model = sharded(event_sink=events.append)
        step_with(model, cls(model, **{**OPTIONS, "sent_as": dtype}))
        sent.append(sum(event.nbytes for event in events if event.kind is EventKind.PIECES_SENT))
    assert sent[0] == 2 * sent[1] > 0
    return found


@pytest.mark.usefixtures("rehearsed")
@BOTH
def test_ways_to_make_it(cls: Class) -> None:
    check(run_ranks(check_ways, 2, cls), exact=True, tolerance=ROUNDED)


# -- state --------------------------------------------------------------------------------------------------------


def save(directory: str, cls: Any) -> None:
    model = sharded()
    optimizer = cls(model, **OPTIONS)
    step_with(model, optimizer, steps=STEPS - 2)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    with pytest.raises(OptimizerError, match=r"is kept by the owners of its matrices\n.*save_checkpoint"):
        optimizer.state_dict()


def resume(directory: str, cls: Any) -> dict[str, float]:
    """The last steps, by another optimizer on another number of ranks, against a run in one piece."""
    reference = model_of()
    step_with(reference, cls(reference, **OPTIONS))
    torch.manual_seed(9)
    model = Model().double()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer = cls(model, **{**OPTIONS, "lr": 0.5})
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    check_owned(optimizer)
    step_with(model, optimizer, first=STEPS - 2)
    save_checkpoint(Path(directory) / f"again-{init_mesh().world_size}", model=model, optimizer=optimizer)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


@pytest.mark.parametrize("cls", [SOAP, Shampoo])
def test_saved_on_two_ranks_resumed_on_others(cls: Class, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), cls)
    for world_size in (3, 1):
        check(run_ranks(resume, world_size, str(tmp_path), cls), exact=True, tolerance=ROUNDED)


def check_state_dict_of_one(cls: Any) -> dict[str, float]:
    """In one process torch's state dict is whole."""
    reference = model_of()
    step_with(reference, cls(reference, **OPTIONS))
    model = sharded()
    first = cls(model, **OPTIONS)
    step_with(model, first, steps=3)
    second = cls(model, **OPTIONS)
    second.load_state_dict(first.state_dict())
    step_with(model, second, first=3)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


@BOTH
def test_state_dict_of_one_process(cls: Class) -> None:
    check(run_ranks(check_state_dict_of_one, 1, cls), exact=True, tolerance=ROUNDED)


def accelerated(directory: str, cls: Any, loads: bool) -> dict[str, float]:
    reference = model_of()
    step_with(reference, cls(reference, **OPTIONS))
    model: Any = model_of()
    optimizer: Any = cls(model, **OPTIONS)
    accelerator = fullshard.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not loads:
        step_with(model, optimizer, steps=3)
        accelerator.save_state(directory)
    accelerator.load_state(directory)
    step_with(model, optimizer, first=3)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


@BOTH
def test_accelerator(cls: Class, tmp_path: Path) -> None:
    check(run_ranks(accelerated, 2, str(tmp_path / "state"), cls, False), exact=True, tolerance=ROUNDED)
    check(run_ranks(accelerated, 1, str(tmp_path / "state"), cls, True), exact=True, tolerance=ROUNDED)


# -- what is refused ----------------------------------------------------------------------------------------------


def check_refused() -> None:
    """Of a large matrix and two small ones one rank has the large one, until that is frozen."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), *(nn.Linear(8, 8, bias=False) for _ in range(2)))
    shard_model(model, unit_modules=[])
    optimizer = SOAP(model.parameters(), **OPTIONS)
    step_with(model, optimizer, steps=2)
    model[0].requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"would get another owner, without its state\nhint: save a checkpoint"):
        step_with(model, optimizer, first=2, steps=3)


def test_what_is_refused() -> None:
    run_ranks(check_refused, 2)

    for name in ("SOAP", "Shampoo"):
        model = sharded()
        theirs = {"__module__": "pytorch_optimizer.optimizer"}
        optimizer = type(name, (torch.optim.SGD,), theirs)(model.parameters(), lr=0.1)
        with pytest.raises(OptimizerError, match=rf"hint: write fullshard\.optim\.{name}\("):
            optimizer.step()


@pytest.mark.parametrize(
    ("cls", "arguments", "words"),
    [
        (SOAP, {"lr": -1.0}, "SOAP, parameter group 0: lr is -1.0"),
        (SOAP, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        (SOAP, {"shampoo_beta": 1.5}, "shampoo_beta is 1.5"),
        (SOAP, {"precondition_frequency": 0}, "precondition_frequency is 0, expected 1 or more"),
        (SOAP, {"sent_as": torch.int8}, "SOAP: sent_as is torch.int8"),
        (Shampoo, {"weight_decay": -0.1}, "Shampoo, parameter group 0: weight_decay is -0.1"),
        (Shampoo, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        (Shampoo, {"root_eps": -1e-9}, "root_eps is -1e-09"),
    ],
)
def test_values_that_cannot_be(cls: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(model_of(), **arguments)


# -- where users ask for it ---------------------------------------------------------------------------------------


def train(output: str, cls: Class, resumes: bool) -> list[float]:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    model = trainers.build("tied")
    made = trainers.trainer(
        model,
        trainers.arguments(output, **settings),
        optimizer_cls_and_kwargs=(lambda: cls, {"lr": 1e-2, "precondition_frequency": 2}),
    )
    made.train(resume_from_checkpoint=f"{output}/checkpoint-2" if resumes else None)
    assert type(made.optimizer.optimizer) is cls
    losses: list[float] = trainers.logged(made)["losses"]
    return losses


@BOTH
def test_trainer(cls: Class, tmp_path: Path) -> None:
    """The losses of one rank on two; and it goes on from its checkpoint."""
    [alone] = run_ranks(train, 1, str(tmp_path / "one"), cls, False)
    two = run_ranks(train, 2, str(tmp_path / "two"), cls, False)[0]
    assert close(two, alone, 1e-3)  # gradients add in another order
    [resumed] = run_ranks(train, 1, str(tmp_path / "two"), cls, True)
    assert close(resumed, two, 1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_train(name: str, inputs: Path, tmp_path: Path) -> None:
    """It says what the optimizer updates, keeps to its plan, and goes on at another number of ranks."""
    words = ["train", "--model", inputs / "config.json", "--data", inputs / "data.txt", "--output-dir", tmp_path,
             "--steps", 6, "--save-every", 3, "--batch-size", 6, "--seq-len", 32, "--vocab-size", 320,
             "--device", "cpu", "--sample-tokens", 0, "--no-plot", "--no-export", "--optimizer", name.lower(),
             "--log-every", 1]  # fmt: skip
    done = fullshard_command(*words, "--nproc", 2, "--check-plan")
    assert done.returncode == 0, done.stderr
    assert f"optimizer: {name} updates 14 matrices of" in done.stdout
    assert f"LlamaForCausalLM with {name}, step 3: as planned" in done.stdout, done.stdout
    losses = [line.split("loss")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("step ")]
    shutil.rmtree(tmp_path / "checkpoints" / "step-000006")
    again = fullshard_command(*words, "--nproc", 3)
    assert again.returncode == 0, again.stderr
    assert "after step 3" in again.stdout
    resumed = [line.split("loss")[1].split()[0] for line in again.stdout.splitlines() if line.startswith("step ")]
    assert close([float(loss) for loss in resumed], [float(loss) for loss in losses[3:]], 1e-2)


def test_plan_says_what_owners_keep() -> None:
    words = [
        "plan",
        "--model",
        "Llama-3.1-8B",
        "--devices",
        "64xH100",
        "--optimizer",
        "soap",
        "--checkpointing",
        "full",
    ]
    done = fullshard_command(*words)
    assert "of state for its own" in done.stdout, done.stdout + done.stderr
    found = json.loads(fullshard_command(*words, "--json").stdout)["matrices"]
    assert found["balance"] <= 1.15
    d, kv, f = 4096, 1024, 14336  # f is beyond the largest dim that has a factor
    kept = 2 * (2 * d * d + 2 * d * kv + 3 * d * f) + 2 * (2 * 2 * d * d + 2 * (d * d + kv * kv) + 3 * d * d)
    assert 32 * kept * 4 / 64 <= found["kept"] <= 1.15 * 32 * kept * 4 / 64


def test_plan_of_shampoo() -> None:
    """It keeps what SOAP keeps, sends as much, and computes with it less often."""
    model, _ = load_model("Llama-3.1-8B", {})
    soap, shampoo = (
        evaluate(model, Job.of({"checkpointing": "full", "seq_len": 8192, "optimizer": o}), parse_cluster("64xH100"))
        for o in ("soap", "shampoo")
    )
    assert soap.setting.matrices is not None
    assert shampoo.setting.matrices is not None
    assert shampoo.setting.matrices.sent_nbytes == pytest.approx(soap.setting.matrices.sent_nbytes, rel=0.05)
    assert shampoo.setting.matrices.kept_nbytes == pytest.approx(soap.setting.matrices.kept_nbytes, rel=0.15)
    assert shampoo.setting.matrices.dealing.balance <= 1.15
    assert shampoo.time.optimizer < soap.time.optimizer


# -- with everything that comes between backward and step ---------------------------------------------------------


def check_training() -> dict[str, float]:
    """Two micro-batches per step, clipped; a step that the scaler leaves out; against replicas with whole matrices.

    Factors of these few tokens are far from full rank: their roots would make 64 times a rounding of the gradient.
    """
    mesh, options = init_mesh(), {**OPTIONS, "root_eps": 1e-6}
    reference = ddp(model_of())
    expected = train_clipped(reference, Shampoo(plain(reference), **options), rank=mesh.rank, size=mesh.world_size)
    model = sharded()
    optimizer = Shampoo(model, **options)
    losses = train_clipped(model, optimizer, rank=mesh.rank, size=mesh.world_size)
    found = compare(as_record(losses, parameters(model)), as_record(expected, parameters(reference)))
    before = {name: value.clone() for name, value in parameters(model).items() if value is not None}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(model(torch.zeros(2, 5, dtype=torch.long)))
    (loss * (float("inf") if mesh.rank == 0 else 1.0)).backward()
    scaler.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items() if value is not None)
    return found


@pytest.mark.numerics
def test_training_is_that_of_replicas() -> None:
    check(run_ranks(check_training, 2), exact=False, tolerance=ROUNDED)
