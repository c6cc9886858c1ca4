"""Activations on the host: training is bit for bit what it is without, and what is moved, when, is recorded.

On a CPU host and device are one; `FULLSHARD_OFFLOAD=rehearse` makes the host further memory, and everything else is as
on any other device. On an accelerator: `pytest tests/test_offload_gpu.py`.

    pytest tests/test_activation_offload.py            # the quick ones: -m "not full"
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fullshard import Accelerator, FullyShardedDataParallelPlugin
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.core.events import Event, EventKind
from fullshard.engine import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    activations,
    describe,
    fully_shard,
    shard_model,
    units_of,
)
from fullshard.engine.offload import SWITCH
from fullshard.plan.activations import layer_activations, page_nbytes
from fullshard.plan.evaluate import changes_that_fit, evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.wrap.policies import checkpoint_modules, compile_modules, unit_modules
from tests.differential import compare, ddp, gradients, optimizer_state, parameters, torch_engine
from tests.distributed import run_ranks
from tests.hosts import are_possible, run_hosts
from tests.offload import Log

WIDTH, DEPTH, TOKENS, STEPS = 64, 4, 256, 2
HIDDEN_NBYTES = 4 * TOKENS * WIDTH
"""Of one layer's input in float32: as little as is moved."""

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ON_HOST = OffloadPolicy(activations=True)


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "rehearse")


