"""Units on the meta device: from torch's way of setting a model up (`to_empty`, then initialize) to loaded weights."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize

from fullshard import (
    CPUOffloadPolicy,
    ShardedParameter,
    ShardedTensor,
    clip_grad_norm_,
    describe,
    fully_shard,
    repoint,
    shard_model,
    unsharded,
)
from fullshard.core.errors import CommunicationError, LifecycleError, OptimizerError
from fullshard.features import clip_grad_value_
from fullshard.features.meta_device import torch_private
from tests.distributed import run_ranks
from tests.traps import rank_and_size

WIDTH = 5
INPUTS = torch.arange(20, dtype=torch.float32).view(4, WIDTH) / 10


class Net(nn.Module):
    """A norm with buffers, a layer, and a head with the layer's weight; `scale` is the outermost unit's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layer.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.block = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.layer(self.norm(x)))) * self.scale
        return out

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)


def net(**options: Any) -> Any:
    with torch.device("meta"):
        model = Net()
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def initialize(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(reset := getattr(module, "reset_parameters", None), type(module.forward)):
            reset()


def whole() -> Net:
    model = Net()
    initialize(model)
    return model


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, ShardedParameter), name
        assert torch.equal(parameter.full_tensor(), expected), name
    for (name, buffer), value in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, value), name


def assert_trains(model: nn.Module, reference: nn.Module) -> None:
    """Every rank has the same inputs, so the gradients are one process's."""
    both = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, reference)]
    for _ in range(2):
        for each, optimizer in both:
            each(INPUTS).square().mean().backward()
            clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, ShardedTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, msg=name)


def check_empty() -> None:
    model = net()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta and isinstance(parameter, ShardedTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.shape == Net().get_parameter(name).shape and parameter.name.startswith(name)
    assert all(value.is_meta for value in model.state_dict().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    assert model.head.weight is model.layer.weight and model.layer.weight.names == ("layer.weight", "head.weight")
    assert all(bool(p.isnan().all()) for p in model.parameters())
    repoint(optimizer, model)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    initialize(model)
    assert_equal(model, whole())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains(model, whole())


def check_nobody_filled() -> None:
    model = net()
    model.to_empty(device="cpu")
    initialize(model.block)
    with pytest.warns(UserWarning, match="never filled") as caught:
        model(INPUTS)
    assert not any("block" in str(warning.message) for warning in caught)


def check_refused() -> None:
    rank, _ = rank_and_size()
    model = net()
    for use in (
        lambda: model(INPUTS),
        lambda: model.unshard(),
        lambda: describe(model),
        lambda: unsharded(model).__enter__(),
    ):
        with pytest.raises(LifecycleError, match=rf"(?s)still on meta device: \['(block|scale).*rank {rank}.*to_empty"):
            use()
    with pytest.raises(LifecycleError, match=r"from torch.float32 on meta to torch.float64 on cpu"):
        model._apply(lambda tensor: torch.empty_like(tensor, device="cpu", dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="to_empty"):
        model.to("cpu")
    model.scale = nn.Parameter(torch.ones(WIDTH + 1))
    model.block.to_empty(device="cpu")
    for child in (model.norm, model.layer, model.head):
        child.to_empty(device="cpu")
    with pytest.raises(LifecycleError, match=r"parameter scale was replaced.*\(6,\)"):
        model(INPUTS)
    assert model.scale.shape == (WIDTH + 1,)  # and nothing was taken over


def check_parts() -> None:
    """Parts of a unit made real one by one, and a parameter put in place, are what it starts with."""
    model, reference = net(), cast(Any, whole())
    model.set_gradient_divide_factor(1.0)
    model.block.set_gradient_divide_factor(1.0)
    for child in (model.norm, model.layer, model.head, model.block):
        child.to_empty(device="cpu")
    held = model.norm.weight
    initialize(model.block[0])
    model.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, ShardedTensor):
                parameter.local.copy_(parameter.spec.cut(reference.get_parameter(name)))
    for name, buffer in reference.named_buffers():
        model.get_buffer(name).copy_(buffer)
    model(INPUTS).square().mean().backward()
    reference(INPUTS).square().mean().backward()
    assert_equal(model, reference)
    _, size = rank_and_size()
    torch.testing.assert_close(model.scale.grad.full_tensor(), reference.scale.grad * size)
    torch.testing.assert_close(model.block[0].weight.grad.full_tensor(), reference.block[0].weight.grad * size)
    optimizer = torch.optim.SGD([held, model.scale], lr=0.1)
    repoint(optimizer, model)
    assert optimizer.param_groups[0]["params"][0] is model.norm.weight


def check_loaded(how: str) -> None:
    rank, _ = rank_and_size()
    model, reference = net(), whole()
    state = reference.state_dict()
    if how == "distributed":
        meta = model.state_dict()
        state = {
            key: nn.Parameter(distribute_tensor(value, meta[key].device_mesh, meta[key].placements))
            if isinstance(meta[key], ShardedTensor)
            else value
            for key, value in state.items()
        }
        model.load_state_dict(state, assign=True)
    elif how == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if rank == 0 else {}, options=options)
    else:
        model.load_state_dict(state, assign=how == "assign")
        if how == "copy":  # torch leaves buffers on meta then
            for module, other in zip(model.modules(), reference.modules(), strict=True):
                module._buffers.update({name: buffer.clone() for name, buffer in other.named_buffers(recurse=False)})
    assert_equal(model, reference)
    assert_trains(model, reference)


def check_real(how: str) -> None:
    """`assign=True` on a model that has memory keeps the parameters, which an optimizer holds."""
    reference = whole()
    model: Any = shard_model(Net(), unit_modules=[])
    before = dict(model.named_parameters())
    model.load_state_dict(reference.state_dict(), assign=True)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert_equal(model, reference)
    with pytest.raises(LifecycleError, match=r"scale: the value is torch.float64, but .*float32"):
        model.load_state_dict(whole().double().state_dict(), assign=True)


def check_mixed() -> None:
    """Real parameters in a unit with others on meta keep their values, frozen ones and the trained."""
    model: Any = Net()
    model.layer.bias.requires_grad_(False)
    bias, scale = model.layer.bias.detach().clone(), model.scale.detach().clone()
    model.norm.to("meta")
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.norm.to_empty(device="cpu")
    model.norm.weight.requires_grad_(False)
    initialize(model.norm)
    model(INPUTS).square().mean().backward()
    assert torch.equal(model.layer.bias.full_tensor(), bias) and torch.equal(model.scale.full_tensor(), scale)
    assert model.layer.bias.grad is None and model.norm.weight.grad is None and model.norm.bias.grad is not None


def check_real_on_rank_0() -> None:
    """Where rank 0 alone had the model, and the others make it real from the meta device, they find one another's."""
    rank, _ = rank_and_size()

    def layers() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def sharded() -> Any:
        with torch.device("cpu" if rank == 0 else "meta"):
            model = layers()
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    model, reference = sharded(), layers()
    model.to("cpu") if rank == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, reference.state_dict() if rank == 0 else {}, options=options)
    assert torch.equal(model(INPUTS), reference(INPUTS))

    model = sharded()
    elsewhere = r"(?s)rank 0 has \[unit '0' has its buckets at .*rank 1 has \["
    if rank:
        for layer in reversed(model):
            layer.to_empty(device="cpu")
    with pytest.raises(CommunicationError, match=elsewhere), unsharded(model):
        pass
    for gathers in (model.unshard, lambda: model(INPUTS)):
        with pytest.raises(CommunicationError, match=elsewhere):
            gathers()

    model = sharded()  # and so is one of which rank 1 has no values at all
    with pytest.raises(CommunicationError, match=r"rank 1 has \[unit '0' is on the meta device\]"), unsharded(model):
        pass


