"""Muon on sharded models against `torch.optim.Muon` on whole tensors: the same numbers, whoever owns a matrix.

pytest tests/optim/test_muon.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.core.events import Event, EventKind
from fullshard.features import ShardedParameter, fully_shard, init_mesh, shard_model
from fullshard.features.steps_in_backward.stepper import step_in_backward
from fullshard.optim import EMA, MatrixRule, Muon, OnOwners
from fullshard.plan.dealing import NEWTON_SCHULZ_STEPS
from fullshard.plan.matrices import MatrixWork
from tests import optimizers
from tests.differential import (
    Record,
    check,
    compare,
    ddp,
    difference,
    optimizer_state,
    parameters,
    plain,
    products_are_exact,
    rounding,
)
from tests.distributed import run_ranks
from tests.matrices import sent_numel
from tests.offload import POLICIES

STEPS = 3
RATE, EPS, PASS = 0.01, 1e-8, 150
"""Learning rate; Adam's epsilon; terms that a forward or a backward pass adds up one after the other."""
ROUNDED = RATE / EPS * rounding(torch.float64, STEPS * 2 * PASS)
"""Of weights and losses in float64: Adam divides by no less than `EPS`. In float32 the last bit of a gradient decides
how the direction is rounded to bfloat16, which moves weights by a hundredth of themselves."""


