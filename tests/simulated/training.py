"""What is trained on the simulated device and on the CPU, to be the same bit for bit.

Only a process that has the device may call `train` and `differences`; the rest says what there is to train.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fullshard.checkpoint.staging import HostMemory
from fullshard.comm import mesh, torch_private
from fullshard.config.switches import OFFLOAD
from fullshard.features import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedTensor,
    clip_grad_norm_,
    keep_unsharded,
    no_sync,
    park,
    shard_model,
    unpark,
)
from fullshard.features.chunked_loss import chunked_cross_entropy
from fullshard.features.offload import pages as activations
from fullshard.features.quantized_weights.quantize import quantize
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.steps_in_backward.stepper import step_in_backward
from fullshard.optim import Muon, OnOwners
from tests.distributed import place_of
from tests.features.extended.test_composed import Coded
from tests.features.extended.test_extended import Halved

WIDTH, DEPTH, TOKENS, BATCH, CHUNK = 16, 3, 11, (2, 7), 5
KEPT_NBYTES = 16_000

CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRAD_OPTIMIZER", "SHARD_OPTIMIZER"),
    "precision": ("fp32", "bf16", "fp16", "bf16 stored", "packed"),
    "prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "reshard": (None, True, False, "auto"),
    "offload": ("nothing", "main weights", "optimizer state", "compute shards", "everything"),
    "activations": ("kept", "on host", "checkpointed", "reentrant", "selective", "on host, checkpointed"),
    "loop": ("plain", "accumulating", "no_sync", "in backward"),
    "parameters": ("all", "frozen", "tied", "unused", "adapters"),
    "optimizer": ("AdamW", "fused", "foreach", "SGD"),
    "loss": ("whole", "in chunks"),
    "parked": ("never", "after steps", "within steps", "before backward", "but weights", "by to()"),
}

OTHERS: dict[str, tuple[Any, ...]] = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    "precision": ("fp32", "bf16"),
    "offload": ("nothing",),
    "loop": ("plain", "accumulating", "no_sync"),
    "activations": ("kept", "on host", "checkpointed"),
    "parameters": ("all", "extended", "composed", "coded"),
    "optimizer": ("AdamW", "Muon", "on owners"),
    "parked": ("never", "after steps", "within steps", "before backward", "but weights", "by to()"),
}
"""In place of those: parameters that say how they are gathered, weights that are codes at rest, and optimizers of whole
matrices, whose exchanges go on beside computing."""


@dataclass(frozen=True)
class Case:
    """One way to train; see `CHOICES`."""

    ranks: int = 1
    strategy: str = "FULL_SHARD"
    precision: str = "fp32"
    prefetch: str = "BACKWARD_PRE"
    reshard: bool | str | int | None = None
    offload: str = "nothing"
    activations: str = "kept"
    loop: str = "plain"
    parameters: str = "all"
    optimizer: str = "AdamW"
    loss: str = "whole"
    parked: str = "never"

    @property
    def is_allowed(self) -> bool:
        """Whether the engine does not refuse it, nor the parameters' class."""
        if self.parameters in ("extended", "composed") and (self.precision != "fp32" or self.optimizer != "AdamW"):
            return False
        if self.offload == "compute shards" and self.parameters not in ("frozen", "adapters", "coded"):
            return False
        if self.loop == "in backward" and (
            self.precision == "fp16" or self.offload not in ("nothing", "compute shards")
        ):
            return False
        if (self.loop, self.parameters, self.loss) == ("in backward", "tied", "in chunks"):
            return False  # a CPU adds the two uses to what earlier micro-batches left, one by one: other last bits
        if self.reshard == 2 and "FULL_SHARD" not in self.strategy:  # neighbors are a part of the ranks that shard
            return False
        return not (self.ranks == 1 and self.precision == "packed")

    def __str__(self) -> str:
        plain = Case()
        told = (str(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name))
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}: " + (", ".join(told) or "plain")


