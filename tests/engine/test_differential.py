"""The engine against DDP and against torch's `fully_shard`: losses, gradients, parameters, optimizer state.

Each test trains the same model with several engines on the same ranks and compares everything after every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard.core.strategy import STRATEGIES
from fullshard.features import (
    MixedPrecisionPolicy,
    ShardedParameter,
    clip_grad_norm_,
    clip_grad_value_,
    fully_shard,
    repoint,
    shard_model,
)
from tests.differential import (
    EPS,
    TOLERANCE,
    Engine,
    Record,
    check,
    compare,
    ddp,
    difference,
    gradients,
    optimizer_state,
    parameters,
    plain,
    torch_engine,
    unsynced,
)
from tests.distributed import run_ranks

VOCABULARY, WIDTH, SEQUENCE = 37, 12, 5

Optimizer = torch.optim.Optimizer


# -- models -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Odd shapes, a frozen parameter between trainable ones, and in every second block one that is never used."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 29)
        self.frozen = nn.Parameter(torch.randn(29), requires_grad=False)
        self.down = nn.Linear(29, WIDTH, bias=False)
        self.unused = nn.Linear(3, 7) if index % 2 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x)) + self.frozen))
        return x + inner


class Model(nn.Module):
    """A small language model with tied embeddings, which every engine here can train."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(i) for i in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class AwkwardBlock(Block):
    """Beyond that a scalar, an empty and a double-precision parameter, trainable and frozen, in the same unit."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.precise = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.float64))
        self.precise_frozen = nn.Parameter(torch.randn(3, 5, dtype=torch.float64), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        # transposed storage: its elements do not lie in the order of its indices
        self.across = nn.Parameter(torch.randn(WIDTH, 11).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.scale + self.shift + self.empty.sum()
        low_rank = (x.double() @ self.precise @ self.precise_frozen).sum(-1, keepdim=True)
        across = (x @ self.across.t()).mean(-1, keepdim=True)
        # DDP sums bfloat16 gradients in bfloat16, we in float32: keep that difference out of everything else.
        return x + low_rank.float() * 0.01 + across + self.coarse.float().mean() * 1e-4


class Awkward(Model):
    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.blocks = nn.ModuleList(AwkwardBlock(i) for i in range(depth))


class BranchingBlock(Block):
    """Uses one layer on rank 0 only, and the layer on no rank in even steps."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.calls += 1
        if dist.get_rank() == 0 and self.calls % 2 == 0:
            x = x + self.sometimes(x)
        return x


class Branching(Model):
    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.blocks = nn.ModuleList(BranchingBlock(i) for i in range(depth))


def build(cls: type[Model] = Model) -> Model:
    """The same on every rank and every call."""
    torch.manual_seed(7)
    return cls()


# -- engines ----------------------------------------------------------------------------------------------------


def theirs(model: Model, **arguments: Any) -> nn.Module:
    return torch_engine(model, list(model.blocks), **arguments)


def ours(model: Model, **arguments: Any) -> nn.Module:
    return shard_model(model, unit_modules=list(model.blocks), **arguments)


# -- training ---------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003, eps=EPS)


@dataclass(frozen=True)
class Plan:
    """What to train, apart from the engine.

    Attributes:
        optimizer: makes the optimizer from the (sharded) model.
        micro_batches: backwards per step.
        sync_last_only: reduce in the last of them only.
        before_step: runs between backward and step, for example clipping; what it returns is recorded.
    """

    cls: type[Model] = Model
    optimizer: Callable[[nn.Module], Optimizer] = field(default=adamw)
    steps: int = 5
    micro_batches: int = 1
    sync_last_only: bool = False
    before_step: Callable[[nn.Module], torch.Tensor | None] | None = None


def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    tokens = torch.randint(VOCABULARY, (3, SEQUENCE), generator=generator)
    return tokens, torch.randint(VOCABULARY, (3, SEQUENCE), generator=generator)