class Block(nn.Module):
    """Matrices of several shapes; with W ranks every one of them is cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.experts = nn.Parameter(torch.randn(3, width, 5) / 4)
        self.unused = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + torch.einsum("bsd,edf->bsf", x, self.experts).sum(-1, keepdim=True)


class Model(nn.Module):
    """An embedding tied to the head, a convolution, a frozen matrix, blocks."""

    def __init__(self, width: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lm_head = nn.Linear(width, 31, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.frozen(x)).flatten(0, 1), tokens.flatten())


class Pair:
    """`torch.optim.Muon` for each matrix and `torch.optim.AdamW` for the rest, as one would write it without us.

    Torch's takes nothing but matrices, so it is given views of the others, which are of the same memory.
    """

    def __init__(self, model: nn.Module, *, lr: float = RATE, **options: Any) -> None:
        rule, self._views = MatrixRule.of(model), list[tuple[nn.Parameter, int | None, nn.Parameter]]()
        for parameter in rule.matrices.values():
            for index in range(len(parameter)) if parameter.dim() == 3 else [None]:
                whole = parameter.detach()
                self._views.append((parameter, index, nn.Parameter(whole if index is None else whole[index])))
        for parameter in rule.convolutions.values():
            self._views.append((parameter, None, nn.Parameter(parameter.detach().flatten(1))))
        others = [*rule.embeddings.values(), *rule.heads.values(), *rule.vectors.values()]
        self._muon = torch.optim.Muon([view for _, _, view in self._views], lr=lr, **options)
        self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=options.get("weight_decay", 0.1))

    def step(self) -> None:
        for parameter, index, view in self._views:
            if parameter.grad is not None:
                view.grad = (parameter.grad if index is None else parameter.grad[index]).reshape(view.shape)
            else:
                view.grad = None
        self._muon.step()
        self._adamw.step()

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for parameter, _, _ in self._views:
            parameter.grad = None


def model_of() -> Model:
    torch.manual_seed(1)
    return Model().double()


def sharded(strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    model = model_of()
    shard_model(model, strategy=strategy, unit_modules=list(model.blocks), **options)
    return model


# -- the same gradients: the optimizer alone ----------------------------------------------------------------------


def _left_out(name: str, step: int) -> bool:
    """The second step leaves some parameters out."""
    return step == 1 and ("unused" in name or "conv" in name)


given_gradients = partial(optimizers.given_gradients, leaves_out=_left_out)
step_with = partial(optimizers.step_with, leaves_out=_left_out)


def check_same_as_torch(options: dict[str, Any], sharding: dict[str, Any]) -> dict[str, float]:
    reference = model_of()
    step_with(reference, Pair(reference, **options))
    model = sharded(**sharding)
    step_with(model, Muon(model, **{"lr": RATE, **options}))
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.01},
    {"ns_steps": 3, "momentum": 0.8, "ns_coefficients": (3.0, -4.0, 1.8), "eps": 1e-3},
]


@pytest.mark.numerics
@pytest.mark.parametrize("options", OPTIONS)
def test_one_rank(options: dict[str, Any]) -> None:
    check(run_ranks(check_same_as_torch, 1, options, {}), exact=True, tolerance=ROUNDED)


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [
        (2, {}),
        (3, {}),
        (2, {"strategy": "NO_SHARD"}),
        *(pytest.param(size, {"strategy": "SHARD_GRAD_OP"}, marks=pytest.mark.full) for size in (1, 2, 3, 4)),
        pytest.param(2, {"strategy": "HYBRID_SHARD", "shard_size": 1}, marks=pytest.mark.full),
        pytest.param(3, {"strategy": "NO_SHARD"}, marks=pytest.mark.full),
        (4, {"strategy": "HYBRID_SHARD", "shard_size": 2}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "SHARD_GRAD_OPTIMIZER"}, marks=pytest.mark.full),
    ],
)
def test_sharded(world_size: int, sharding: dict[str, Any]) -> None:
    """Each matrix is computed whole, so the number of ranks changes nothing: not to a rounding, at all."""
    options = {"adjust_lr_fn": "match_rms_adamw"}
    check(run_ranks(check_same_as_torch, world_size, options, sharding), exact=True, tolerance=ROUNDED)


# -- training -----------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: Any, *, rank: int = 0, size: int = 1, micros: int = 2, clip: float = 0.5
) -> list[float]:
    """`micros` micro-batches per step; gradients clipped to a norm of `clip`, or not if that is 0."""
    losses = []
    for step in range(STEPS):
        for micro in range(micros):
            generator = torch.Generator().manual_seed(10 * step + micro)
            loss = model(torch.randint(0, 31, (2 * size, 7), generator=generator)[rank::size])
            loss.backward()
            losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_training(engine: str) -> dict[str, float]:
    mesh = init_mesh()
    reference = ddp(model_of())
    expected = train(reference, Pair(plain(reference)), rank=mesh.rank, size=mesh.world_size)
    model = sharded(engine)
    losses = train(model, Muon(model, lr=RATE), rank=mesh.rank, size=mesh.world_size)
    return compare(as_record(losses, parameters(model)), as_record(expected, parameters(reference)))


@pytest.mark.numerics
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.full)])
def test_training_is_that_of_replicas(strategy: str) -> None:
    """Accumulated, clipped, with a tied, a frozen and an unused parameter."""
    check(run_ranks(check_training, 2, strategy), exact=False, tolerance=ROUNDED)


def check_same_sums() -> dict[str, float]:
    mesh = init_mesh()
    reference, model = ddp(model_of()), sharded()
    once: dict[str, Any] = {"rank": mesh.rank, "size": mesh.world_size, "micros": 1, "clip": 0}
    losses, expected = train(model, Muon(model, lr=RATE), **once), train(reference, Pair(plain(reference)), **once)
    return compare(as_record(losses, parameters(model)), as_record(expected, parameters(reference)))


@pytest.mark.numerics
def test_training_is_bit_by_bit_that_of_replicas_that_add_in_the_same_order() -> None:
    """One micro-batch, no norm: what makes the other test's last bits differ."""
    check(run_ranks(check_same_sums, 2), exact=True, tolerance=ROUNDED)


@pytest.mark.parametrize("shape", [(511, 600), (512, 512), (700, 513)])
def test_large_matrices_have_torchs_bits(shape: tuple[int, int]) -> None:
    """Of 512 rows or more a quarter of each symmetric product is a copy.

    Where a product of a part has other bits: three products per iteration, one after the other.
    """
    torch.manual_seed(0)
    mine, theirs = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
    mine.grad = theirs.grad = torch.randn(shape)
    Muon([mine]).step()
    torch.optim.Muon([theirs]).step()
    limit = 0.0 if products_are_exact() else rounding(torch.bfloat16, 3 * NEWTON_SCHULZ_STEPS)
    assert difference(mine.detach(), theirs.detach()) <= limit


STRATEGIES = {"FULL_SHARD": None, "SHARD_GRAD_OP": None, "HYBRID_SHARD": {1: 1, 2: 1, 3: 1, 4: 2}}


