"""Every public method of torch's `FSDPModule` is here: it does what torch's does, or is refused with a reason.

pytest tests/engine/test_fsdp_module.py
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard.comm.mesh import init_mesh
from fullshard.comm.waiting import PROGRESS
from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.core.events import Event, EventKind
from fullshard.engine.bucket import Bucket
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.unit_parameters import UnitState
from fullshard.features import FSDPModule, fully_shard, units_of
from fullshard.features.consistency import ConsistencyCheck
from fullshard.features.nonfinite import NonFiniteGuard
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    Stack,
    assert_same_gradients,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    run_squared,
    sharded_step,
)


def test_no_name_is_missing() -> None:
    theirs = {name for name in vars(torchs.FSDPModule) if not name.startswith("_")}
    assert theirs <= {name for name in dir(FSDPModule) if not name.startswith("_")}


def test_it_is_one_of_torchs_and_nothing_of_that_is_reached() -> None:
    public = {name for name in vars(torchs.FSDPModule) if not name.startswith("_")}
    ours = FSDPModule.__mro__[: FSDPModule.__mro__.index(torchs.FSDPModule)]
    assert public | {"__new__", "_apply", "_get_fsdp_state"} <= {name for cls in ours for name in vars(cls)}, (
        "a method of torch's would run"
    )
    module: Any = nn.Sequential(nn.Linear(2, 2))
    fully_shard(module)
    is_torchs = isinstance(module, torchs.FSDPModule)
    assert is_torchs
    assert type(module[:1]) is nn.Sequential
    module.name_it = lambda: "called"
    torchs.register_fsdp_forward_method(module, "name_it")
    assert module.name_it() == "called"
    for name in ("_state_ctx", "_comm_ctx"):  # there and not
        with pytest.raises(
            LifecycleError, match=rf"Sequential is sharded by fullshard, which does not have {name} of torch's own"
        ):
            setattr(module._get_fsdp_state(), name, None)
    state: Any = fully_shard.state  # type: ignore[attr-defined]
    assert state(module) is not None and state(module) == state(module) and state(module[0]) is None
    pair: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    fully_shard(pair)
    assert len({state(one) for one in (module, *pair)}) == 2
    with pytest.raises(
        LifecycleError, match=r"Linear is sharded by fullshard, which does not have _all_gather_comm of torch's own"
    ):
        _ = state(pair[0])._fsdp_param_group._all_gather_comm
    module._set_unshard_async_op(True)
    for private in (torchs.share_comm_ctx, lambda modules: torchs.FSDPModule._set_unshard_async_op(modules[0], True)):
        with pytest.raises(LifecycleError, match="import from fullshard what the script imports from torch"):
            private([module])
    assert {"fully_shard", "register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx"} <= set(fullshard.__all__)


def check_state(of: Callable[[nn.Module], Any]) -> None:
    """What public code asks of torch's state: pipeline stages for reductions, scripts for names and what is whole."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    block = model.get_submodule("blocks.0")
    state, group = of(model), of(block)._fsdp_param_group
    state._lazy_init()
    assert state._state_ctx.all_states == [state, *(of(model.get_submodule(name)) for name in BLOCKS)]
    assert state._is_root and not of(block)._is_root and state._mp_policy.param_dtype is None
    assert group == of(block)._fsdp_param_groups[0] != state._fsdp_param_group
    assert group._module_fqn == "blocks.0" and group.modules == (block,)
    named = {each._param_fqn: (each.sharded_param, each._orig_size) for each in group.fsdp_params}
    assert named == {f"blocks.0.{name}": (p, p.shape) for name, p in block.named_parameters()}
    axis, (rank, size) = group.mesh_info, rank_and_size()
    assert (axis.shard_mesh_rank, axis.shard_mesh_size, axis.shard_process_group.size()) == (rank, size, size)
    group.unshard(async_op=True)
    group.wait_for_unshard()
    assert group.is_unsharded and not group.is_sharded
    group.reshard()
    assert group.is_sharded
    root = state._fsdp_param_group
    assert root.post_forward_mesh_info is None and group.post_forward_mesh_info is not None
    root.post_forward_mesh_info, block_state = axis, of(block)
    block_state._auto_reshard_after_forward = False
    assert not block_state._auto_reshard_after_forward
    model(batch(0, rank))
    assert root.is_sharded, "as dinov3 has it for models that are only evaluated"
    root.post_forward_mesh_info = None
    events: list[Event] = []
    units_of(model)[0].schedule.event_sink = events.append
    for step in range(2):  # as a stage of a pipeline does with two micro-batches
        events.clear()
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        for micro in range(2):
            run_squared(model, 2 * step + micro, rank)
            for each in range(size):
                (plain(batch(2 * step + micro, each)).square().mean() / size).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        for each in state._state_ctx.all_states:
            each._fsdp_param_group.post_backward()
        if step:
            state._root_post_backward_final_callback()
        assert [event.kind for event in events].count(EventKind.REDUCE_ISSUED) == len(units_of(model)), "once"
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