def check_cast(how: str) -> None:
    """A model that is cast after sharding is one that was cast before, in forward, backward and step."""
    reference = whole()
    if how == "meta":
        model: Any = net().to(torch.float64).to_empty(device="cpu")
        initialize(model.to(torch.float32))
        model.double()
    else:
        torch.__future__.set_swap_module_params_on_conversion(how == "swap")
        offload = CPUOffloadPolicy(pin_memory=False) if how == "offload" else None
        model = shard_model(whole(), unit_modules=[], offload_policy=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stale = torch.optim.SGD(model.parameters(), lr=0.1)
        model.unshard()
        model.to(torch.float64)
        repoint(optimizer, model)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        with pytest.raises(OptimizerError, match=r"refers to scale as it was before sharding, casting or"):
            stale.step()
    reference.double()
    assert_equal(model, reference)
    assert model.norm.running_mean.dtype is torch.float64 and model.norm.num_batches_tracked.dtype is torch.int64
    global INPUTS
    before, INPUTS = INPUTS, INPUTS.double()
    try:
        assert_trains(model, reference)
        with pytest.raises(
            LifecycleError, match=r"rank \d, (unit '.*'|the outermost unit): .*that have gradients or optimizer"
        ):
            model.float()
    finally:
        INPUTS = before
        torch.__future__.set_swap_module_params_on_conversion(False)
    fresh: Any = shard_model(whole(), unit_modules=[])
    fresh(INPUTS).sum().backward()
    with pytest.raises(LifecycleError, match="that have gradients or optimizer state"):
        fresh.to(torch.bfloat16)
    with pytest.raises(LifecycleError, match=r"from torch.float32 on cpu to torch.float32 on meta"):
        fresh.to("meta")


def renames(module: nn.Module, saved: str, here: str) -> None:
    """Hooks as a user's, who has given something in the module another name since."""

    def rename(before: str, after: str) -> Any:
        def hook(_module: nn.Module, state: dict[str, Any], prefix: str, *_arguments: object) -> None:
            for key in [key for key in state if key.startswith(prefix + before)]:
                state[prefix + after + key.removeprefix(prefix + before)] = state.pop(key)

        return hook

    module.register_load_state_dict_pre_hook(rename(saved, here))
    module.register_state_dict_post_hook(rename(here, saved))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


BEFORE: dict[str, Any] = {
    "checkpointed unit": lambda m: m.__setattr__("block", checkpoint_wrapper(m.block)),
    "checkpointed layer": lambda m: m.block.__setitem__(0, checkpoint_wrapper(m.block[0])),
    "compiled unit": lambda m: m.__setattr__("block", compiled(m.block)),
    "renaming unit": lambda m: renames(m.block, "first.", "0."),
    "renaming layer": lambda m: renames(m.block[0], "kernel", "weight"),
    "renaming model": lambda m: renames(m, "trunk.", "block."),
    "parametrized": lambda m: parametrize.register_parametrization(m.block[0], "weight", Doubled(), unsafe=True),
}
AFTER = {name: BEFORE[name] for name in ("checkpointed unit", "compiled unit", "renaming unit", "renaming model")}


def check_renamed() -> None:
    """What wraps modules and renames keys, before sharding and after it: loaded weights train, by steps in hooks."""
    for before, after in [*((change, None) for change in BEFORE.values()), *((None, c) for c in AFTER.values())]:
        for assign in (True, False):
            reference, change = whole(), before or after
            change(reference)
            state = {key: value.clone() for key, value in reference.state_dict().items()}
            with torch.device("meta"):
                model: Any = Net()
            if before:
                before(model)
            fully_shard(model.block)
            fully_shard(model)
            if after:
                after(model)
            model.norm.to_empty(device="cpu")
            model.load_state_dict(state, assign=assign)
            trains_in_hooks(model, reference)
            assert model.state_dict().keys() == state.keys()


def trains_in_hooks(model: nn.Module, reference: nn.Module) -> None:
    steppers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        steppers[parameter].step()
        steppers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        model(INPUTS).square().mean().backward()
        reference(INPUTS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]


def check_taken_early() -> None:
    """Parameters that were taken before the unit had its memory: hooks move on, an optimizer is told the truth."""
    model, reference = net(), whole()
    seen: list[str] = []
    on_meta = model.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.name))
    removed = model.norm.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.name))
    for module, other in zip(model.modules(), reference.modules(), strict=True):
        for name, parameter in other.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
        module._buffers.update({name: buffer.clone() for name, buffer in other.named_buffers(recurse=False)})
    model.head.weight = model.layer.weight
    taken = list(model.parameters())
    optimizer = torch.optim.SGD(taken, lr=0.1)
    model.block[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.name))
    model(INPUTS).square().mean().backward()
    assert sorted(seen) == ["block.0.bias", "norm.bias", "scale"]
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm == clip_grad_norm_(taken, 1e9) > 0
    clip_grad_value_(taken, 1e-9)
    assert clip_grad_norm_(model, 1e9) < 1e-7
    with pytest.raises(OptimizerError, match=r"materializing from the meta device.*\n.*repoint"):
        optimizer.step()
    repoint(optimizer, model)
    optimizer.step()
    removed.remove()
    on_meta.remove()
    model(INPUTS).sum().backward()
    assert seen[3:] == ["block.0.bias"]

    with torch.device("meta"):
        layer: Any = nn.Linear(WIDTH, 3)
    before = torch.optim.SGD(layer.parameters(), lr=0.1)
    fully_shard(layer)
    layer.bias.register_hook(lambda grad: None)
    with pytest.raises(LifecycleError, match="parameter bias while it was on the meta device would never run"):
        layer.to_empty(device="cpu")
    torch_private.gradient_hooks(layer.bias).clear()  # type: ignore[union-attr]
    layer.to_empty(device="cpu")
    with pytest.raises(OptimizerError, match="refers to weight as it was before"):
        before.step()
    hooked: Any = nn.Linear(WIDTH, 3)
    hooked.weight.register_hook(lambda grad: None)
    fully_shard(hooked)
    with pytest.raises(LifecycleError, match=r"had hooks before fully_shard: \['weight'\]"):
        hooked.double()


@pytest.mark.parametrize("how", ["meta", "real", "offload", "swap"])
def test_cast_after_sharding(how: str) -> None:
    run_ranks(check_cast, 2, how)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_to_empty_and_initialize_is_one_process(world_size: int) -> None:
    run_ranks(check_empty, world_size)


@pytest.mark.parametrize(
    "check",
    [
        check_nobody_filled,
        check_refused,
        check_parts,
        check_mixed,
        check_real_on_rank_0,
        check_renamed,
        check_taken_early,
    ],
    ids=lambda c: c.__name__,
)
def test_meta(check: Any) -> None:
    run_ranks(check, 2)


@pytest.mark.parametrize("how", ["assign", "copy", "distributed", "broadcast"])
def test_loading_makes_it_real(how: str) -> None:
    run_ranks(check_loaded, 2, how)


def test_assign_keeps_sharded_parameters() -> None:
    run_ranks(check_real, 2, "")