def trained(
    model: nn.Module, optimizer: Any, parts: Sequence[int], size: int
) -> tuple[list[float], dict[str, torch.Tensor | None]]:
    """Losses of these of `size` parts of each batch, and all weights; gradients of several are added as ranks do."""
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 31, (12, 7), generator=torch.Generator().manual_seed(step))
        gradients: dict[nn.Parameter, list[torch.Tensor]] = {}
        for part in parts:
            loss = model(tokens[part::size])
            loss.backward()
            losses.append(loss.item())
            for parameter in model.parameters() if len(parts) > 1 else ():
                if parameter.grad is not None:
                    gradients.setdefault(parameter, []).append(parameter.grad)
                    parameter.grad = None
        for parameter, terms in gradients.items():
            parameter.grad = in_tree(terms) / size
        optimizer.step()
        optimizer.zero_grad()
    return losses, parameters(model)


def in_tree(terms: list[torch.Tensor]) -> torch.Tensor:
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return in_tree(terms[:half]) + in_tree(terms[half:])


def train_with_every_strategy() -> dict[str, tuple[list[float], dict[str, torch.Tensor | None]]]:
    mesh = init_mesh()
    found = {}
    for strategy, sizes in STRATEGIES.items():
        model = sharded(strategy, shard_size=None if sizes is None else sizes[mesh.world_size])
        found[strategy] = trained(model, Muon(model, lr=RATE), [mesh.rank], mesh.world_size)
    return found


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 4))])
def test_training_is_that_of_one_process(world_size: int) -> None:
    """Bit by bit the losses and weights of `torch.optim.Muon` in one process that adds up the ranks' gradients.

    Three replicas add in another order.
    """
    model = model_of()
    expected = as_record(*trained(model, Pair(model), range(world_size), world_size))
    everyone = run_ranks(train_with_every_strategy, world_size)
    for strategy in STRATEGIES:
        ranks = [found[strategy] for found in everyone]
        losses = [loss for of_step in zip(*(losses for losses, _ in ranks), strict=True) for loss in of_step]
        is_exact = (strategy, world_size) != ("HYBRID_SHARD", 3)
        for kind, value in compare(as_record(losses, ranks[0][1]), expected).items():
            check([{f"{strategy}, {kind}": value}], exact=is_exact, tolerance=ROUNDED)


def as_record(losses: list[float], weights: dict[str, torch.Tensor | None]) -> Record:
    return {"losses": {"in order": torch.tensor(losses, dtype=torch.float64)}, "parameters": weights}


def check_scaler() -> None:
    """A step that the scaler leaves out changes nothing, no momentum either."""
    model = sharded()
    optimizer = Muon(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: value.clone() for name, value in parameters(model).items() if value is not None}
    loss = scaler.scale(model(torch.zeros(2, 5, dtype=torch.long)))
    (loss * (float("inf") if init_mesh().rank == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items() if value is not None)
    scaler.scale(model(torch.zeros(2, 5, dtype=torch.long))).backward()
    scaler.step(optimizer)
    assert optimizer.state


def test_a_step_that_the_scaler_leaves_out() -> None:
    run_ranks(check_scaler, 2)


def check_nan_guard() -> None:
    """A step whose gradients hold NaN on one rank changes nothing: no weight, no momentum."""
    model = sharded()
    model.set_nonfinite_gradients("skip")  # type: ignore[operator]
    optimizer = Muon(model)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((parameters(model), optimizer_state(model, optimizer)))
    (model(tokens) * (float("nan") if init_mesh().rank == 1 else 1.0)).backward()
    with pytest.warns(UserWarning, match="the step is skipped") if init_mesh().rank == 0 else nullcontext():
        optimizer.step()
    after = parameters(model), optimizer_state(model, optimizer)
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)  # type: ignore[arg-type]


def test_gradients_that_are_not_finite() -> None:
    run_ranks(check_nan_guard, 2)


def check_offloaded(policies: list[str]) -> dict[str, float]:
    """Main weights on the host, or the momentum: the same bits, of Muon, of Adafactor and of averages."""
    found: dict[str, float] = {}
    for name, make in (("muon", lambda m: Muon(m, lr=RATE)), ("adafactor", adafactor)):
        records = []
        for policy in (None, *policies):
            model = sharded(offload_policy=None if policy is None else POLICIES[policy])
            optimizer, ema = make(model), EMA(model, 0.5)
            for step in range(STEPS):
                model(torch.arange(10).view(2, 5) + step).backward()
                optimizer.step()
                optimizer.zero_grad()
                ema.update()
            with ema.swapped():
                averages = parameters(model)
            records.append({"parameters": parameters(model), "averages": averages})
        for policy, record in zip(policies, records[1:], strict=True):
            found |= {f"{name}, {policy}: {kind}": value for kind, value in compare(record, records[0]).items()}
    return found