def check_states() -> None:
    of: Any
    ours, theirs = fully_shard.state, torchs.fully_shard.state  # type: ignore[attr-defined]
    for of in (ours, theirs, lambda module: module._get_fsdp_state()):
        check_state(of)


def test_what_others_ask_of_torchs_state() -> None:
    run_ranks(check_states, 2)


def check_handle() -> None:
    """An unshard that is only begun, waited for or not, and freed before it is waited for."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    block: Any = model.get_submodule("blocks.0")
    whole = plain.get_parameter("blocks.0.up.weight")
    handle = block.unshard(async_op=True)
    assert isinstance(handle, fullshard.UnshardHandle)
    handle.wait()
    assert torch.equal(block.up.weight, whole) and not isinstance(block.up.weight, fullshard.ShardedTensor)
    block.reshard()
    handle.wait()
    assert isinstance(block.up.weight, fullshard.ShardedTensor)
    assert block.unshard() is None
    block.reshard()
    block.unshard(async_op=True)
    assert_trains_alike(model, plain, run_squared, steps=2)


def test_an_unshard_that_is_only_begun() -> None:
    run_ranks(check_handle, 2)


def check_reset() -> None:
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    block: Any = model.get_submodule("blocks.0")
    run_squared(model, 0, rank_and_size()[0])
    model.zero_grad()
    loss = model(batch(0, rank_and_size()[0])).sum()
    with pytest.raises(ZeroDivisionError):
        loss.register_hook(lambda _: 1 // 0)
        loss.backward()
    with pytest.raises(LifecycleError, match=r"unit 'blocks\.0', which is not the outermost"):
        block.reset_iter_state()
    model.reset_iter_state()  # type: ignore[operator]
    assert_trains_alike(model, plain, run_squared, steps=2, first=1)


def test_back_to_rest_after_a_failure() -> None:
    run_ranks(check_reset, 2)


def double_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


class Doubling(nn.Linear):
    """Doubles its weight's gradient, as tensor parallelism sums one up: by a hook that forward puts there at first."""

    hooked: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hooked is not self.weight:
            self.weight.register_post_accumulate_grad_hook(double_gradient)
            object.__setattr__(self, "hooked", self.weight)
        return super().forward(x)


class DoublingAnew(nn.Linear):
    """The same by a hook that every forward takes away and puts there again."""

    handle: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.handle is not None:
            self.handle.remove()
        object.__setattr__(self, "handle", self.weight.register_post_accumulate_grad_hook(double_gradient))
        return super().forward(x)


def two_layers(layer: type[nn.Linear]) -> nn.Module:
    return nn.Sequential(layer(5, 6), nn.Linear(6, 3))


def run_batch(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)[..., :5]).square().mean()
    loss.backward()
    return loss.detach()


def check_hooks_of_forward() -> None:
    for units, layer in itertools.product((("0",), ()), (Doubling, DoublingAnew)):
        model = build_sharded(functools.partial(two_layers, layer), units)
        plain = build(functools.partial(two_layers, nn.Linear))
        for step in range(2):
            reference_step(plain, run_batch, step)
            sharded_step(model, run_batch, step)
            weight = plain.get_parameter("0.weight")
            assert weight.grad is not None
            weight.grad *= 2
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


def test_hooks_that_forward_puts_on_unsharded_parameters() -> None:
    run_ranks(check_hooks_of_forward, 2)


