"""What torch's `fully_shard` takes and refuses besides modules with a forward: methods, containers, TorchScript, meta.

pytest tests/engine/test_fully_shard_arguments.py
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy, register_fsdp_forward_method
from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.core.events import Event, EventKind
from fullshard.features import CPUOffloadPolicy, ShardedParameter, describe, fully_shard, units_of, unsharded
from fullshard.features.offload.storage import offload_of
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_at_rest,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    run_squared,
)


class Encoder(Block):
    """A block that is entered by methods of its own, one of which calls its forward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.up.weight, self.up.bias)) * self.scale

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self(x)
        return y + self.encode(x)[..., :WIDTH]

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        self.encode(x)
        raise KeyError("mine")


class Encoding(Stack):
    """A model that is never called by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Encoder()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.blocks[1]
        x = self.blocks[0](self.embed(x))
        y: torch.Tensor = self.head(inner.twice(x) + inner.encode(x)[..., :WIDTH])
        return y

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self(x).sum()
        return x * self.head.weight.sum()


class Generating(Stack):
    """Computes with parameters of the root before it calls a forward, as some models of Transformers generate."""

    def prepare_inputs_for_generation(self) -> None:
        """Those have it."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.embed.weight) is nn.Parameter, "it is whole"
        y: torch.Tensor = self.embed(x).sum() * self(x)
        return y


def check_generating() -> None:
    model, plain = build_sharded(Generating, BLOCKS), build(Generating)
    x = batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(model.generate(x), plain.generate(x), rtol=1e-9, atol=1e-9)  # type: ignore[operator]
    assert_at_rest(model)


def test_generate_of_transformers_may_compute_between_forwards() -> None:
    run_ranks(check_generating, 2)


METHODS = {"": ("encode", "generate"), "blocks.1": ("encode", "twice", "fail")}