def train(engine: Engine, plan: Plan) -> Record:
    """Train a fresh model and record everything that can be compared."""
    model = engine(build(plan.cls))
    optimizer = plan.optimizer(plain(model))
    record: Record = {"losses": {}, "gradients": {}, "returned": {}}
    for step in range(plan.steps):
        for micro_batch in range(plan.micro_batches):
            tokens, targets = batch(step, micro_batch)
            last = micro_batch == plan.micro_batches - 1
            with unsynced(model) if plan.sync_last_only and not last else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
                loss.backward()
            record["losses"][f"{step}.{micro_batch}"] = loss.detach()
        if plan.before_step is not None:
            record["returned"][step] = plan.before_step(model)
        record["gradients"] |= {f"{step}.{name}": grad for name, grad in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    record["parameters"] = parameters(model)
    record["state"] = optimizer_state(plain(model), optimizer)
    return record


# -- all strategies over one to four ranks ----------------------------------------------------------------------

SHARD_SIZES = {1: 1, 2: 1, 3: 3, 4: 2}
"""Ranks per shard group of the hybrid strategies, by world size."""

PLANS = {"model": Plan(), "awkward": Plan(cls=Awkward)}


def grid(strategy: str, shard_size: int | None, name: str) -> dict[str, float]:
    plan, row = PLANS[name], STRATEGIES[strategy]
    record = train(lambda m: ours(m, strategy=strategy, shard_size=shard_size), plan)
    result = {f"ddp {kind}": value for kind, value in compare(record, train(ddp, plan)).items()}
    replicate_size, size = row.mesh_shape(dist.get_world_size(), shard_size)
    if plan.cls is not Model or (replicate_size > 1 and size == 1):
        return result  # torch's takes no such parameters, or has no such strategy
    mesh_shape = (size,) if replicate_size == 1 else (replicate_size, size)
    reshard = row.reshards_after_forward
    peer = train(lambda m: theirs(m, mesh_shape=mesh_shape, reshard_after_forward=reshard), plan)
    return result | {f"torch {kind}": value for kind, value in compare(record, peer).items()}


def grid_cases() -> list[Any]:
    cases = []
    for name in PLANS:
        for world_size, hybrid_shard_size in SHARD_SIZES.items():
            for strategy in STRATEGIES:
                hybrid = strategy.startswith("HYBRID")
                quick = (world_size, strategy) in QUICK or (world_size == 2 and (name == "awkward" or not hybrid))
                quick |= world_size == 1 and name == "awkward" and not hybrid
                if world_size > 2 and strategy == "FULL_SHARD":
                    quick = (world_size, name) in ((3, "awkward"), (4, "model"))
                if STRATEGIES[strategy].keeps_parameters:
                    quick = world_size == 2 and name == "awkward"
                marks = [] if quick else [pytest.mark.full]
                shard_size = hybrid_shard_size if hybrid else None
                cases.append(pytest.param(world_size, strategy, shard_size, name, marks=marks))
    return cases


QUICK = [(3, "FULL_SHARD"), (4, "FULL_SHARD"), (4, "NO_SHARD"), (4, "HYBRID_SHARD")]


@pytest.mark.parametrize(("world_size", "strategy", "shard_size", "name"), grid_cases())
def test_training_matches_ddp_and_torch(world_size: int, strategy: str, shard_size: int | None, name: str) -> None:
    """Five steps of AdamW. At three ranks and more every engine adds up in an order of its own, NO_SHARD included."""
    check(run_ranks(grid, world_size, strategy, shard_size, name), exact=world_size <= 2)


def alone(strategy: str) -> dict[str, float]:
    if dist.is_initialized():
        dist.destroy_process_group()
    record = train(lambda m: ours(m, strategy=strategy, shard_size=1), Plan(cls=Awkward))
    return compare(record, train(lambda m: m, Plan(cls=Awkward)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_process_group_it_is_the_model_alone(strategy: str) -> None:
    [result] = run_ranks(alone, 1, strategy)
    check([result], exact=True)


def branching(strategy: str) -> dict[str, float]:
    plan = Plan(cls=Branching)
    return compare(train(lambda m: ours(m, strategy=strategy), plan), train(ddp, plan))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_parameters_that_only_one_rank_uses(strategy: str) -> None:
    """Their gradient is the mean with zeros; where no rank uses one it has none, so that weight decay stays away."""
    check(run_ranks(branching, 2, strategy), exact=True)


# -- gradient accumulation --------------------------------------------------------------------------------------


def accumulation(sync_last_only: bool, strategy: str, shard_size: int | None) -> tuple[dict[str, float], ...]:
    plan = Plan(micro_batches=3, sync_last_only=sync_last_only)
    record = train(lambda m: ours(m, strategy=strategy, shard_size=shard_size), plan)
    size = STRATEGIES[strategy].mesh_shape(dist.get_world_size(), shard_size)[1]
    mesh_shape = (dist.get_world_size() // size, size) if shard_size else (size,)
    return compare(record, train(ddp, plan)), compare(record, train(lambda m: theirs(m, mesh_shape=mesh_shape), plan))


@pytest.mark.parametrize("sync_last_only", [False, True], ids=["reduce each", "no_sync"])
def test_accumulation_over_micro_batches(sync_last_only: bool) -> None:
    by_ddp, by_torch = zip(*run_ranks(accumulation, 2, sync_last_only, "FULL_SHARD", None), strict=True)
    # Without no_sync DDP reduces the running sum again and again, which rounds differently.
    check(by_ddp, exact=sync_last_only)
    check(by_torch, exact=True)


@pytest.mark.full
@pytest.mark.parametrize("sync_last_only", [False, True], ids=["reduce each", "no_sync"])
@pytest.mark.parametrize(
    ("strategy", "shard_size"), [("FULL_SHARD", None), ("HYBRID_SHARD", 2), ("SHARD_GRAD_OP", None)]
)
def test_accumulation_on_four_ranks(sync_last_only: bool, strategy: str, shard_size: int | None) -> None:
    by_ddp, by_torch = zip(*run_ranks(accumulation, 4, sync_last_only, strategy, shard_size), strict=True)
    check(by_ddp, exact=False)
    check(by_torch, exact=False)


# -- clipping ---------------------------------------------------------------------------------------------------


def clipping(order: float, cls: type[Model], strategy: str, shard_size: int | None) -> dict[str, float]:
    """Both spellings against torch's on the replicas of DDP. `foreach` only changes how it is computed."""

    def clip(model: nn.Module) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, order).double()

    reference = train(ddp, Plan(cls=cls, before_step=clip))
    result: dict[str, float] = {}
    spellings: dict[str, Callable[[nn.Module], torch.Tensor]] = {
        "torch.nn.utils": clip,
        "fullshard": lambda m: clip_grad_norm_(m, 0.05, order).double(),
    }
    for name, spelling in spellings.items():
        record = train(lambda m: ours(m, strategy=strategy, shard_size=shard_size), Plan(cls=cls, before_step=spelling))
        result |= {f"{name} {kind}": value for kind, value in compare(record, reference).items()}
    return result


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 3.0, 0.5])
def test_clipping_by_norm(order: float) -> None:
    check(run_ranks(clipping, 2, order, Model, "FULL_SHARD", None), exact=False)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("world_size", "strategy", "shard_size"),
    [(1, "FULL_SHARD", None), (2, "NO_SHARD", None), (3, "FULL_SHARD", None), (4, "HYBRID_SHARD", 2)],
)
def test_clipping_by_norm_with_every_kind_of_parameter(world_size: int, strategy: str, shard_size: int | None) -> None:
    check(run_ranks(clipping, world_size, 2.0, Awkward, strategy, shard_size), exact=False)