class Looked(nn.Module):
    """Looks up what its backward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.table(x))
        return out


def look_up(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randint(7, (4,))).square().mean()
    loss.backward()
    return loss.detach()


def check_unread() -> list[str]:
    events: list[Event] = []
    model, plain = build_sharded(Looked, ("table",), events=events), build(Looked)
    table: Any = model.get_submodule("table")
    table.set_unshard_in_backward(False)
    for step in range(2):
        events.clear()
        sharded_step(model, look_up, step)
        reference_step(plain, look_up, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    return [event.unit for event in events if event.kind is EventKind.UNSHARD_ISSUED]


def test_parameters_that_backward_does_not_read() -> None:
    for units in run_ranks(check_unread, 2):
        assert units.count("table") == 1  # in forward


def check_hook() -> None:
    """It sees each reduced gradient once, averaged, and what it changes is changed."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    block: Any = model.get_submodule("blocks.0")
    seen: list[int] = []

    def double(gradient: torch.Tensor) -> None:
        assert PROGRESS.is_waiting and PROGRESS.what == "unit 'blocks.0', reduce"  # it may communicate
        seen.append(gradient.numel())
        gradient.mul_(2)

    block.set_all_reduce_hook(double)
    sharded_step(model, run_squared, 0)
    reference_step(plain, run_squared, 0)
    for parameter in plain.get_submodule("blocks.0").parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    assert_same_gradients(model, plain)
    assert len(seen) == 1
    first = {name: parameter.grad.clone() for name, parameter in plain.named_parameters() if parameter.grad is not None}
    plain.zero_grad()
    reference_step(plain, run_squared, 1)  # another micro-batch, whose own sum alone it sees
    sharded_step(model, run_squared, 1)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2 if name.startswith("blocks.0.") else 1).add_(first[name])
    assert_same_gradients(model, plain)
    assert len(seen) == 2
    block.set_all_reduce_hook(None)
    model.zero_grad()
    run_squared(model, 1, rank_and_size()[0])
    assert len(seen) == 2
    stream, streams = torch.cpu.Stream(), []
    block.set_all_reduce_hook(lambda _: streams.append(torch.cpu.current_stream()), stream=stream)
    run_squared(model, 1, rank_and_size()[0])
    assert streams == [stream] and torch.cpu.current_stream() is not stream
    replicated: Any = build_sharded(Stack, BLOCKS, strategy="NO_SHARD")
    with pytest.raises(ConfigError, match=r"(?s)stream.* 2 replicas"):
        replicated.set_all_reduce_hook(double, stream=stream)


def test_a_hook_on_reduced_gradients() -> None:
    run_ranks(check_hook, 2)