def run_encode(model: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model.encode(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def run_generate(model: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model.generate(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def registered(strategy: str, method: str) -> None:
    plain: Any = build(Encoding)
    model: Any = build_sharded(Encoding, BLOCKS, strategy=strategy)
    for path, names in METHODS.items():
        for name in names:
            register_fsdp_forward_method(model.get_submodule(path), name)
            register_fsdp_forward_method(plain.get_submodule(path), name)
    run = run_encode if method == "encode" else run_generate
    assert_trains_alike(model, plain, run, steps=2)
    with pytest.raises(KeyError, match="mine"):
        model.blocks[1].fail(batch(0, 0))
    with torch.no_grad():
        torch.testing.assert_close(model.encode(batch(0, 0)), plain.encode(batch(0, 0)), rtol=1e-9, atol=1e-9)
    assert_trains_alike(model, plain, run, steps=1, first=2)
    assert_trains_alike(model, plain, run_squared, steps=1, first=3)
    assert_at_rest(model)
    with pytest.raises(WrapError, match="Encoder has no method 'decode'"):
        register_fsdp_forward_method(model.blocks[1], "decode")


@pytest.mark.parametrize("method", ["encode", "generate"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_registered_methods_unshard(strategy: str, method: str) -> None:
    run_ranks(registered, 2, strategy, method)


def forwards_of_an_encoder() -> int:
    """How often its unit ran forward: called, and entered by a method while it is whole for another reason.

    A forward that a method of the same unit calls is a part of that.
    """
    events: list[Event] = []
    model: Any = build_sharded(Encoding, BLOCKS, events=events)
    register_fsdp_forward_method(model.blocks[1], "encode")
    register_fsdp_forward_method(model, "generate")
    model.generate(batch(0, 0))
    assert [event.unit for event in events if event.kind is EventKind.FORWARD_BEGIN].count("") == 1
    events.clear()
    model(batch(0, 0))
    with unsharded(model):
        model.blocks[1].encode(torch.ones(2, WIDTH, dtype=torch.float64))
    return sum(event.kind is EventKind.FORWARD_BEGIN and event.unit == "blocks.1" for event in events)


def test_a_method_after_a_forward_is_one_of_its_own() -> None:
    assert run_ranks(forwards_of_an_encoder, 1) == [2]


def whole_parameters() -> list[str]:
    """While only the unit is whole that holds the parameters of the head itself."""
    model: Any = build_sharded(Stack, BLOCKS)
    model.head.register_parameter("later", nn.Parameter(torch.zeros(1)))  # of no unit
    with unsharded(model.head, recurse=False):
        return [name for name, p in model.named_parameters() if not isinstance(p, ShardedParameter)]


def test_unsharding_may_leave_other_units_out() -> None:
    own = ["embed.weight", "embed.bias", "head.weight", "head.bias", "head.later"]
    assert run_ranks(whole_parameters, 1) == [own]


def padding() -> tuple[float, float]:
    """Its share as it is said, and as counted."""
    model = build_sharded(Stack, BLOCKS)
    numel = sum(p.numel() for p in model.parameters())
    held = torch.tensor(sum(b.layout.shard_numel for unit in units_of(model) for b in unit.buckets))
    dist.all_reduce(held)
    return describe(model).padding, 1 - numel / int(held)


def test_how_much_is_padding_is_said() -> None:
    for said, counted in run_ranks(padding, 3):
        assert said > 0
        assert said == pytest.approx(counted)


def unregistered() -> None:
    model: Any = build_sharded(Encoding, BLOCKS)
    with pytest.raises(RuntimeError) as raised:
        model.blocks[1].encode(batch(0, 0))
    [note] = raised.value.__notes__
    assert f"rank {dist.get_rank()}, unit 'blocks.1': Encoder.encode was called outside of forward" in note
    assert "hint: call fullshard.register_fsdp_forward_method(module, 'encode')" in note


def test_unregistered_methods_say_what_to_do() -> None:
    run_ranks(unregistered, 2)


class Tokens(nn.Module):
    """An embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


class Entering(Stack):
    """A model that enters its units by `forward` itself, by another method, and by an embedding in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.blocks[1] = Encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.tokens.table((x.abs() * 10).long() % 11)
        x = self.embed(x) + self.tokens(rows.sum(1))
        x = self.blocks[0].forward(x)
        encoder: Any = self.blocks[1]
        # Twice: from the unsharded block the second time, where that is kept.
        x = self.blocks[2].forward(encoder.encode(x)[..., :WIDTH] + encoder.encode(x)[..., -WIDTH:])
        y: torch.Tensor = self.head(x)
        return y


class EnteringInParts(Entering):
    """The same, of which backward computes a part once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def run_forward(model: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model.forward(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def entered(strategy: str, make: type[Stack]) -> None:
    plain: Any = build(make)
    model: Any = build_sharded(make, (*BLOCKS, "tokens"), strategy=strategy)
    assert_trains_alike(model, plain, run_squared, steps=3)
    assert_trains_alike(model, plain, run_forward, steps=1, first=3)
    assert_at_rest(model)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0, 0)), plain(batch(0, 0)), rtol=1e-9, atol=1e-9)
    assert_at_rest(model)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


@pytest.mark.parametrize("make", [Entering, EnteringInParts])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_units_entered_within_a_forward_unshard(strategy: str, make: type[Stack]) -> None:
    """SqueezeBERT calls `layer.forward`, LightGlue another method of layers, ModernVBERT an embedding in a unit."""
    run_ranks(entered, 2, strategy, make)


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([nn.Linear(4, 4)]),
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
        nn.ParameterList([torch.ones(4)]),
        nn.ParameterDict({"a": torch.ones(4)}),
    ],
    ids=lambda container: type(container).__name__,
)
def test_containers_without_forward_are_refused(container: nn.Module) -> None:
    for module in (container, [nn.Linear(2, 2), container]):
        with pytest.raises(WrapError, match=f"nothing would unshard a {type(container).__name__}"):
            fully_shard(module)


class Chain(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def lists() -> None:
    """A container with a forward, and a list of modules, which are unsharded together."""

    def make() -> nn.Module:
        return nn.Sequential(Chain([Block(), Block()]), Block(), Block())

    plain, model = build(make), build(make)
    fully_shard(model[0])  # type: ignore[index]
    fully_shard([model[1], model[2]])  # type: ignore[index]
    fully_shard(model)
    assert_trains_alike(model, plain, run_squared)


def test_lists_of_modules() -> None:
    run_ranks(lists, 2)


def watched_parts() -> tuple[int, int, int]:
    """How many hooks wait for a part of a unit that is called past it."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(inner)
    alone = len(inner[0]._forward_pre_hooks)
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    fully_shard(outer)
    return alone, len(inner[0]._forward_pre_hooks), len(outer[1]._forward_pre_hooks)


def test_parts_are_watched_in_the_outermost_unit() -> None:
    """And no longer in one that was it before."""
    assert run_ranks(watched_parts, 1) == [(1, 0, 1)]


def test_torchscript_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(WrapError, match=r"1 \(Linear\) is TorchScript"):
        fully_shard(model)


def under_meta() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for module in model:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    loss = model(torch.ones(2, WIDTH)).sum()
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None and not p.is_meta for p in model.parameters())


def test_sharded_under_a_meta_context() -> None:
    run_ranks(under_meta, 2)


def test_offload_policy_takes_torchs_argument() -> None:
    for value in (True, False):
        assert CPUOffloadPolicy(value).pin_memory is fsdp.CPUOffloadPolicy(value).pin_memory is value
    assert CPUOffloadPolicy(False).offload == CPUOffloadPolicy().offload
    with pytest.raises(TypeError):
        CPUOffloadPolicy(True, False)  # type: ignore[call-arg]


def test_policies_of_another_kind_are_refused() -> None:
    for wrong in ("bf16", torch.bfloat16, {"param_dtype": torch.bfloat16}, MixedPrecisionPolicy):
        with pytest.raises(ConfigError, match="mp_policy: expected a MixedPrecisionPolicy, got"):
            fully_shard(nn.Linear(2, 2), mp_policy=wrong)
    for other in (True, "cpu", {"pin_memory": True}):
        with pytest.raises(ConfigError, match="offload_policy: expected a CPUOffloadPolicy"):
            fully_shard(nn.Linear(2, 2), offload_policy=other)
    for policy in (fsdp.CPUOffload(True), fsdp.CPUOffloadPolicy()):
        offload = offload_of(policy)
        assert offload is not None and offload.is_everything
    assert not any(offload_of(policy) for policy in (None, False, fsdp.CPUOffload(), fsdp.OffloadPolicy()))


def test_a_plain_module_that_only_holds_others_can_be_a_unit() -> None:
    """torch asks whether some of its methods are those of nn.Module, as this one's must stay."""
    model = nn.Module()
    model.down = nn.Module()
    model.down.layer = nn.Linear(2, 2)
    names = list(model.state_dict())
    fully_shard(model.down)
    fully_shard(model)
    assert list(model.state_dict()) == names
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_children_are_sharded_before_what_is_around_them(device: str) -> None:
    def made() -> nn.Sequential:
        with torch.device(device):
            return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))

    around = fully_shard(made())
    with pytest.raises(
        WrapError, match=r"Linear\.weight is already sharded as 1\.0\.weight(.|\n)*shard inner modules before"
    ):
        fully_shard(around[1])
    tied_late, tied = made(), made()
    fully_shard(tied_late[0])
    tied_late[1][0].weight = tied_late[0].weight  # type: ignore[index]
    with pytest.raises(WrapError, match=r"already sharded as weight(.|\n)*tie parameters before"):
        fully_shard(tied_late)
    tied[1][0].weight = tied[0].weight  # type: ignore[index]
    fully_shard(tied[0])
    with pytest.raises(WrapError, match=r"tied to weight, which another unit already owns"):
        fully_shard(tied)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_memory_formats_are_refused(device: str) -> None:
    """An interval has none; convolutions compute in the format of their inputs."""
    with torch.device(device):
        model = fully_shard(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with pytest.raises(LifecycleError, match=r"cannot convert 0\.weight to torch\.channels_last(.|\n)*hint: .*inputs"):
        model.to(memory_format=torch.channels_last)
    with pytest.raises(LifecycleError, match="channels_last"):
        torch.empty_like(model[0].weight, memory_format=torch.channels_last)
    model.to(memory_format=torch.contiguous_format)
    if device == "cpu":
        out = model(torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last))
        assert out.is_contiguous(memory_format=torch.channels_last)
