"""Activations on the host: what may go wrong with saved tensors, with hooks, streams and ranks.

pytest tests/features/offload/test_activation_traps.py              # the quick ones: -m "not full"
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import CommunicationError
from fullshard.core.events import Event, EventKind
from fullshard.features import OffloadPolicy, shard_model, units_of
from fullshard.features.offload import pages as activations
from fullshard.features.offload.storage import HostStorage
from tests.activations import (
    BFLOAT16,
    HIDDEN_NBYTES,
    ON_HOST,
    WIDTH,
    Case,
    Held,
    batch,
    moves,
)
from tests.hosts import are_possible, run_hosts
from tests.offload import Log

pytestmark = pytest.mark.usefixtures("rehearsed")


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


def are_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit by bit; and there are some."""
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


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

    assert are_same(found(ON_HOST), found(None))


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

    assert are_same(found(ON_HOST), found(None))


def test_two_backwards_through_one_graph() -> None:
    def found(offload: OffloadPolicy | None) -> list[torch.Tensor]:
        model = one_layer_each(offload, Function(torch.tanh), Function(torch.sin))
        loss = model(batch(1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert are_same(found(ON_HOST), found(None))


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
    storage = units_of(model)[-1].storage
    assert isinstance(storage, HostStorage)
    host = storage.host
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
    [
        ("everything and activations", (2,), "forward"),
        ("everything and activations", (2,), "backward"),
        ("everything and activations", (2,), "step"),
        ("everything and activations", (2, 1), "forward"),
        ("everything and activations", (2, 1), "backward"),
        ("everything and activations", (2, 1), "step"),
        ("optimizer state and activations", (2,), "step"),
        ("frozen and activations", (2,), "backward"),
        ("main weights", (2,), "backward"),
    ],
)
def test_a_rank_is_killed(name: str, ranks_per_host: tuple[int, ...], moment: str) -> None:
    """The others say which unit they waited in, in time."""
    results = run_hosts(train_until_killed, ranks_per_host, name, moment, dies=0)
    assert results[0] is None
    assert all("unit" in words for words in results[1:]), results