class WaitedFor:
    """Stands for an event of an accelerator, which a CPU has none of."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def check_deferred_reduction(model: Any, plain: nn.Module) -> None:
    """As the pipeline schedules of torch 2.15 do: backwards without a reduction, and then one for all of them."""
    model.zero_grad()
    plain.zero_grad()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    sums = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for step in (4, 5):
        sharded_step(model, run_squared, step)
        plain.zero_grad()
        reference_step(plain, run_squared, step)
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    for total, parameter in zip(sums, plain.parameters(), strict=True):
        parameter.grad = total
    assert model.finalize_backward() is None
    assert all(parameter.grad is None for parameter in model.parameters()), "there is nothing to reduce yet"
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True).wait()
    assert_same_gradients(model, plain)
    model.set_manual_backward_finalization(False)


def check_settings() -> None:
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    root: Any = model
    event = WaitedFor()
    root.set_post_optim_event(event)
    root.set_reduce_scatter_max_input_buffers(3)
    root.set_separate_reduce_scatter_group()
    for enable in (True, False):
        root.set_force_sum_reduction_for_comms(enable)
        root.set_reduce_scatter_unused_params(enable)
    root.set_allocate_memory_from_process_group_for_comm(False)
    fullshard.share_comm_ctx([model])
    assert_trains_alike(model, plain, run_squared, steps=2)
    assert event.waits == 1
    check_deferred_reduction(model, plain)
    root.set_reduce_scatter_divide_factor(1.0)
    model.zero_grad()
    sharded_step(model, run_squared, 3)
    plain.zero_grad()
    reference_step(plain, run_squared, 3)
    for parameter in root.head.parameters():
        parameter.grad.div_(2)
    assert_same_gradients(root.head, plain.get_submodule("head"))

    for wrong in (True, 1.5):
        with pytest.raises(TypeError):
            root.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="positive"):
        root.set_reduce_scatter_max_input_buffers(0)
    for refuse in (
        lambda: root.set_custom_all_gather(object()),
        lambda: root.set_custom_reduce_scatter(object()),
        lambda: root.set_symm_mem_for_comm(),
        lambda: root.set_separate_reduce_scatter_group(False),
        lambda: root.set_allocate_memory_from_process_group_for_comm(True),
    ):
        with pytest.raises(LifecycleError, match=r"is not supported: .*\nhint"):
            refuse()
    with pytest.raises(WrapError, match="is not a unit"):
        fullshard.share_comm_ctx([nn.Linear(2, 2)])


def test_settings_are_used_or_refused() -> None:
    run_ranks(check_settings, 2)


def check_dtypes_of_their_own(device: str) -> None:
    """One unit computes with some parameters in bf16 and with others in fp32, known by their identity."""
    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    kept = {model[1].weight, model[1].bias}
    policy = fullshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: torch.float32 if p in kept else None
    )
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    seen = {}
    model[1].register_forward_pre_hook(
        lambda module, args: seen.update({name: p.dtype for name, p in model.named_parameters()}) or (args[0].float(),)
    )
    model(torch.ones(2, 6)).sum().backward()
    bf16, fp32 = torch.bfloat16, torch.float32
    assert seen == {"0.weight": bf16, "0.bias": bf16, "1.weight": fp32, "1.bias": fp32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {fp32}


def check_kept_storage() -> None:
    model: Any = build_sharded(Stack, BLOCKS)
    [unit] = [unit for unit in units_of(model) if unit.name == "blocks.1"]
    addresses: list[list[int]] = []
    for keeps in (True, False):
        model.set_keep_unsharded_storage(keeps)
        addresses.append([])
        for step in range(3):
            model.get_submodule("blocks.1").register_forward_hook(
                lambda *_: addresses[-1].append(unit.buckets[0].full.data_ptr())
            )
            sharded_step(model, run_squared, step)
        assert unit.state is UnitState.SHARDED
        assert all(bool(bucket.buffer.nbytes) == keeps for u in units_of(model) for bucket in u.buckets)
    assert len(set(addresses[0])) == 1
    with torch.device("meta"):
        later: Any = fully_shard(nn.Linear(2, 2))
    later.set_keep_unsharded_storage(True)
    later.to_empty(device="cpu")
    later.unshard()
    later.reshard()
    assert all(bucket.buffer.nbytes == bucket.full.nbytes for unit in units_of(later) for bucket in unit.buckets)


def check_named_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "copies", "tp"))
    model: Any = nn.Linear(6, 4)
    dims = fullshard.DataParallelMeshDims(shard="dp", replicate="copies")
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model.weight.mesh.shard_size == 2
    alone: Any = fully_shard(nn.Linear(6, 4), mesh=mesh["tp"])
    assert alone.weight.mesh.ranks == (rank_and_size()[0],) and alone.weight.mesh.is_first
    both: Any = fully_shard(nn.Linear(6, 4), mesh=mesh, dp_mesh_dims=fullshard.DataParallelMeshDims(shard=("dp", "tp")))
    assert (both.weight.mesh.shard_size, both.weight.device_mesh.mesh_dim_names) == (2, ("dp_tp",))
    whole: Any = fully_shard(nn.Linear(6, 4), mesh=mesh, dp_mesh_dims=fullshard.DataParallelMeshDims(replicate="dp"))
    assert whole.weight.placements == (Replicate(),) and "NO_SHARD" in str(fullshard.describe(whole))
    with pytest.raises(ConfigError, match=r"dp_mesh_dims = .*\['other'\] not found in mesh\.mesh_dim_names"):
        fully_shard(nn.Linear(6, 4), mesh=mesh, dp_mesh_dims=fullshard.DataParallelMeshDims(shard="other"))
    for wrong in ({"shard": ("copies", "dp")}, {"shard": "dp", "replicate": "dp"}):
        with pytest.raises(ConfigError, match=r"dp_mesh_dims = .*\nhint: name each axis once"):
            fully_shard(nn.Linear(6, 4), mesh=mesh, dp_mesh_dims=fullshard.DataParallelMeshDims(**wrong))
    with pytest.raises(ConfigError, match=r"shard_size=1 cannot be combined with .*its axes already define"):
        init_mesh(device_mesh=mesh["dp", "copies"], shard_size=1)
    # Of the same mesh as the one that replicates, which is not taken for this one's.
    shared: Any = fully_shard(nn.Linear(6, 4), mesh=mesh["dp"])
    state = {"weight": torch.arange(24.0).view(4, 6), "bias": torch.ones(4)}
    set_model_state_dict(shared, dict(state), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(shared.get_parameter(name).full_tensor(), value) for name, value in state.items())


def check_newer_names() -> None:
    check_dtypes_of_their_own("cpu")
    check_dtypes_of_their_own("meta")
    check_kept_storage()
    check_named_axes()


def check_settings_of_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = fully_shard(model[0]), fully_shard(model[1])
    first.set_nonfinite_gradients("skip", limit=3)
    first.set_replica_check("off", every=7)
    second.set_reduce_scatter_max_input_buffers(2)
    second.set_is_last_backward(False)
    fully_shard(model)
    schedule = units_of(model)[-1].schedule
    guard = NonFiniteGuard.of(schedule)
    assert (guard.policy, guard.limit) == ("skip", 3)
    check = ConsistencyCheck.of(schedule)
    assert (check.policy, check.every) == ("off", 7)
    assert schedule.backward.reducer.order.in_flight == 2
    assert not schedule.is_last_backward


def test_settings_of_a_part_hold_for_the_model_around_it() -> None:
    run_ranks(check_settings_of_parts, 1)


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: (each.kind, each.default) for name, each in inspect.signature(function).parameters.items()}


def test_each_of_torchs_methods_is_here_with_its_arguments() -> None:
    """One that a later release has would run torch's engine, which has nothing to do with the module."""
    for name, method in vars(torchs.FSDPModule).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert arguments_of(getattr(FSDPModule, name)) == arguments_of(method), name
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        ours, theirs = (list(arguments_of(getattr(module, name))) for module in (fullshard, torchs))
        newer = [] if hasattr(torchs, "DataParallelMeshDims") else ["dp_mesh_dims"]  # since torch 2.12
        assert [argument for argument in ours if argument not in newer] == theirs
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert arguments_of(getattr(torchs, name)).keys() <= arguments_of(getattr(fullshard, name)).keys()