def norms(strategy: str, shard_size: int | None) -> dict[str, list[float]]:
    """Norms of known gradients: element i of parameter p is p + i, so that every slice is different."""
    model = ours(build(), strategy=strategy, shard_size=shard_size)
    everything = []
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            assert isinstance(parameter, ShardedParameter)
            full = torch.arange(parameter.shape.numel(), dtype=torch.float32) * 0.01 + number
            parameter.grad = parameter.wrap(full[parameter.interval.start : parameter.interval.stop].clone())
            everything.append(full)
    flat = torch.cat(everything).double()
    orders = [2.0, 1.0, 3.0, float("inf")]
    got = [torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], o) for o in orders]
    assert clip_grad_norm_(model.parameters(), 1e9) == got[0]
    return {"got": [g.item() for g in got], "expected": [flat.norm(o).item() for o in orders]}


@pytest.mark.parametrize(
    ("world_size", "strategy", "shard_size"),
    [(1, "FULL_SHARD", None), (3, "FULL_SHARD", None), (2, "NO_SHARD", None), (4, "HYBRID_SHARD", 2)],
)
def test_norms_are_those_of_one_process(world_size: int, strategy: str, shard_size: int | None) -> None:
    results = run_ranks(norms, world_size, strategy, shard_size)
    assert all(result == results[0] for result in results), "every rank has the same norm"
    assert results[0]["got"] == pytest.approx(results[0]["expected"], rel=TOLERANCE)


def nonfinite() -> None:
    model = ours(build())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter.detach())
    held = (p for p in model.parameters() if isinstance(p, ShardedParameter) and p.requires_grad and p.interval.numel)
    own = next(held).local_grad
    if dist.get_rank() == 1:
        assert own is not None
        own[0] = float("nan")
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="total norm"):
            clip(model.parameters(), 1.0, error_if_nonfinite=True)