def adafactor(model: nn.Module) -> OnOwners:
    return OnOwners(model, torch.optim.Adafactor, whole_parameters=True)


@pytest.mark.usefixtures("rehearsed")
@pytest.mark.parametrize(
    "policies", [["everything"], pytest.param(["main weights", "optimizer state"], marks=pytest.mark.full)]
)
def test_offloaded(policies: list[str]) -> None:
    check(run_ranks(check_offloaded, 2, policies), exact=True, tolerance=ROUNDED)


def check_memory_and_traffic() -> tuple[int, int, int]:
    """(bytes sent, as the dealing says; elements of momentum); one tensor of state per matrix, no more than a shard."""
    events: list[Event] = []
    model = sharded(event_sink=events.append)
    optimizer = Muon(model)
    step_with(model, optimizer, steps=1)
    mesh = init_mesh()
    [whole] = optimizer._whole
    sent = sum(event.nbytes for event in events if event.kind is EventKind.PIECES_SENT)
    turns = [event.what.split()[0] for event in events if event.kind is EventKind.PIECES_SENT]
    assert turns == ["to", "to", "from", "to", "from", "from"]  # the next leave before the last are computed with
    assert sent == 2 * sum(sent_numel(whole.dealing, mesh.replicate_rank, mesh.shard_rank))
    state = [value.local.numel() for s in optimizer.state.values() for k, value in s.items() if k == "momentum_buffer"]
    total = sum(matrix.numel for matrix in whole.dealing.matrices)
    assert MatrixWork(whole.dealing).owned_nbytes / 2 < 0.6 * total
    return sent, sum(state), total


def test_memory_and_traffic() -> None:
    """Both exchanges together send at most 2 (W - 1) / W of all matrices, in bfloat16; momentum is there once."""
    results = run_ranks(check_memory_and_traffic, 2)
    total = results[0][2]
    assert 0 < sum(sent for sent, _, _ in results) <= 2 * (2 - 1) / 2 * 2 * total
    assert sum(numel for _, numel, _ in results) == total


def check_fewer_matrices_than_ranks() -> dict[str, float]:
    """One matrix, three ranks: two of them own nothing, and all have the update."""
    records = []
    for shards in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(40, 12)).double()
        if shards:
            shard_model(model, unit_modules=[])
            optimizer: Any = Muon(model, lr=RATE)
        else:
            optimizer = Pair(model)
        step_with(model, optimizer)
        records.append({"parameters": parameters(model)})
    return compare(records[1], records[0])


def test_fewer_matrices_than_ranks() -> None:
    check(run_ranks(check_fewer_matrices_than_ranks, 3), exact=True, tolerance=ROUNDED)


# -- state --------------------------------------------------------------------------------------------------------


def check_state_dict() -> None:
    """Through torch's state dict into an optimizer of another instance, and from one made before sharding."""
    model = sharded()
    optimizer = Muon(model)
    step_with(model, optimizer, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    again = Muon(model)
    again.load_state_dict(saved)
    first, second = optimizer_state(model, optimizer), optimizer_state(model, again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)  # type: ignore[arg-type]
    assert any("momentum_buffer" in key for key in first)
    assert any("exp_avg_sq" in key for key in first)
    step_with(model, again, steps=1)  # AdamW's part goes on with what was loaded


def test_state_dict() -> None:
    run_ranks(check_state_dict, 2)


def save(directory: str, *, torchs: bool) -> None:
    model = sharded()
    optimizer = Muon(model, lr=RATE)
    step_with(model, optimizer, steps=STEPS - 1)
    if torchs:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    else:
        save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)


def resume(directory: str, torchs: bool) -> dict[str, float]:
    """The last step, by another optimizer on another number of ranks, against a run in one piece."""
    reference = model_of()
    step_with(reference, Muon(reference, lr=RATE))
    torch.manual_seed(9)
    model = Model().double()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer = Muon(model, lr=0.5)
    if torchs:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    step_with(model, optimizer, first=STEPS - 1)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