class Layer(nn.Module):
    """Views of one storage, a mask, an output that is saved, dropout, and an adapter beside what may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        a, b, c = self.base(self.norm(x)).chunk(3, dim=-1)
        out = functional.dropout(torch.tanh(a) * b * mask + c.relu(), 0.1)
        result: torch.Tensor = torch.sigmoid(x + self.down(out) + self.adapter(x))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.linspace(0.5, 1.0, x.numel()).reshape(x.shape).to(x.dtype)
        x = self.up(x)
        for layer in self.layers:
            x = layer(x, mask)
        out: torch.Tensor = self.head(x)
        return out


def batch(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """What to train, apart from where activations are."""

    policy: MixedPrecisionPolicy | None = None
    checkpointing: str = ""
    is_frozen: bool = False
    micro_batches: int = 1
    two_forwards: bool = False
    strategy: str = "FULL_SHARD"
    shards: bool = False
    compiled: bool = False

    def model(self, offload: OffloadPolicy | None, **arguments: Any) -> nn.Module:
        torch.manual_seed(3)
        model = Model()
        for layer in model.layers if self.is_frozen else ():
            for part in (layer.norm, layer.base, layer.down):
                part.requires_grad_(False)
        layers = list(model.layers)
        if self.checkpointing:
            kinds = {name: self.checkpointing == name for name in ("reentrant", "selective")}
            checkpoint_modules(model, layers, **kinds)
        if self.compiled:
            compile_modules(layers, backend="aot_eager")
        if self.shards and offload is not None:
            offload = OffloadPolicy(compute_shards=True, main_weights=True, activations=True)
        shard_model(
            model,
            unit_modules=layers,
            strategy=self.strategy,
            mp_policy=self.policy,
            offload_policy=offload,
            device=torch.device("cpu"),
            **arguments,
        )
        return model

    def backward(self, model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        losses = []
        for number in range(self.micro_batches):
            losses.append(model(batch(10 * step + number)).float().square().mean())
            if not self.two_forwards:
                losses[-1].backward()
        total = torch.stack(losses).sum()
        if self.two_forwards:
            total.backward()
        return total.detach()


def trained(case: Case, offload: OffloadPolicy | None) -> dict[str, dict[Any, torch.Tensor | None]]:
    model = case.model(offload)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    record: dict[str, dict[Any, torch.Tensor | None]] = {"losses": {}, "gradients": {}}
    for step in range(STEPS):
        record["losses"][step] = case.backward(model, step)
        record["gradients"] |= {f"{step}.{name}": value for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    record["parameters"], record["state"] = parameters(model), optimizer_state(model, optimizer)
    return record


def differences(cases: list[Case]) -> dict[str, float]:
    found = {}
    for case in cases:
        for kind, value in compare(trained(case, ON_HOST), trained(case, None)).items():
            found[f"{case}: {kind}"] = value
    return found


CASES = [
    Case(micro_batches=2),
    Case(BFLOAT16, "full"),
    Case(checkpointing="selective"),
    Case(checkpointing="reentrant"),
    Case(BFLOAT16, is_frozen=True, micro_batches=2, two_forwards=True, shards=True),
]
SLOW_CASES = [
    Case(
        policy,
        checkpointing,
        is_frozen,
        micro_batches=2,
        two_forwards=number % 2 == 0,
        strategy=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")[number % 3],
    )
    for number, (policy, checkpointing, is_frozen) in enumerate(
        itertools.product((None, BFLOAT16), ("", "full", "selective", "reentrant"), (False, True))
    )
]


def test_training_is_bitwise_the_same() -> None:
    for found in run_ranks(differences, 2, CASES):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


@pytest.mark.full
@pytest.mark.parametrize("comm", ["", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_is_bitwise_the_same_everywhere(world_size: int, comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm:
        monkeypatch.setenv("FULLSHARD_COMM", comm)
    for found in run_ranks(differences, world_size, SLOW_CASES):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["", "full"])
def test_compiled_units(checkpointing: str) -> None:
    """A graph saves its tensors like any other function."""
    for found in run_ranks(differences, 1, [Case(checkpointing=checkpointing, compiled=True)]):
        assert set(found.values()) == {0.0}, found
    [said] = run_ranks(moves, 1, Case(checkpointing=checkpointing, compiled=True))
    assert [line.split(": ")[0] for line in said if "to_host" in line] == [f"to_host {i}" for i in range(DEPTH - 1)], (
        said
    )


# -- other engines --------------------------------------------------------------------------------------------------


def language_model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=TOKENS)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model
    options = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    llama: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=61, hidden_size=WIDTH, intermediate_size=2 * WIDTH, **options)
    )
    return llama


def fits(model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext) -> dict[str, dict[Any, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    record: dict[str, dict[Any, Any]] = {"losses": {}}
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(61, (1, TOKENS))
        with around():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        record["losses"][step] = loss.detach()
        record["gradients"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return record | {"parameters": parameters(model)}


def against_others(family: str, checkpointing: str, by_itself: bool) -> dict[str, float]:
    def ours(offload: OffloadPolicy | None) -> dict[str, dict[Any, Any]]:
        model = language_model(family)
        units = unit_modules(model)
        if checkpointing and by_itself:
            options = {"use_reentrant": checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        elif checkpointing:
            checkpoint_modules(model, units, reentrant=checkpointing == "reentrant")
        return fits(shard_model(model, unit_modules=units, offload_policy=offload, event_sink=events.append))

    events: list[Event] = []
    found = ours(ON_HOST)
    moved = {event.unit for event in events if event.what == "activations"}
    assert len(moved) >= 2, moved
    plain = language_model(family)
    torchs = language_model(family)
    others = {
        "plain": ours(None),
        "ddp": fits(ddp(plain)),
        "torch": fits(torch_engine(torchs, unit_modules(torchs)), save_on_cpu),
    }
    return {f"{name}: {k}": v for name, other in others.items() for k, v in compare(found, other).items()}


@pytest.mark.full
@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("checkpointing", ["", "full", "reentrant"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_language_models_as_other_engines_train_them(family: str, checkpointing: str, by_itself: bool) -> None:
    """Without offload, under DDP, and under torch's `fully_shard` with `save_on_cpu`; `by_itself`: Transformers'
    own checkpointing, which is around each layer's hooks instead of inside."""
    for found in run_ranks(against_others, 2, family, checkpointing, by_itself):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