def test_a_nan_on_one_rank_raises_on_all() -> None:
    run_ranks(nonfinite, 2)


def clipping_by_value() -> dict[str, float]:
    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    reference = train(ddp, Plan(cls=Awkward, before_step=clip))
    assert any(grad is not None and grad.abs().max() == 0.01 for grad in reference["gradients"].values())
    result: dict[str, float] = {}
    for spelling in (clip, lambda m: clip_grad_value_(m, 0.01)):
        result |= compare(train(ours, Plan(cls=Awkward, before_step=spelling)), reference)
    return result


def test_clipping_by_value() -> None:
    check(run_ranks(clipping_by_value, 2), exact=True)


# -- optimizers -------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.003, "eps": EPS}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.003, "amsgrad": True, "weight_decay": 0.1, "eps": EPS}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.1, "eps": EPS}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.003, "weight_decay": 0.1, "eps": EPS}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.003, "eps": EPS}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.003, "eps": EPS}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": EPS}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.003, "momentum": 0.9, "centered": True, "eps": EPS}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.003}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
FUSED_ON_CPU = ["SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad"]


def optimizing(name: str, implementation: dict[str, Any]) -> dict[str, float]:
    cls, arguments = OPTIMIZERS[name]
    plan = Plan(optimizer=lambda m: cls(m.parameters(), **arguments, **implementation))
    return compare(train(ours, plan), train(ddp, plan))