@pytest.mark.parametrize("torchs", [False, True], ids=["fullshard", "torch"])
def test_saved_on_two_ranks_resumed_on_others(torchs: bool, tmp_path: Path) -> None:
    run_ranks(partial(save, torchs=torchs), 2, str(tmp_path))
    for world_size in (3, 1):
        check(run_ranks(resume, world_size, str(tmp_path), torchs), exact=True, tolerance=ROUNDED)


def check_made_before_sharding() -> dict[str, float]:
    from fullshard.features import repoint

    reference = model_of()
    whole = Muon(reference, lr=RATE)
    step_with(reference, whole)
    model = model_of()
    optimizer = Muon(model, lr=RATE)
    step_with(model, optimizer, steps=1)
    shard_model(model, unit_modules=list(model.blocks))
    repoint(optimizer, model)
    step_with(model, optimizer, first=1)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


def test_made_before_sharding() -> None:
    check(run_ranks(check_made_before_sharding, 2), exact=True, tolerance=ROUNDED)


# -- what is refused, and the rule ----------------------------------------------------------------------------------


def test_rule() -> None:
    rule = MatrixRule.of(model_of())
    assert set(rule.embeddings) == {"tokens.weight"}  # tied to the head
    assert set(rule.convolutions) == {"conv.weight"}
    names = {
        f"blocks.{i}.{name}" for i in range(2) for name in ("up.weight", "down.weight", "experts", "unused.weight")
    }
    assert set(rule.matrices) == names
    assert str(rule).startswith("Muon updates 8 matrices of 8.8 k elements (blocks.0.experts, ")
    untied = model_of()
    untied.lm_head.weight = nn.Parameter(torch.zeros(31, 24))
    assert set(MatrixRule.of(untied).heads) == {"lm_head.weight"}


def test_adapters_are_matrices() -> None:
    """LoRA's factors: what is published finds Muon on them as good as AdamW or better (arXiv 2605.10468)."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up", "tokens", "lm_head"])
    model = peft.get_peft_model(model_of(), config)
    rule = MatrixRule.of(model)
    assert len(rule.matrices) == 4
    assert all("lora_A" in name or "lora_B" in name for name in rule.matrices)
    assert {name.split(".")[2] for name in rule.embeddings} == {"tokens"}
    assert {name.split(".")[2] for name in rule.heads} == {"lm_head"}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"lr": -1.0}, ConfigError, "lr is -1.0, expected 0 or more"),
        ({"adjust_lr_fn": "rms"}, ConfigError, "adjust_lr_fn is 'rms'"),
        ({"momentum": -0.1}, ConfigError, "momentum is -0.1"),
        ({"adamw_betas": (0.9, 1.5)}, ValueError, "beta"),
    ],
)
def test_values_that_cannot_be(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Muon(model_of(), **arguments)


def test_vectors_are_refused_where_they_are_not_asked_for() -> None:
    model = model_of()
    with pytest.raises(OptimizerError, match=r"of shape \(24,\).*is not a matrix.*\n.*Muon\(model\)"):
        Muon(model.parameters())
    with pytest.raises(ConfigError, match="algorithm is 'sgd'"):
        Muon([{"params": [model.conv.weight], "algorithm": "sgd"}])


def test_torchs_own_is_refused_and_says_what_to_write() -> None:
    model = sharded()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    for parameter, grad in given_gradients(model, 0):
        assert isinstance(parameter, ShardedParameter)
        parameter.grad = parameter.wrap(grad.reshape(-1))
    with pytest.raises(OptimizerError, match=r"hint: write fullshard.optim.Muon\(model, lr=...\)"):
        optimizer.step()


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = Muon(model)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(OptimizerError, match=r"0.weight \(8, 8\) is split by tensor parallelism.*hold only \(4, 8\)"):
        optimizer.step()


def test_tiles_of_tensor_parallelism_are_no_matrices() -> None:
    run_ranks(check_tensor_parallel, 2)


def test_it_does_not_step_in_backward() -> None:
    model = sharded()
    for optimizer in (Muon(model), adafactor(model)):
        with pytest.raises(OptimizerError, match="cannot step in backward"):
            step_in_backward(optimizer)