@functools.cache
def pairwise(seed: int = 0, **choices: tuple[Any, ...]) -> list[Case]:
    """Cases in which every two choices that may meet do so."""
    choices = {**CHOICES, **choices}
    dice = random.Random(seed)
    names = list(choices)

    def pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
        return {(a, getattr(case, a), b, getattr(case, b)) for a, b in itertools.combinations(names, 2)}

    def drawn(**fixed: Any) -> Case:
        return Case(**{name: fixed.get(name, dice.choice(choices[name])) for name in names})

    left = set()
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(choices[a], choices[b]):
            if any(drawn(**{a: x, b: y}).is_allowed for _ in range(200)):
                left.add((a, x, b, y))
    cases = []
    while left:
        a, x, b, y = min(left, key=repr)
        several = [case for case in (drawn(**{a: x, b: y}) for _ in range(300)) if case.is_allowed]
        best = max(several, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        cases.append(best)
    return cases


# -- what is trained --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and a product, an adapter beside it, and a part that not every rank uses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.left, self.right = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.rarely = nn.Parameter(torch.ones(WIDTH)) if case.parameters == "unused" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(-1, -2) / 4, dim=-1) @ v
        if self.rarely is not None and dist.get_rank() == 0:
            x = x * self.rarely
        out: torch.Tensor = x + self.down(functional.gelu(self.up(x))) + self.right(self.left(x))
        return out


class Model(nn.Module):
    """A language model.

    Attributes:
        used: layers that forward runs.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.used, self.chunk = DEPTH, CHUNK if case.loss == "in chunks" else 0
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(case) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.never = nn.Parameter(torch.ones(3)) if case.parameters == "unused" else None
        if case.parameters == "tied":
            self.head.weight = self.embedding.weight
        if case.parameters in ("frozen", "adapters", "coded"):
            kept = ("mix", "norm", "down") if case.parameters == "frozen" else ("left", "right")
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(any(f".{part}." in name for part in kept))
        if case.parameters == "coded":
            quantize(self)
        if case.parameters in ("extended", "composed"):
            for layer in self.layers.children():
                layer.up.weight = nn.Parameter(_wrapped(case, layer.up.weight))  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits; the loss, where there are targets."""
        x = self.embedding(tokens)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # as for checkpointing adapters
        for layer in list(self.layers)[: self.used]:
            x = layer(x)
        x = self.norm(x)
        if targets is not None and self.chunk:
            flat = targets.flatten()
            total = chunked_cross_entropy(x.flatten(0, 1), self.head.weight, None, flat, tokens=self.chunk)
            return total / flat.numel()
        out: torch.Tensor = self.head(x)
        return out if targets is None else functional.cross_entropy(out.float().flatten(0, 1), targets.flatten())


def _wrapped(case: Case, weight: torch.Tensor) -> torch.Tensor:
    """A parameter that says how it is gathered, or one of several tensors."""
    return Halved(weight.detach()) if case.parameters == "extended" else Coded.of(weight)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor can be compared."""
    return tensor.plain() if isinstance(tensor, Coded) else tensor


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    """All of them, by all ranks together."""
    parameters: list[Any] = list(model.parameters())
    return [plain(parameter.full_tensor()).detach() for parameter in parameters]


MATRICES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Muon": lambda model: Muon(model, lr=0.01),
    "on owners": lambda model: OnOwners(model, torch.optim.Muon, lr=0.01),
}

_PRECISION = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "bf16 stored": None,
    "packed": MixedPrecisionPolicy(gather_as=torch.int8, reduce_as=torch.bfloat16),
}
OFFLOADS: dict[str, Callable[..., OffloadPolicy]] = {
    "nothing": OffloadPolicy,
    "main weights": lambda **more: OffloadPolicy(main_weights=True, **more),
    "optimizer state": lambda **more: OffloadPolicy(optimizer_state=True, **more),
    "compute shards": lambda **more: OffloadPolicy(compute_shards=True, **more),
    "everything": CPUOffloadPolicy,
}


def made(case: Case, place: torch.device, **more: Any) -> nn.Module:
    """The model of a case, sharded; it is on the CPU before."""
    torch.manual_seed(1)
    model = Model(case)
    if case.precision == "bf16 stored":
        model.bfloat16()
    if "reentrant" in case.activations or "checkpointed" in case.activations or case.activations == "selective":
        how = {"reentrant": case.activations == "reentrant", "selective": case.activations == "selective"}
        checkpoint_modules(model, model.layers, **how)
    sharded = shard_model(
        model,
        unit_modules=list(model.layers),
        device=place,
        **{
            "strategy": case.strategy,
            "shard_size": 2 if "HYBRID" in case.strategy else None,
            "mp_policy": _PRECISION[case.precision],
            "offload_policy": OFFLOADS[case.offload](activations="on host" in case.activations),
            "backward_prefetch": case.prefetch,
            "forward_prefetch": case.prefetch != "NO_PREFETCH",
            "reshard_after_forward": None if case.reshard == "auto" else case.reshard,
            **more,
        },
    )
    if case.reshard == "auto":  # enough for one layer in float32, and for two in half precision
        keep_unsharded(sharded, budget_nbytes=KEPT_NBYTES, ranks_on_host=case.ranks, say=lambda _: None)
    return sharded


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, foreach=False)
    if case.optimizer in MATRICES:
        return MATRICES[case.optimizer](model)
    if case.optimizer == "fused":
        return torch.optim.AdamW(trained, lr=0.01, fused=True)
    return torch.optim.AdamW(trained, lr=0.01, foreach=case.optimizer == "foreach")


def batch(step: int, micro: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    tokens = torch.randint(0, TOKENS, BATCH, generator=generator).to(place)
    return tokens[:, :-1], tokens[:, 1:]


@contextlib.contextmanager
def small_activations() -> Iterator[None]:
    """Have activations of any size go to the host."""
    before, activations.SMALLEST_NBYTES = activations.SMALLEST_NBYTES, 16
    try:
        yield
    finally:
        activations.SMALLEST_NBYTES = before


def train(case: Case, kind: str) -> list[torch.Tensor]:
    """Losses, norms and final weights of this rank, on a device of this kind."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    if case.loop == "in backward":
        step_in_backward(optimizer)
    scaler = torch.amp.GradScaler(place.type, init_scale=256.0) if case.precision == "fp16" else None
    count = 1 if case.loop == "plain" else 2
    found = []
    for step in range(3 if count == 1 else 2):
        for micro in range(count):
            last = micro == count - 1
            model.set_is_last_backward(last)
            with no_sync(model) if case.loop == "no_sync" and not last else contextlib.nullcontext():
                loss = model(*batch(step, micro, place)) / count
                if case.parked == "before backward":
                    rest(case, model, optimizer, place)
                (loss if scaler is None else scaler.scale(loss)).backward()
            found.append(loss.detach())
            if case.parked == "within steps":
                rest(case, model, optimizer, place)
        if case.loop != "in backward":
            if scaler is not None:
                scaler.unscale_(optimizer)
            found.append(clip_grad_norm_(model, 0.5))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if case.parked != "never":
            rest(case, model, optimizer, place)
    return [value.cpu() for value in (*found, *whole_parameters(model))]


def rest(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Park the model and bring it back, with another use of the device in between."""
    if case.parked == "by to()":
        for there in (torch.device("cpu"), place):
            model.to(there, non_blocking=True)
            for state in optimizer.state.values() if case.offload in ("nothing", "optimizer state") else ():
                state.update({key: value.to(there) for key, value in state.items() if isinstance(value, torch.Tensor)})
        return
    park(model, optimizer, keep="weights" if case.parked == "but weights" else None)
    torch.ones(4096, device=place).neg_()  # overwrites what has lost its memory
    unpark(model, optimizer)


def change(case: Case, kind: str) -> list[torch.Tensor]:
    """The same where the script itself changes main weights, at once after a forward or a backward."""
    place = place_of(kind)
    model: Any = made(case, place)
    found = []

    @torch.no_grad()
    def shrink() -> None:
        for parameter in model.parameters():
            parameter.mul_(0.75)

    for step in range(2):
        tokens, targets = batch(step, 0, place)
        with torch.no_grad():
            found.append(model(tokens).float().sum())
        shrink()
        loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        shrink()
        norm = clip_grad_norm_(model, 0.5)
        found += [loss.detach(), norm]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
    return [value.cpu() for value in (*found, *whole_parameters(model))]


def hook(case: Case, kind: str) -> list[torch.Tensor]:
    """The same with a hook of the script's on what is reduced, on a stream of its own."""
    place = place_of(kind)
    model: Any = made(case, place)
    stream = torch.Stream(place) if kind != "cpu" else None
    model.set_all_reduce_hook(lambda reduced: reduced.mul_(3).add_(0.5), stream=stream)
    found = []
    for step in range(2):
        tokens, targets = batch(step, 0, place)
        functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
        found.append(clip_grad_norm_(model, 0.5))
    return [value.cpu() for value in found]


def stage(case: Case, kind: str) -> list[torch.Tensor]:
    """What a background save would write, read as soon as it has been copied."""
    place = place_of(kind)
    memory = HostMemory()
    model: Any = made(case, place)
    found = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75)
        state = {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}
        found += [value.clone() for value in memory.copy({"model": state})["model"].values()]
        memory.reuse()
    return found


def look(case: Case, kind: str) -> list[torch.Tensor]:
    """The optimizer's state, read on the host as soon as it has stepped."""
    place = place_of(kind)
    model: Any = made(case, place)
    optimizer = optimizer_of(case, model)
    found: list[torch.Tensor] = []
    for step in range(2):
        tokens, targets = batch(step, 0, place)
        functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            found += [value.local.clone() for value in state.values() if isinstance(value, ShardedTensor)]
    assert found and all(value.device.type == "cpu" for value in found)
    return found


def change_in_turn(case: Case, kind: str) -> list[torch.Tensor]:
    """`change` where copies have no streams of their own."""
    with pytest.MonkeyPatch.context() as within:
        within.setenv(OFFLOAD.name, "in-turn")
        return change(case, kind)


Program = Callable[[Case, str], list[torch.Tensor]]


@contextlib.contextmanager
def as_with_nccl() -> Iterator[None]:
    """Have the engine reduce in place, as it does with a backend that is not written in Python.

    Groups for messages between hosts stay simulated: Gloo's threads would wait for ranks that do not run.
    """
    backend_of, made_by = torch_private.backend_of, mesh._made_by

    def found(group: Any, device: torch.device) -> Any:
        return "NCCL" if device.type != "cpu" and group is not dist.group.WORLD else backend_of(group, device)

    torch_private.backend_of, mesh._made_by = found, lambda ranks, device, backend=None: made_by(ranks, device)
    try:
        yield
    finally:
        torch_private.backend_of, mesh._made_by = backend_of, made_by


def on_the_cpu(case: Case, program: Program = train) -> list[list[torch.Tensor]]:
    """What a case gives on the CPU, for each rank."""
    from tests.simulated.device import Order, begin
    from tests.simulated.group import run_ranks

    with small_activations():
        begin(Order.LAZY)
        return run_ranks(program, case.ranks, case, "cpu")


def differences(
    case: Case,
    seed: int = 1,
    program: Program = train,
    expected: list[list[torch.Tensor]] | None = None,
    orders: slice = slice(None),
) -> list[str]:
    """The orders, all or some, in which a case does not give what it gives on the CPU."""
    from tests.simulated.device import NAME, ORDERS, begin
    from tests.simulated.group import run_ranks

    expected = on_the_cpu(case, program) if expected is None else expected
    with small_activations(), as_with_nccl():
        wrong = []
        for order in ORDERS[orders]:
            begin(order, seed)
            try:
                found = run_ranks(program, case.ranks, case, NAME)
            except Exception as error:
                wrong.append(f"{order.name}: {type(error).__name__}: {error}"[:2000])
                continue
            for rank, (values, right) in enumerate(zip(found, expected, strict=True)):
                places = [i for i, (a, b) in enumerate(zip(values, right, strict=True)) if not torch.equal(a, b)]
                if places:
                    wrong.append(
                        f"{order.name}: rank {rank}: {len(places)} of {len(right)} differ, the first {places[0]}: "
                        f"{values[places[0]].flatten()[:3].tolist()} for {right[places[0]].flatten()[:3].tolist()}"
                    )
    return wrong