# -- what is moved, when, and how many bytes ------------------------------------------------------------------------


def moves(case: Case, **arguments: Any) -> list[str]:
    """The second step in words."""
    events: list[Event] = []
    model = case.model(ON_HOST, event_sink=events.append, **arguments)
    for step in range(2):
        events.clear()
        case.backward(model, step)
    return [
        f"{event.kind} {event.unit.removeprefix('layers.') or 'root'}" + (f": {event.nbytes}" if event.what else "")
        for event in events
    ]


def test_pages_leave_in_forward_and_are_back_ahead_of_need() -> None:
    """A layer saves its input, the norm's output, the product (once, of which it saves two views), what tanh and relu
    give, what dropout multiplies with and gives; its output with the next layer, whose input that is; and not the mask,
    which the model holds."""
    said = moves(Case())
    layer = HIDDEN_NBYTES * (1 + 1 + 3 + 2 + 2)
    assert [line for line in said if line.startswith("to_")] == [
        *(f"to_host {index}: {layer}" for index in range(DEPTH - 1)),
        *(f"to_device {index}: {layer}" for index in reversed(range(DEPTH - 1))),
    ]


def test_without_prefetch_pages_come_when_they_are_needed() -> None:
    said = moves(Case(checkpointing="full"), backward_prefetch="NO_PREFETCH")
    for index in range(DEPTH - 1):
        back = said.index(f"to_device {index}: {HIDDEN_NBYTES}")
        assert said.index(f"backward_end {index + 1}") < back < said.index(f"backward_begin {index}")
    ahead = moves(Case(checkpointing="full"))
    for index in range(1, DEPTH - 1):
        assert ahead.index(f"to_device {index - 1}: {HIDDEN_NBYTES}") < ahead.index(f"backward_begin {index}")