def test_names_of_torchs_later_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", "gloo")  # where memory is given back
    run_ranks(check_newer_names, 2)


def check_placements() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(6, 4), nn.Linear(6, 4)
    plain.load_state_dict(model.state_dict())
    asked = []

    def placement(parameter: nn.Parameter) -> Shard | None:
        asked.append(tuple(parameter.shape))
        return Shard(parameter.ndim - 1) if parameter.ndim > 1 else None

    fully_shard(model, shard_placement_fn=placement)
    assert asked == [(4, 6), (4,)]
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[attr-defined]
    for wrong in (Shard(2), "rows"):
        with pytest.raises(ConfigError, match=r"Linear\.weight \(4, 6\)"):
            fully_shard(nn.Linear(6, 4), shard_placement_fn=lambda _, wrong=wrong: wrong)  # type: ignore[misc]


def test_the_dim_that_torch_would_shard_along_makes_no_difference() -> None:
    run_ranks(check_placements, 2)


def check_accumulated() -> None:
    """At the end of a backward, once for each parameter that has a gradient of it; it may step an optimizer, too."""
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    seen: list[str] = []
    optimizers = {}
    for own in model.parameters():
        optimizers[own] = torch.optim.SGD([own], lr=0.1)

        def step(parameter: Any) -> None:
            seen.append(parameter.name)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handle = own.register_post_accumulate_grad_hook(step)
    first, *others = [name for name, _ in model.named_parameters()]
    model.get_parameter(first).requires_grad_(False)
    plain.get_parameter(first).requires_grad_(False)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        sharded_step(model, run_squared, number)
        assert all(p.grad is None for p in model.parameters())
        reference_step(plain, run_squared, number)
        expected.step()
        expected.zero_grad()
        assert sorted(seen) == sorted(others)
        seen.clear()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.detach(), rtol=1e-9, atol=1e-9)  # type: ignore[attr-defined]
    handle.remove()
    run_squared(model, 2, rank_and_size()[0])
    assert len(seen) == len(others) - 1


def test_hooks_on_accumulated_gradients() -> None:
    run_ranks(check_accumulated, 2)


def check_numbers_of_ranks() -> list[int]:
    """As torch has it: 1 keeps parameters whole until backward, all ranks free them."""
    gathers = []
    for ranks in (True, 2, False, 1):
        events: list[Event] = []
        model = build(Stack)
        for name in BLOCKS:
            fully_shard(model.get_submodule(name), reshard_after_forward=ranks)
        fully_shard(model)
        units_of(model)[0].schedule.event_sink = events.append
        run_squared(model, 0, rank_and_size()[0])
        gathers.append(sum(event.kind is EventKind.UNSHARD_ISSUED for event in events))
    for wrong in (0, 3, -1, "2", 1.0):
        with pytest.raises(ConfigError, match="that divides the shard size 2"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=wrong)  # type: ignore[arg-type]
    return gathers