@pytest.mark.parametrize("implementation", ["foreach", pytest.param("for", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_optimizers(name: str, implementation: str) -> None:
    check(run_ranks(optimizing, 2, name, {"foreach": implementation == "foreach"}), exact=True)


@pytest.mark.numerics
@pytest.mark.parametrize("name", FUSED_ON_CPU)
def test_fused_optimizers(name: str) -> None:
    """Fused kernels treat the last few elements of a tensor apart, and a slice ends elsewhere than its whole."""
    check(run_ranks(optimizing, 2, name, {"fused": True}), exact=False)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_optimizers_on_three_ranks(name: str) -> None:
    check(run_ranks(optimizing, 3, name, {}), exact=False)


def by_dimensions(model: nn.Module) -> Optimizer:
    """The usual split: decay matrices, leave biases and norms alone."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]
    assert all(group["params"] for group in groups)
    return torch.optim.AdamW(groups, lr=0.003, eps=EPS)


def by_name(model: nn.Module) -> Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matches = [("bias", 0.0, 0.02), ("norm.weight", 0.1, 0.001), ("blocks", 0.5, 0.003), ("", 0.2, 0.005)]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay, "lr": lr} for _, decay, lr in matches]
    for name, parameter in named:
        groups[next(i for i, (part, _, _) in enumerate(matches) if part in name)]["params"].append(parameter)
    assert all(group["params"] for group in groups)
    return torch.optim.AdamW(groups, eps=EPS)


def grouped(name: str) -> dict[str, float]:
    plan = Plan(optimizer={"by_dimensions": by_dimensions, "by_name": by_name}[name], cls=Awkward)
    return compare(train(ours, plan), train(ddp, plan))


@pytest.mark.parametrize("name", ["by_dimensions", "by_name"])
def test_parameter_groups(name: str) -> None:
    check(run_ranks(grouped, 2, name), exact=True)


def made_before_sharding(warm_up: int) -> dict[str, float]:
    """The optimizer exists, and may have state, before the model is sharded; then both train on."""
    records = []
    for engine in (ours, ddp):
        model = build()
        optimizer = by_name(model)
        for step in range(warm_up):
            tokens, targets = (tensor.clone() for tensor in batch(step, 0))
            dist.broadcast(tokens, 0)  # before sharding nothing is averaged over the ranks
            dist.broadcast(targets, 0)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped = engine(model)
        if engine is ours:
            repoint(optimizer, wrapped)
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(group["params"]) for group in by_name(plain(wrapped)).param_groups
        ]
        records.append(train_further(wrapped, optimizer, warm_up))
    return compare(*records)


def train_further(model: nn.Module, optimizer: Optimizer, first: int) -> Record:
    for step in range(first, first + 4):
        tokens, targets = batch(step, 0)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": parameters(model), "state": optimizer_state(model, optimizer)}


@pytest.mark.parametrize("warm_up", [0, 2])
def test_an_optimizer_made_before_sharding(warm_up: int) -> None:
    check(run_ranks(made_before_sharding, 2, warm_up), exact=True)


# -- reduced precision ------------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16, reduced in bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "fp16": {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
    "only reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "only reduced in double": {"reduce_dtype": torch.float64},
}


def mixed_precision(name: str, sync_last_only: bool) -> dict[str, float]:
    plan = Plan(micro_batches=2, sync_last_only=sync_last_only)
    policy, peer = MixedPrecisionPolicy(**POLICIES[name]), TorchMixedPrecisionPolicy(**POLICIES[name])
    assert MixedPrecisionPolicy.of(peer) == policy
    return compare(train(lambda m: ours(m, mp_policy=policy), plan), train(lambda m: theirs(m, mp_policy=peer), plan))


@pytest.mark.parametrize(
    ("name", "sync_last_only"),
    [
        *((name, False) for name in POLICIES),
        ("fp16", True),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in POLICIES if name != "fp16"),
    ],
)
def test_mixed_precision_matches_torch(name: str, sync_last_only: bool) -> None:
    # Torch accumulates micro-batches in the stored dtype, we in the wider one.
    exact = name != "only reduced in double" or sync_last_only
    check(run_ranks(mixed_precision, 2, name, sync_last_only), exact=exact)


def by_module(model: Model, shard: Callable[..., Any], policy: Callable[..., Any]) -> nn.Module:
    """The same calls in both dialects: each unit with a policy of its own."""
    policies = [policy(param_dtype=torch.float32), policy(**POLICIES["bf16"]), policy(**POLICIES["bf16"])]
    for index, (block, own) in enumerate(zip(model.blocks, policies, strict=True)):
        shard(block, mp_policy=own, reshard_after_forward=index != 1)
    shard(model, mp_policy=policy(**POLICIES["bf16"], output_dtype=torch.float64))
    return model


def policy_per_module() -> dict[str, float]:
    plan = Plan()
    record = train(lambda m: by_module(m, fully_shard, MixedPrecisionPolicy), plan)
    reference = train(lambda m: by_module(m, torch_fully_shard, TorchMixedPrecisionPolicy), plan)
    return compare(record, reference)


def test_a_policy_per_module_matches_torch() -> None:
    check(run_ranks(policy_per_module, 2), exact=True)


def scaled(engine: Engine, overflow: int) -> Record:
    """Train in float16 with a loss scaler; in step `overflow` rank 1's loss is infinite."""
    model = engine(build())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    record: Record = {"scales": {}, "parameters": {}}
    for step in range(6):
        tokens, targets = batch(step, 0)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        if step == overflow and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record["scales"][step] = torch.tensor(scaler.get_scale())
        record["parameters"] |= {f"{step}.{name}": value for name, value in parameters(model).items()}
    return record


def scaling() -> dict[str, float]:
    policy = POLICIES["fp16"]
    record = scaled(lambda m: ours(m, mp_policy=MixedPrecisionPolicy(**policy)), 2)
    scales = [256.0, 256.0, 128.0, 128.0, 128.0, 256.0]
    check([compare({"scales": record["scales"]}, {"scales": dict(enumerate(map(torch.tensor, scales)))})], exact=True)
    for name, value in record["parameters"].items():
        step, _, rest = name.partition(".")
        if step == "2":
            before = record["parameters"][f"1.{rest}"]
            assert difference(value, before) == 0, f"{rest} moved in a step that overflowed"
    return compare(record, scaled(lambda m: theirs(m, mp_policy=TorchMixedPrecisionPolicy(**policy)), 2))


def test_loss_scaling_matches_torch() -> None:
    check(run_ranks(scaling, 2), exact=True)


def overflow_in_one_slice(strategy: str, shard_size: int | None) -> tuple[float, bool]:
    """Rank 1 alone sees an infinite gradient, in its own slice; returns the new scale and whether anything moved."""
    model = ours(build(), strategy=strategy, shard_size=shard_size)
    before = parameters(model)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    tokens, targets = batch(0, 0)
    scaler.scale(nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())).backward()
    if dist.get_rank() == 1:
        sharded = (p for p in model.parameters() if isinstance(p, ShardedParameter))
        own = next(p.local_grad for p in sharded if p.local_grad is not None and p.interval.numel)
        own[-1] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    after = parameters(model)
    return scaler.get_scale(), any(difference(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("world_size", "strategy", "shard_size"), [(2, "FULL_SHARD", None), (2, "NO_SHARD", None), (4, "HYBRID_SHARD", 2)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int, strategy: str, shard_size: int | None) -> None:
    results = run_ranks(overflow_in_one_slice, world_size, strategy, shard_size)
    assert results == [(128.0, False)] * world_size