class Held:
    """Bytes that autograd holds for a model, on either side, at each turn of a page."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = units_of(model)[-1].schedule._activations
        assert self.kept is not None

    def nbytes(self) -> tuple[int, int]:
        """On the device and on the host."""
        assert self.kept is not None
        blocks = [block for page in self.kept._pages for block in page.blocks]
        device = sum(block.nbytes for block in blocks if block.on_device is not None)
        return device, sum(block.nbytes for block in blocks if block.on_host is not None)


def test_the_device_holds_two_pages() -> None:
    """Of a model of twelve layers: what a layer saves, what is on its way, and never more, in either direction."""
    seen: list[tuple[int, int]] = []
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(12)]
    model = nn.Sequential(*layers)
    shard_model(model, unit_modules=layers, offload_policy=ON_HOST, device=torch.device("cpu"))
    held = Held(model)
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(held.nbytes()))
        layer[1].register_full_backward_hook(lambda *_: seen.append(held.nbytes()))
    loss = model(batch(0)).square().mean()
    forward, layer_nbytes = len(seen), 2 * HIDDEN_NBYTES
    loss.backward()
    assert len(seen) == 2 * forward
    assert max(device for device, _ in seen) == 2 * layer_nbytes + HIDDEN_NBYTES  # and the output just computed
    assert seen[forward - 1][1] == 11 * layer_nbytes - HIDDEN_NBYTES  # the batch is not moved: the caller holds it
    assert held.nbytes() == (0, 0)


# -- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_the_planner_knows_what_is_held_where(checkpointing: str) -> None:
    """What autograd holds on the device when each layer's forward ends, and what is on the host in the end, within 5 %.

    Of selective checkpointing the planner counts on the device what it keeps of its own, too.
    """
    import transformers

    settings = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, use_cache=False, tie_word_embeddings=False, **settings
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    shape, _ = from_config(config.to_dict(), where="test")
    units = unit_modules(model)
    if checkpointing != "none":
        checkpoint_modules(model, units, selective=checkpointing == "selective")
    held_at: list[tuple[int, int]] = []
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.FORWARD_END:
            held_at.append(held.nbytes())

    shard_model(model, unit_modules=units, offload_policy=ON_HOST, device=torch.device("cpu"), event_sink=listen)
    held = Held(model)
    ids = torch.randint(61, (1, 2 * TOKENS))
    loss = model(input_ids=ids, labels=ids).loss
    job = Job.of(
        {"precision": "fp32", "seq_len": 2 * TOKENS, "offload_activations": True, "checkpointing": checkpointing}
    )
    plan = evaluate(shape, job, parse_cluster("1xA100"))
    planned = [
        moment.nbytes["activations"]
        for moment in plan.memory.timeline
        if moment.event.kind is EventKind.FORWARD_END and moment.event.unit
    ]
    own = layer_activations(shape.blocks[0], job)
    stays = own.kept - page_nbytes(shape.blocks[0], job)
    for index in range(5):  # the second moment of each: without what is there for a moment
        # The model holds the first layer's input, which then counts with a later layer.
        slack = own.inputs if checkpointing != "none" else 0
        assert held_at[index][0] == pytest.approx(planned[2 * index + 1] - stays * (index + 1), rel=0.05, abs=slack)
    moved = sum(event.nbytes for event in events if event.kind is EventKind.TO_HOST)
    loss.backward()
    assert moved == sum(event.nbytes for event in events if event.kind is EventKind.TO_DEVICE)
    first_input = own.inputs if checkpointing != "none" else 0
    assert moved == pytest.approx(plan.traffic.to_host_nbytes, rel=0.05, abs=first_input)
    assert plan.traffic.to_host_nbytes == plan.traffic.to_device_nbytes


def test_the_plan_of_a_large_model() -> None:
    """Pages instead of layers on the device, the rest on the host, and both ways over PCIe, which takes its time."""
    model, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xA100")
    values = {"seq_len": 8192, "loss": "fused", "optimizer": "adamw-fused"}
    for checkpointing in ("none", "full"):
        plain, moved = (
            evaluate(model, Job.of({**values, "checkpointing": checkpointing, **more}), cluster)
            for more in ({}, {"offload_activations": True})
        )
        layers = len(model.blocks)
        page = page_nbytes(model.blocks[0], moved.job)
        most = [max(moment.nbytes.get("activations", 0) for moment in p.memory.timeline) for p in (plain, moved)]
        assert most[0] - most[1] == (layers - 2) * page
        assert 0 <= plain.memory.peak_of_step - moved.memory.peak_of_step <= (layers - 2) * page
        assert moved.memory.host_steady - plain.memory.host_steady == 8 * (layers - 1) * page
        assert (moved.traffic.to_host_nbytes, moved.traffic.to_device_nbytes) == ((layers - 1) * page,) * 2
        assert moved.time.total >= plain.time.total
    assert moved.time.total < 1.02 * plain.time.total, "inputs of layers are copied beside computing"


def test_what_does_not_fit_is_told_of_it() -> None:
    model, _ = load_model("Llama-3.1-8B")
    job = Job.of({"seq_len": 131072, "checkpointing": "full", "loss": "fused", "optimizer": "adamw-8bit"})
    plan = evaluate(model, job, parse_cluster("8xA100-80"))
    assert not plan.fits
    words = {change.words for change in changes_that_fit(plan, most=20)}
    assert any("the inputs of checkpointed layers on the host" in word for word in words), words


# -- what may go wrong ----------------------------------------------------------------------------------------------


class EachCheckpointed(nn.Sequential):
    """Checkpoints around modules instead of inside, as Transformers has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def one_layer_each(
    offload: OffloadPolicy | None, *layers: nn.Module, container: type[nn.Sequential] = nn.Sequential, **arguments: Any
) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    model = container(first, *layers, nn.Linear(WIDTH, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    units = [first, *layers]
    return shard_model(model, unit_modules=units, offload_policy=offload, device=torch.device("cpu"), **arguments)


class Function(nn.Module):
    """A layer with a weight that does to its input what it is given."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(WIDTH)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def in_place_later(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()  # saves its result
    y += 1
    return y


def views_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2].mul_(2).tanh_()
    return y.t().relu().t() * y.real


def integers(x: torch.Tensor) -> torch.Tensor:
    """Indices, a mask, an expanded and a sparse tensor."""
    values, index = x.sort(dim=1)
    scale = torch.ones(1, 1).expand_as(values) * 2
    diagonal = torch.eye(WIDTH).to_sparse()
    product: torch.Tensor = torch.sparse.mm(diagonal, values.t()).t()
    return torch.where(values > 0, product.gather(1, index.flip(1)), values * 0.5) * scale


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x, x.tanh())
    return (y.conj() * y.exp()).real + torch.view_as_real(y.exp()).sum(-1)


@pytest.mark.parametrize("function", [views_in_place, integers, complex_numbers])
def test_tensors_of_every_kind(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def found(offload: OffloadPolicy | None) -> list[torch.Tensor]:
        model = one_layer_each(offload, Function(function), Function(torch.tanh), Function(function))
        model(batch(1)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = found(None)
    assert plain and all(map(torch.equal, found(ON_HOST), plain))


@pytest.mark.parametrize("position", [0, 2])
def test_a_change_in_place_of_what_backward_needs_is_an_error(position: int) -> None:
    """As without offload; whether its page has left or not."""
    for offload in (None, ON_HOST):
        layers = [Function(torch.sin) for _ in range(3)]
        layers[position] = Function(in_place_later)
        model = one_layer_each(offload, *layers)
        loss = model(batch(1)).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_change_of_what_has_left_is_an_error() -> None:
    """A tensor of the model's that is changed between forward and backward."""
    for offload in (None, ON_HOST):
        kept: list[torch.Tensor] = []

        def keep(x: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(x.sin())
            return kept[0].cos()

        model = one_layer_each(offload, Function(keep), Function(torch.tanh), Function(torch.tanh))
        loss = model(batch(1)).square().mean()
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_within_the_forward() -> None:
    """Of what is on its way to the host at that moment, and once more when it is there."""

    def found(offload: OffloadPolicy | None) -> list[torch.Tensor]:
        gradients_of_input: list[torch.Tensor] = []

        def look_back(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            for _ in range(2):
                gradients_of_input.extend(torch.autograd.grad(y.sum(), first, retain_graph=True))
            return y

        first = batch(1).requires_grad_()
        model = one_layer_each(offload, Function(torch.tanh), Function(look_back), Function(look_back))
        model(first).square().mean().backward()
        return gradients_of_input + [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, found(ON_HOST), found(None)))


def test_two_backwards_through_one_graph() -> None:
    def found(offload: OffloadPolicy | None) -> list[torch.Tensor]:
        model = one_layer_each(offload, Function(torch.tanh), Function(torch.sin))
        loss = model(batch(1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, found(ON_HOST), found(None)))


def test_second_derivatives() -> None:
    def found(offload: OffloadPolicy | None) -> torch.Tensor:
        model = one_layer_each(offload, Function(torch.tanh), Function(torch.sin))
        x = batch(1).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    assert torch.equal(found(ON_HOST), found(None))


def test_a_graph_that_is_thrown_away_takes_its_memory_along() -> None:
    model = Case().model(ON_HOST)
    held = Held(model)
    loss = model(batch(0)).mean()
    device, host = held.nbytes()
    assert device > 0 and host > 0
    model.eval()
    with torch.no_grad():
        model(batch(1))
    assert held.nbytes() == (device, host), "an evaluation between forward and backward keeps nothing and moves nothing"
    del loss
    assert held.nbytes() == (0, 0)
    reference = weakref.ref(model)
    del model, held
    gc.collect()
    assert reference() is None, "hooks keep the model"


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        if raises:
            raise raises[0]("in a layer")
        return x.tanh()

    raises: list[type[BaseException]] = [ValueError]
    model = one_layer_each(ON_HOST, Function(torch.sin), Function(fail), Function(torch.sin))
    held = Held(model)
    with pytest.raises(ValueError, match="in a layer"):
        model(batch(0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert held.nbytes() == (0, 0)
    raises[0] = KeyboardInterrupt  # after which torch calls no hooks
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    raises.clear()
    model(batch(0)).square().mean().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    plain = one_layer_each(None, Function(torch.sin), Function(torch.tanh), Function(torch.sin))
    plain(batch(0)).square().mean().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


@contextlib.contextmanager
def counting(counts: list[int]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def test_somebody_elses_hooks_have_the_last_word() -> None:
    """Around the model, or around a layer: a checkpoint that is given nothing to drop would save nothing."""
    events: list[Event] = []
    model = one_layer_each(ON_HOST, Function(torch.tanh), Function(torch.sin), event_sink=events.append)
    counts = [0]
    with counting(counts):
        loss = model(batch(0)).square().mean()
    assert counts[0] > 6
    assert not any(event.what for event in events)
    loss.backward()
    loss = checkpoint(lambda x: model(x).square().mean(), batch(0), use_reentrant=False)
    loss.backward()
    assert not any(event.what for event in events)
    ran: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.sin()

    layers = [Function(count) for _ in range(4)]
    outside = one_layer_each(ON_HOST, *layers, container=EachCheckpointed, event_sink=events.append)
    outside(batch(0)).square().mean().backward()
    assert len(ran) == 2 * 4, "each layer ran again in backward"
    moved = [(event.kind, event.nbytes) for event in events if event.what]
    assert set(moved) == {(EventKind.TO_HOST, HIDDEN_NBYTES), (EventKind.TO_DEVICE, HIDDEN_NBYTES)}, "inputs alone"


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_NBYTES", HIDDEN_NBYTES + 1)
    assert [line for line in moves(Case(checkpointing="full")) if line.startswith("to_")] == []


def test_streams_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator is told: memory is given up after its copy, and copied into after what used it before."""
    log = Log()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: log.computing)
    layers = [Function(torch.tanh) for _ in range(4)]
    model = nn.Sequential(*layers)
    shard_model(model, unit_modules=layers, offload_policy=ON_HOST, device=torch.device("cpu"))
    host = units_of(model)[-1].storage.host
    assert host is not None
    for name in ("_to_host", "_to_device"):
        monkeypatch.setattr(host, name, log.stream(name.strip("_").replace("_", " ")))
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: log.said.append(f"forward {index}"))
    with monkeypatch.context() as within:
        within.setattr(host, "settle", lambda: None)  # of shards, which are on the device
        x = batch(0).requires_grad_() * 1
        loss = model(x).square().mean()
        copied = ["to host waits for computing", "onto to host", "off to host", "to host records"]
        given_up = "computing waits for the event of to host"
        assert log.said == [
            *("forward 0", "forward 1"),  # the first layer's input is the caller's, its output the second's input
            *(*copied, "forward 2", given_up),
            *(*copied, "forward 3", given_up),
        ]
        log.said.clear()
        loss.backward()
    brought = ["to device waits for computing", "onto to device", "off to device", "to device records"]
    arrived = "computing waits for the event of to device"
    assert log.said == [*brought, arrived, *brought, arrived]


# -- a rank that dies -----------------------------------------------------------------------------------------------

OFFLOADED = {
    "everything and activations": OffloadPolicy(compute_shards=True, main_weights=True, activations=True),
    "optimizer state and activations": OffloadPolicy(optimizer_state=True, activations=True),
    "frozen and activations": OffloadPolicy(compute_shards=True, activations=True),
    "main weights": OffloadPolicy(main_weights=True),
}


def train_until_killed(name: str, moment: str) -> str:
    """Rank 0 is killed in the second step; the others learn of it, and torch's hooks are as they were before."""
    case = Case(BFLOAT16, is_frozen="frozen" in name)
    model = case.model(OFFLOADED[name])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def die(*_: Any) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    try:
        for step in range(4):
            if step == 1:
                layer = model.get_submodule("layers.1")
                if moment == "forward":
                    layer.register_forward_pre_hook(die)
                elif moment == "backward":
                    layer.register_full_backward_hook(die)
                else:
                    optimizer.register_step_pre_hook(die)
                begin = time.monotonic()
            case.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    except CommunicationError as error:
        assert time.monotonic() - begin < 30
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        message = str(error)
    else:
        raise AssertionError("nobody was missed")
    return message


@pytest.mark.full
@pytest.mark.skipif(not are_possible(), reason="this machine makes no namespaces")
@pytest.mark.parametrize(
    ("name", "ranks_per_host", "moment"),
    # Between steps another host has received a part of the next gather, and waits for the rest as long as Gloo does.
    [
        ("everything and activations", (2,), "forward"),
        ("everything and activations", (2,), "backward"),
        ("everything and activations", (2,), "step"),
        ("everything and activations", (2, 1), "forward"),
        ("everything and activations", (2, 1), "backward"),
        ("optimizer state and activations", (2,), "step"),
        ("frozen and activations", (2,), "backward"),
        ("main weights", (2,), "backward"),
    ],
)
def test_a_rank_is_killed(name: str, ranks_per_host: tuple[int, ...], moment: str) -> None:
    """The others say which unit they waited in, in time, and no shared memory is left."""
    results = run_hosts(train_until_killed, ranks_per_host, name, moment, dies=0)
    assert results[0] is None
    assert all("unit" in words for words in results[1:]), results
    assert list(Path("/dev/shm").glob("*fullshard*")) == []


# -- as a user asks for it ------------------------------------------------------------------------------------------


def test_accelerates_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    model = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Model())
    held = Held(model)
    loss = model(batch(0)).mean()
    assert held.nbytes()[1] == (DEPTH - 1) * HIDDEN_NBYTES
    loss.backward()
    capsys.readouterr()
    monkeypatch.delenv(SWITCH)
    Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Model())
    said = capsys.readouterr()
    assert "offload_activations saves nothing here" in said.out + said.err


@pytest.mark.full
def test_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one and two and three and " * 8000, encoding="utf-8")
    options = {"nproc": 2, "device": "cpu", "data": tmp_path / "data.txt", "vocab-size": 320, "steps": 4}
    options |= {"batch-size": 2, "seq-len": 512, "save-every": 0, "sample-tokens": 0}

    def run(name: str, *flags: str) -> str:
        texts = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        code = "from fullshard.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "train", "--no-plot", "--no-export", "--output-dir", name, *texts, *flags],
            capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = run("moved", "--offload-activations", "--activation-checkpointing", "--check-plan")
    assert "activations on the host" in said
    assert "step 3: as planned" in said and "activations copied: not planned, found " in said, said
    plain = run("plain", "--activation-checkpointing")
    losses = [re.findall(r"loss[= ]+([0-9.]+)", text) for text in (said, plain)]
    assert losses[0] and losses[0] == losses[1]


# -- what is refused, and what is said ------------------------------------------------------------------------------


def test_what_is_said_and_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(describe(Case().model(ON_HOST))).endswith("; activations on the host")
    with pytest.raises(ConfigError, match="one unit"):
        shard_model(Model(), unit_modules=[], offload_policy=ON_HOST, device=torch.device("cpu"))
    alone = fully_shard(nn.Linear(WIDTH, WIDTH), offload_policy=ON_HOST)
    with pytest.raises(ConfigError, match="one unit"):  # until now it could have become a layer of another
        alone(batch(0))
    monkeypatch.delenv(SWITCH)  # a CPU is the host itself
    assert not describe(Case().model(ON_HOST)).offload