def test_parameters_are_freed_after_forward_by_numbers_of_ranks() -> None:
    for freed, by_number, kept, by_one in run_ranks(check_numbers_of_ranks, 2):
        assert freed == by_number > kept == by_one


def kept_nbytes(bucket: Bucket) -> int:
    """Return the bytes of this rank's part of a bucket that was resharded to neighbors."""
    return 0 if bucket._kept is None else bucket._kept[0].nbytes


def check_smaller_group() -> None:
    """Between forward and backward two of four ranks share a unit: half of it stays, and is gathered from the other."""
    reference, model = build(Stack), cast("Any", build(Stack))
    for name in BLOCKS:
        fully_shard(model.get_submodule(name), reshard_after_forward=2)
    fully_shard(model)
    units = [unit for unit in units_of(model) if unit.name in BLOCKS]
    buckets = [bucket for unit in units for bucket in unit.buckets]
    kept, sent = [], []
    first = buckets[0]
    gather, neighbors = first.mesh.gather, units[0].neighbors
    assert neighbors is not None and (neighbors.size, neighbors.rank) == (2, rank_and_size()[0] % 2)
    for name, collectives in (("all", gather), ("two", neighbors)):
        wrapped = collectives.all_gather

        def spy(full: torch.Tensor, *, tag: int, name: str = name, wrapped: Any = wrapped) -> Any:
            if tag == first.tag:
                sent.append(name)
            return wrapped(full, tag=tag)

        collectives.all_gather = spy  # type: ignore[method-assign]
    model.register_forward_hook(
        lambda *_: kept.append([kept_nbytes(bucket) * 2 - bucket.full_nbytes for bucket in buckets])
    )
    assert_trains_alike(model, reference, run_squared, steps=2)
    assert kept == [[0] * len(buckets)] * 2, "half of each"
    assert sent == ["all", "two"] * 2
    assert not any(kept_nbytes(bucket) for bucket in buckets)

    with torch.no_grad():
        model(batch(0, 0))
    assert not any(kept_nbytes(bucket) for bucket in buckets), "no backward will come"
    model(batch(0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        for parameter in reference.parameters():
            parameter.add_(1)
        sent.clear()
        torch.testing.assert_close(model(batch(0, 0)), reference(batch(0, 0)), rtol=1e-9, atol=1e-9)
    assert sent == ["all"], "what neighbors have kept is not what it is now"
    model.set_reshard_after_forward(True)
    sharded_step(model, run_squared, 0)
    assert sent == ["all"] * 3


def test_a_smaller_group_keeps_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", "gloo")  # where ranks share no memory
    run_ranks(check_smaller_group, 4)


def check_smaller_group_in_shared_memory() -> None:
    """There staying whole costs nothing."""
    reference, model = build(Stack), build(Stack)
    for name in BLOCKS:
        fully_shard(model.get_submodule(name), reshard_after_forward=2)
    fully_shard(model)
    assert_trains_alike(model, reference, run_squared, steps=2)
    assert not any(kept_nbytes(bucket) for unit in units_of(model) for bucket in unit.buckets)


@pytest.mark.full
def test_a_smaller_group_in_shared_memory() -> None:
    run_ranks(check_smaller_group_in_shared_memory, 4)


def collectives_of_a_step(shard: Callable[..., Any]) -> list[dict[str, int]]:
    """What `CommDebugMode` counts of forward, backward and clipping, in the first step and in one of two backwards."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for module in list(model)[1:]:
        shard(module)
    shard(model)
    counts = []

    def counted(do: Callable[[], Any]) -> Any:
        with CommDebugMode() as mode:
            value = do()
        counts.append({str(packet): count for packet, count in mode.get_comm_counts().items()})
        return value

    for is_last in (True, False, True):
        cast(Any, model).set_requires_gradient_sync(is_last)
        loss = counted(lambda: model(torch.ones(2, 4)).sum())
        counted(loss.backward)
        if is_last:
            counted(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            model.zero_grad()
    counted(model.state_dict)
    return counts


def check_collectives_are_counted() -> None:
    torchs_own = collectives_of_a_step(torchs.fully_shard)
    assert any("reduce_scatter" in name for name in torchs_own[1])
    assert collectives_of_a_step(fully_shard) == torchs_own


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_torchs_tool_counts_the_collectives_that_there_are(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_collectives_are_counted, 2)


SWITCHES: dict[str, Callable[[Any], list[bool]]] = {
    "set_requires_gradient_sync": lambda unit: [unit.reduce_gradients],
    "set_requires_all_reduce": lambda unit: [bucket.reduction.requires_all_reduce for bucket in unit.buckets],
    "set_reshard_after_forward": lambda unit: [unit.reshards_after_forward],
    "set_reshard_after_backward": lambda unit: [unit.reshards_after_backward],
}


def check_recursion() -> None:
    """Switches are for all units inside, too, unless told otherwise."""
    model: Any = build_sharded(Stack, BLOCKS)
    *inner, outermost = units_of(model)
    for name, values in SWITCHES.items():
        set_switch = getattr(model, name)
        set_switch(True)
        set_switch(False, recurse=False)
        assert not any(values(outermost)) and all(all(values(unit)) for unit in inner), name
        set_switch(False)
        assert not any(any(values(unit)) for unit in inner), name
        set_switch(True)
        assert all(all(values(unit)) for unit in (*inner, outermost)), name


def test_switches_are_for_units_inside_too() -> None:
    run_ranks(check_recursion, 2)


def check_replicated_around() -> None:
    """Torch's `replicate` around a unit leaves the unit's slices alone, and averages the rest."""
    model, plain = build(Stack), build(Stack)
    block: Any = model.get_submodule("blocks.0")
    fully_shard(block)
    before = {name: p.full_tensor() for name, p in block.named_parameters()}
    replicate(model)
    run_squared(model, 0, rank_and_size()[0])
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]), name
    for rank in range(2):
        run_squared(plain, 0, rank)
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, ShardedTensor) == name.startswith("blocks.0"), name
        assert parameter.grad is not None and reference.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, ShardedTensor) else parameter.grad
        torch.testing.assert_close(grad, reference.grad / 2, msg=name)


def test_replicate_around_a_unit() -> None:
    run_ranks(check_replicated_around, 2)


def check_ignored_around() -> None:
    """DistributedDataParallel around a unit is refused, unless it is told to leave the unit's parameters alone."""
    model, plain = build(Stack), build(Stack)
    block: Any = model.get_submodule("blocks.0")
    fully_shard(block)
    names = [f"blocks.0.{name}" for name, _ in block.named_parameters()]
    for told in ([], names[:-1]):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, told)
        with pytest.raises(LifecycleError, match="DistributedDataParallel around a sharded"):
            DistributedDataParallel(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    run_squared(wrapped, 0, rank_and_size()[0])
    for rank in range(2):
        run_squared(plain, 0, rank)
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, ShardedTensor) else parameter.grad
        torch.testing.assert_close(grad, reference.grad / 2, msg=name)


def test_ddp_that_leaves_units_alone() -> None:
    run_ranks(check_ignored_around, 2)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (3, {}, "expected a module or a list of modules, got int"),
        ([nn.Linear(2, 2), "head"], {}, "expected a module or a list of modules, got str"),
        ([], {}, "got an empty list"),
        (nn.Linear(2, 2), {"mesh": 2}, "mesh: expected a DeviceMesh, got int"),
        (nn.Linear(2, 2), {"ignored_params": {"weight"}}, "ignored_params: expected parameters, got str"),
        (nn.Linear(2, 2), {"ignored_params": nn.Parameter(torch.zeros(2))}, "ignored_params: .*, got one Parameter"),
        (nn.Linear(2, 2), {"ignored_params": 3}, "ignored_params: expected parameters, got one int"),
        (nn.Linear(2, 2), {"shard_placement_fn": 0}, "shard_placement_fn: expected a function of a parameter, got int"),
    ],
)
def test_what_is_no_module_mesh_or_parameter_is_named(module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fully_shard(module, **options)


def test_several_modules_and_parameters_as_torch_takes_them() -> None:
    """In a tuple; None where a layer has no bias."""
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    fully_shard(cast(Any, (one, two)), ignored_params=cast(Any, {one.weight, one.bias}))
    assert not isinstance(one.weight, ShardedTensor) and isinstance(two.weight, ShardedTensor)
