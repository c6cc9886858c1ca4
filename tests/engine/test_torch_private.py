"""torch still has each private name that fullshard uses, and it still does what fullshard needs of it.

pytest tests/engine/test_torch_private.py
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import _is_fully_sharded
from torch.distributed._functional_collectives import permute_tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, cpp_extension
from torch.utils.data import DataLoader, Dataset

from fullshard.launch import torch_private as launcher

Check = Callable[[], None]
CHECKS: dict[str, Check] = {}
SOURCE = Path(__file__).parents[2] / "src"
FILES = [
    importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for path in sorted(SOURCE.rglob("torch_private.py"))
]
torch_private: Any = SimpleNamespace(**{k: v for file in FILES if file is not launcher for k, v in vars(file).items()})
"""The names of all files but the launcher's."""


def check(*names: str) -> Callable[[Check], Check]:
    """The function says whether torch still has what these names of `torch_private` need."""

    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, cache(function)))
        return function

    return register


def body_of(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(module)).body


def names_in_the_files() -> list[str]:
    names: list[str] = []
    for node in (node for module in FILES for node in body_of(module)):
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        names += [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize("name", names_in_the_files())
def test_torch_still_does_what_is_needed(name: str) -> None:
    assert name in CHECKS, f"torch_private.{name} has no check here"
    try:
        CHECKS[name]()
    except Exception as error:
        pytest.fail(f"torch {torch.__version__} has changed what torch_private.{name} needs: {error!r}")


@pytest.mark.parametrize("module", FILES)
def test_each_says_since_when(module: ModuleType) -> None:
    """What the file promises of each name: a docstring, with a release of torch."""
    body = body_of(module)
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            assert "Since torch 2." in (ast.get_docstring(node) or ""), node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(following, ast.Expr):
            text = ast.unparse(following)
            assert "Since torch 2." in text or "Names with an underscore" in text, ast.unparse(node)


# -- autograd ---------------------------------------------------------------------------------------------------


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


@check("SEMI_PUBLIC")
def semi_public() -> None:
    module = nn.BatchNorm1d(1)
    module.add_module("inner", nn.Linear(1, 1))
    tensor = torch.zeros(2)
    for name in torch_private.SEMI_PUBLIC:
        assert hasattr(module if hasattr(module, name) else tensor, name), name
    module._parameters["weight"] = other = weight(1)
    assert module.weight is other
    assert module._buffers["running_mean"] is module.running_mean
    assert module._modules["inner"] is module.inner
    view = tensor[:1]
    before = tensor._version
    view.add_(1)
    assert tensor._version == before + 1 == view._version
    assert view._base is tensor
    assert tensor._base is None


@check("OVERRIDDEN")
def overridden() -> None:
    for path, methods in [item for file in FILES for item in getattr(file, "OVERRIDDEN", {}).items()]:
        module, _, name = path.rpartition(".")
        torchs = getattr(importlib.import_module(module), name)
        sources = [inspect.getsource(inspect.getmodule(cls)) for cls in torchs.__mro__[:-1] if inspect.getmodule(cls)]  # type: ignore[arg-type]
        sources.append(inspect.getsource(importlib.import_module("torch.nn.parallel.replicate")))
        # A class may say that it is of another module; its functions know.
        homes = {inspect.unwrap(getattr(torchs, method)).__globals__["__name__"] for method in methods}
        sources += [inspect.getsource(importlib.import_module(home)) for home in homes]
        for method in methods:
            assert callable(getattr(torchs, method)), f"{path}.{method}"
            assert any(f".{method}(" in source for source in sources), f"nothing calls {path}.{method}"


@check("backward_under_way", "call_after_backward")
def backward_under_way() -> None:
    seen: list[Any] = []

    def hook(_gradient: torch.Tensor) -> None:
        seen.append(torch_private.backward_under_way())
        torch_private.call_after_backward(lambda: seen.append(parameter.grad is not None))

    parameter = weight(1)
    result = parameter * 2
    result.register_hook(hook)
    assert torch_private.backward_under_way() == -1
    result.sum().backward()
    assert len(seen) == 2
    assert seen[0] >= 0
    assert seen[1] is True, "not at the end of backward"


@check("next_node", "node_under_way", "number_of")
def node_under_way() -> None:
    seen: list[int | None] = []
    numbers = [torch_private.next_node()]
    first = weight(1) * 2
    numbers.append(torch_private.next_node())
    assert first.grad_fn is not None
    assert numbers[0] <= torch_private.number_of(first.grad_fn) < numbers[1]
    for result in (first, first * 2):
        result.register_hook(lambda _: seen.append(torch_private.node_under_way()))
    assert torch_private.node_under_way() is None
    result.sum().backward()
    second, one = (number if number is not None else -1 for number in seen)
    assert numbers[0] <= one < numbers[1] <= second, "a hook of a node is not in that node"


@check("will_run")
def will_run() -> None:
    used, unused = weight(1), weight(1)
    seen: list[bool | None] = []
    both = used * unused
    nodes: list[Any] = [node for node, _ in both.grad_fn.next_functions]  # type: ignore[union-attr]
    both.register_hook(lambda _: seen.extend(torch_private.will_run(node) for node in nodes))
    both.sum().backward(inputs=[used])
    assert seen == [True, False]
    again = used * unused
    nodes[:] = [node for node, _ in again.grad_fn.next_functions]  # type: ignore[union-attr]
    again.register_hook(lambda _: seen.append(torch_private.will_run(nodes[0])))
    torch.autograd.grad(again.sum(), [used])
    assert seen[-1] is None, "no sign of torch.autograd.grad"


@check("set_versions")
def set_versions() -> None:
    tensors = (torch.zeros(1), torch.zeros(1))
    versions = tuple(tensor._version for tensor in tensors)
    for tensor in tensors:
        tensor.add_(1)
    torch_private.set_versions(tensors, versions)
    assert tuple(tensor._version for tensor in tensors) == versions


@check("may_hold")
def may_hold() -> None:
    parameter = weight(2)
    assert torch_private.may_hold(parameter, torch.zeros(3, dtype=torch.float64))
    elsewhere = torch.zeros(2, device="meta")
    assert not torch_private.may_hold(parameter, elsewhere)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = elsewhere


@check("storage_id", "storage_uses")
def storages() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    number = torch_private.storage_id(tensor.untyped_storage())
    tensor.untyped_storage().resize_(0)
    assert torch_private.storage_id(tensor[:0].untyped_storage()) == number
    assert torch_private.storage_id(other.untyped_storage()) != number
    one = torch_private.storage_uses(number)
    view = tensor[:0]
    assert torch_private.storage_uses(number) == one + 1
    del view
    assert torch_private.storage_uses(number) == one


@check("takes_plain_as_replicated")
def replication() -> None:
    assert not torch_private.takes_plain_as_replicated()
    with implicit_replication():
        assert torch_private.takes_plain_as_replicated()
    assert not torch_private.takes_plain_as_replicated()


@check("are_transforms_active", "without_transforms")
def transforms() -> None:
    seen: list[bool] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.are_transforms_active())
        with torch_private.without_transforms():
            seen.append(torch_private.are_transforms_active())
            torch.zeros(2).numpy()  # has no memory under vmap
        return value.sum()

    torch.func.vmap(function)(torch.ones(2, 2))
    assert seen == [True, False]
    assert not torch_private.are_transforms_active()


@check("accumulated_hooks", "gradient_hooks")
def hooks() -> None:
    parameter = weight(1)
    assert not torch_private.accumulated_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(torch_private.accumulated_hooks(parameter) or ()) == 1
    assert not torch_private.gradient_hooks(parameter)
    parameter.register_hook(lambda _: None)
    assert len(torch_private.gradient_hooks(parameter) or ()) == 1


@check("are_saved_elsewhere")
def saved_elsewhere() -> None:
    assert not torch_private.are_saved_elsewhere()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert torch_private.are_saved_elsewhere()
    assert not torch_private.are_saved_elsewhere()


# -- tensors of another kind ------------------------------------------------------------------------------------


class Recording(DTensor):
    """Notes which kernels torch calls for it."""

    calls: list[str]

    def __init__(self, *_args: object) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert isinstance(func, torch_private.Kernel)
        cls.calls.append(func.overloadpacket.__name__)

        def local(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [local(item) for item in value]
            return torch_private.local_of(value) if isinstance(value, DTensor) else value

        return func(*map(local, args), **(kwargs or {}))


@check("let_dtensors_compute")
def dtensors_of_ones_own() -> None:
    torch_private.let_dtensors_compute()
    torch_private.let_dtensors_compute()
    recording(torch.ones(3)) + 1
    assert Recording.calls == ["add"]


def recording(local: torch.Tensor, shape: tuple[int, ...] | None = None) -> Recording:
    mesh = torch_private.mesh_without_groups("cpu", [[0, 1], [2, 3]], 2)
    layout = torch_private.layout_of(mesh, [Replicate(), Shard(0)], torch.Size(shape or local.shape), local.dtype)
    made: Recording = torch_private.wrap(Recording, local, layout)
    Recording.calls = []
    return made


@check(
    "Kernel",
    "has_own_dispatch",
    "Layout",
    "layout_of",
    "layout_from",
    "wrap",
    "local_of",
    "put_local",
    "mesh_without_groups",
)
def subclasses() -> None:
    torch_private.let_dtensors_compute()
    local = torch.arange(6.0)
    of_local = torch_private.layout_from(recording(local))
    spread = torch_private.layout_of(of_local.mesh, of_local.placements, torch.Size([3]), local.dtype, (0,))
    assert spread.shape == (3,) and spread.tensor_meta is not None and spread.tensor_meta.stride == (0,)
    tensor = recording(local, (3, 4))
    assert isinstance(tensor, DTensor) and tensor.shape == (3, 4) and tensor.stride() == (4, 1)
    assert torch_private.local_of(tensor) is local and not tensor.requires_grad
    torch_private.put_local(tensor, other := local.clone())
    assert tensor._local_tensor is other
    torch_private.put_local(tensor, local)
    layout = torch_private.layout_from(tensor)
    assert isinstance(layout, torch_private.Layout) and layout.placements == (Replicate(), Shard(0))
    assert layout.mesh.shape == (2, 2) and layout.mesh.get_coordinate() == (1, 0)
    tensor + 1
    assert Recording.calls == ["add"]
    assert torch_private.wrap(Recording, local, layout, requires_grad=True).requires_grad
    assert torch_private.has_own_dispatch(Recording)
    assert not torch_private.has_own_dispatch(nn.Parameter)
    assert not torch_private.has_own_dispatch(torch.Tensor)


@check("norm_partial")
def norms_in_parts() -> None:
    placement = torch_private.norm_partial(3)
    assert isinstance(placement, Placement) and placement.is_partial() and placement.norm_type == 3  # type: ignore[attr-defined]


@check("writes", "written", "is_view")
def schemas() -> None:
    aten = torch.ops.aten
    assert torch_private.writes(aten.add_.Tensor) and torch_private.writes(aten.add.out)
    assert not torch_private.writes(aten.add.Tensor) and not torch_private.writes(aten.select.int)
    assert torch_private.written(aten.add_.Tensor) == ((0, "self"),)
    assert torch_private.written(aten.add.out)[-1][1] == "out"
    assert [name for _, name in torch_private.written(aten._foreach_add_.Scalar)] == ["self"]
    assert torch_private.is_view(aten.select.int) and torch_private.is_view(aten.split.Tensor)
    assert not torch_private.is_view(aten.add.Tensor) and not torch_private.is_view(aten.add_.Tensor)


@check("COPY_KERNELS", "MANY_KERNELS", "ITEM", "MAX_OF_MANY", "NORM_OF_MANY")
def kernel_names() -> None:
    torch_private.let_dtensors_compute()
    tensor = recording(torch.ones(3))
    scalar = recording(torch.ones(()))
    kernels: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: torch._foreach_norm([tensor]), torch_private.NORM_OF_MANY),
        (lambda: torch._foreach_max([tensor]), torch_private.MAX_OF_MANY),
        (lambda: scalar.item(), torch_private.ITEM),
        (lambda: tensor.to(torch.float64), next(iter(torch_private.COPY_KERNELS))),
    )
    for function, expected in kernels:
        Recording.calls = []
        function()
        assert Recording.calls == [expected]
    for prefix in torch_private.MANY_KERNELS:
        assert any(
            name.startswith(prefix) for name in dir(torch.ops.aten) + dir(torch) + dir(torch._C._VariableFunctions)
        )


@check("ATTENTION_KERNELS")
def attention_kernels() -> None:
    query = recording(torch.ones(1, 1, 4, 8))
    Recording.calls = []
    nn.functional.scaled_dot_product_attention(query, query, query)
    names = {kernel.overloadpacket.__name__ for kernel in torch_private.ATTENTION_KERNELS}
    assert names & set(Recording.calls), Recording.calls
    public = {name for name in dir(torch.ops.aten) if name.startswith("_scaled_dot_product") and "backward" not in name}
    assert public - names <= {"_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"}


@check("parse_to")
def parse_to() -> None:
    parse: Any = torch_private.parse_to  # which torch annotates for fewer forms than it takes
    device, dtype, *_ = parse("cpu", torch.float16, non_blocking=True)
    assert (device, dtype) == (torch.device("cpu"), torch.float16)
    assert parse(torch.ones(1, dtype=torch.float64))[1] == torch.float64


@check("wrapper")
def wrapper() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_arguments: Any) -> Any:
            return torch.ones(7)

    made = torch_private.wrapper(Wrapper, torch.empty(3, 2, dtype=torch.bfloat16), torch.device("cpu"))
    assert (type(made), made.shape, made.dtype) == (Wrapper, (3, 2), torch.bfloat16)
    assert torch.ops.aten.exp.default(made).shape == (7,)


# -- compiled code ----------------------------------------------------------------------------------------------


@check("keep_compiler_out", "is_compiled_function", "inside_compiled", "MANAGED")
def compiled() -> None:
    graphs: list[str] = []

    def deeper(value: torch.Tensor) -> torch.Tensor:
        return value.cosh()

    def hook(value: torch.Tensor) -> torch.Tensor:
        return deeper(value)

    def guarded(value: torch.Tensor) -> torch.Tensor:
        return value.tanh() if torch.compiler.is_compiling() else hook(value)

    def function(value: torch.Tensor) -> torch.Tensor:
        return hook(value.sinh())

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    torch_private.keep_compiler_out(hook)
    made = torch.compile(function, backend=backend)
    made(torch.ones(1))
    assert any("sinh" in code for code in graphs)
    assert not any("cosh" in code for code in graphs), "the hook was compiled"
    graphs.clear()
    torch_private.keep_compiler_out(guarded, is_in_graphs=True)

    class Shrink(nn.Module):  # not one of torch's, which older compilers leave alone
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value - value.tanh()

    shrink = Shrink()
    shrink.register_forward_pre_hook(lambda _module, args: (guarded(args[0]),))
    torch_private.keep_compiler_out(*shrink._forward_pre_hooks.values())
    shrink.compile(backend=backend, fullgraph=True)
    shrink(torch.ones(1))
    assert len(graphs) == 1, "a hook was called between graphs and compiled by itself"
    assert "tanh" in graphs[0]
    graphs.clear()
    torch.compile(lambda value: guarded(value).sinh(), backend=backend, fullgraph=True)(torch.ones(1))
    assert len(graphs) == 1, "the graph does not go on through the function"
    assert "tanh" in graphs[0]
    assert torch_private.is_compiled_function(made)
    assert not torch_private.is_compiled_function(function)
    module = nn.Linear(1, 1)
    assert torch_private.inside_compiled(torch.compile(module)) is module
    assert torch_private.inside_compiled(module) is module
    read = inspect.getsource(importlib.import_module("torch._dynamo.variables.builder"))
    assert torch_private.MANAGED in read, "the compiler does not ask for it"


@check("WRAPPERS")
def wrapper_names() -> None:
    inner = nn.Linear(1, 1)
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(inner)))
    [path] = [path for path, module in wrapped.named_modules() if module is inner]  # type: ignore[attr-defined]
    assert set(path.split(".")) == {*torch_private.WRAPPERS, "0"}


# -- modules, optimizers, loaders -------------------------------------------------------------------------------


@check("NormBase", "non_persistent_buffers", "HOOK_NAMES")
def modules() -> None:
    assert all(issubclass(cls, torch_private.NormBase) for cls in (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm2d))
    assert not issubclass(nn.LayerNorm, torch_private.NormBase)
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert torch_private.non_persistent_buffers(module) == {"made"}
    bare = copy.deepcopy(vars(module))
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_full_backward_hook(lambda *_: None)
    module.register_state_dict_post_hook(lambda *_: None)
    changed = {key for key, value in vars(module).items() if isinstance(value, dict) and len(value) != len(bare[key])}
    assert len(changed) >= 7
    assert all(key.endswith(torch_private.HOOK_NAMES) for key in changed), changed


@check("INIT_GROUP", "step_pre_hooks")
def optimizers() -> None:
    from fullshard.engine.step.plain_tensors import ELEMENT_WISE

    for kind in ELEMENT_WISE:
        listed: list[int] = []
        parameter = weight(1)
        optimizer = kind([parameter])
        torchs = getattr(optimizer, torch_private.INIT_GROUP)

        def list_group(group: Any, *lists: Any, run: Any = torchs, seen: list[int] = listed) -> Any:
            seen.append(len(group["params"]))
            return run(group, *lists)

        setattr(optimizer, torch_private.INIT_GROUP, list_group)
        parameter.grad = torch.ones(1)
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        assert len(torch_private.step_pre_hooks(optimizer)) == 1
        handle.remove()
        assert len(torch_private.step_pre_hooks(optimizer)) == 0
        optimizer.step()
        assert listed == [1], f"{kind.__name__} does not list its tensors there"
        assert len(optimizer.state[parameter]) > 0 or kind is torch.optim.SGD


@check("allow_foreach")
def foreach() -> None:
    class Kind(nn.Parameter):
        pass

    before = [list(kinds) for kinds in torch_private._FOREACH_TYPES]
    tensors: list[torch.Tensor] = [Kind(torch.ones(1))]
    assert torch_optimizer._default_to_fused_or_foreach(tensors, False, use_fused=True) == (False, False)
    try:
        torch_private.allow_foreach(Kind)
        torch_private.allow_foreach(Kind)
        assert all(kinds.count(Kind) == 1 for kinds in torch_private._FOREACH_TYPES)
        assert torch_optimizer._default_to_fused_or_foreach(tensors, False, use_fused=True) == (True, False)
        assert _foreach_utils._has_foreach_support(tensors, torch.device("cuda"))
    finally:
        for kinds, was in zip(torch_private._FOREACH_TYPES, before, strict=True):
            kinds[:] = was


@check("steps_of")
def schedules() -> None:
    optimizer = torch.optim.SGD([weight(1)])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    before = torch_private.steps_of(schedule)
    schedule.step()
    assert torch_private.steps_of(schedule) == before + 1
    assert torch_private.steps_of(object()) == 0


@check("forget_iteration")
def loaders() -> None:
    loader: DataLoader[int] = DataLoader(list(range(3)), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(loader)
    again = copy.copy(loader)
    torch_private.forget_iteration(again)
    assert iter(again) is not iterator
    assert iter(loader) is iterator


@check("mark_fully_sharded")
def composable_functions() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch_private.mark_fully_sharded(model[0])
    assert _is_fully_sharded(model[0]) and not _is_fully_sharded(model[1])


@check("apply_past_fsdp")
def past_torchs_class() -> None:
    made: Any = nn.Linear(2, 2)
    made.__class__ = type("Sharded", (FSDPModule, nn.Linear), {})
    assert torch_private.apply_past_fsdp(made, torch.Tensor.double, True) is made
    assert made.weight.dtype is torch.float64


@check("leave_state")
def pipeline_schedules() -> None:
    model, state = nn.Linear(2, 2), object()
    torch_private.leave_state(model, state)
    assert fully_shard.state(model) is state  # type: ignore[attr-defined]
    stage: Any = _PipelineStageBase
    if hasattr(stage, "start_gradient_reduction"):  # since torch 2.15, stages use public methods
        assert ".finalize_backward(async_op=True)" in inspect.getsource(stage.start_gradient_reduction)
        return
    source = inspect.getsource(stage.perform_reduce_grad)
    for asked in (
        "fully_shard.state(",
        "_state_ctx.all_states",
        "post_backward()",
        "_root_post_backward_final_callback()",
    ):
        assert asked in source


@check("classes_to_wrap", "wrap_function")
def policies() -> None:
    def function(_module: nn.Module) -> bool:
        return True

    assert set(torch_private.classes_to_wrap(ModuleWrapPolicy([nn.Linear]))) == {nn.Linear}
    assert torch_private.wrap_function(CustomPolicy(function)) is function


# -- processes --------------------------------------------------------------------------------------------------


@check("default_store", "timeout_of", "backend_of", "check_sent", "check_sent_list")
def process_groups() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        torch_private.default_store().set("place", "here")
        assert torch_private.default_store().get("place") == b"here"
        assert dist.group.WORLD is not None
        assert torch_private.timeout_of(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=77)
        assert isinstance(torch_private.backend_of(dist.group.WORLD, torch.device("cpu")), dist.ProcessGroupGloo)
        assert torch_private.backend_of(dist.group.WORLD, torch.device("meta")) is None
        for call in (
            lambda tensor: dist.all_reduce(tensor),
            lambda tensor: dist.broadcast(tensor, 0),
            lambda tensor: dist.all_gather_into_tensor(tensor, tensor),
        ):
            assert calls_of(torch_private.check_sent, lambda call=call: call(torch.ones(1)))  # type: ignore[misc]
        assert calls_of(torch_private.check_sent_list, lambda: dist.all_gather([torch.ones(1)], torch.ones(1)))
    finally:
        dist.destroy_process_group()


@check("count_for_debugging", "uncounted")
def counts_of_collectives() -> None:
    names = ("c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.alltoall_base_", "c10d_functional.all_reduce")
    with CommDebugMode() as counts:
        for name in names:
            torch_private.count_for_debugging(name)
        with torch_private.uncounted():
            torch_private.count_for_debugging(names[0])
    assert [f"{packet}" for packet in counts.get_comm_counts()] == list(names)
    assert set(counts.get_comm_counts().values()) == {1} and counts.generate_comm_debug_tracing_table(noise_level=3)


@check("worker_context", "close_streams", "remaining_restarts", "grant_restart", "allow_no_restart", "forget_store")
def worker_agents() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    handler: Any = SimpleNamespace()
    spec = WorkerSpec(role="", local_world_size=1, rdzv_handler=handler, entrypoint="true", max_restarts=5)
    agent = LocalElasticAgent(spec, logs_specs=SimpleNamespace())  # type: ignore[arg-type]
    assert launcher.worker_context(agent) is None
    assert "self._pcontext = start_processes" in inspect.getsource(LocalElasticAgent)
    workers: Any = SimpleNamespace(
        subprocess_handlers={0: SubprocessHandler("true", (), {}, os.devnull, None, local_rank_id=0, numa_options=None)}
    )
    launcher.close_streams(workers)
    assert workers.subprocess_handlers[0]._stdout.closed
    workers.subprocess_handlers[0].proc.wait()
    assert launcher.remaining_restarts(agent) == 5
    launcher.grant_restart(agent)
    assert launcher.remaining_restarts(agent) == spec.max_restarts == 6
    launcher.allow_no_restart(agent)
    assert launcher.remaining_restarts(agent) == 0
    agent._store = dist.HashStore()  # type: ignore[assignment]
    launcher.forget_store(agent)
    assert agent._store is None
    assert "self._store = store" in inspect.getsource(LocalElasticAgent._rendezvous)


@check("HOMES_OF_FULLY_SHARD", "USERS_OF_FULLY_SHARD")
def homes_of_fully_shard() -> None:
    names = {"fully_shard": fully_shard, "MixedPrecisionPolicy": MixedPrecisionPolicy}
    for home in map(importlib.import_module, launcher.HOMES_OF_FULLY_SHARD):
        assert any(getattr(home, name, None) is original for name, original in names.items()), home.__name__
    for user in map(importlib.import_module, launcher.USERS_OF_FULLY_SHARD):
        assert vars(user)["FSDPModule"] is FSDPModule


class Asked(torch.Tensor):
    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@check("without_functions")
def functions_of_subclasses() -> None:
    tensor = torch.zeros(2).as_subclass(Asked)
    Asked.calls.clear()
    with torch_private.without_functions():
        torch.add(tensor, 1)
    assert not Asked.calls
    torch.add(tensor, 1)
    assert Asked.calls


# -- functions that are replaced --------------------------------------------------------------------------------


def calls_of(place: Any, run: Callable[[], object]) -> int:
    """How often `run` calls the function in that place."""
    calls = 0
    was = getattr(place.owner, place.name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return place.torchs(*args, **kwargs)

    setattr(place.owner, place.name, counting)
    try:
        run()
    finally:
        setattr(place.owner, place.name, was)
    return calls


def with_gradient() -> nn.Parameter:
    parameter = weight(2)
    parameter.grad = torch.ones(2)
    return parameter


@check("total_norm", "run_backward")
def functions() -> None:
    parameter = with_gradient()
    assert calls_of(torch_private.total_norm, lambda: nn.utils.clip_grad_norm_([parameter], 1.0)) == 1
    assert torch_private.total_norm.torchs([torch.ones(4)]) == 2
    assert calls_of(torch_private.run_backward, lambda: parameter.sum().backward()) == 1
    assert calls_of(torch_private.run_backward, lambda: torch.autograd.grad(parameter.sum(), [parameter])) == 1


@check("zero_grad")
def clearing() -> None:
    asked: list[bool] = []

    class Asked(nn.Parameter):
        @property
        def grad(self) -> Any:  # type: ignore[override]
            asked.append(True)
            return None

    optimizer = torch.optim.AdamW([Asked(torch.zeros(2))])
    assert calls_of(torch_private.zero_grad, lambda: optimizer.zero_grad()) == 1
    assert asked == [True]
    torch_private.zero_grad.torchs(optimizer, True)
    assert len(asked) == 2, "torch no longer looks at the gradient"


@check("unscale")
def loss_scaling() -> None:
    optimizer = torch.optim.SGD([with_gradient()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    found: list[Any] = []

    def step() -> None:
        scaler.unscale_(optimizer)
        found.append(scaler._found_inf_per_device(optimizer))

    assert calls_of(torch_private.unscale, step) == 1
    assert {float(flag) for flag in found[0].values()} == {0.0}


@check("distribute_tensor", "distribute_tensors")
def whole_tensors() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(2, 2, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
        for place, from_rank_0 in ((torch_private.distribute_tensor, False), (torch_private.distribute_tensors, True)):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
            whole = {"weight": torch.ones(2, 2)}
            assert calls_of(place, lambda w=whole, o=options: set_model_state_dict(model, w, options=o)) == 1  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


@check("redistribute", "from_local", "make_dtensor")
def other_ways_to_a_placement() -> None:
    from torch.distributed.tensor import zeros

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        made: list[DTensor] = []
        with_zeros = lambda: made.append(zeros(2, device_mesh=mesh, placements=[Shard(0)]))  # noqa: E731
        assert calls_of(torch_private.make_dtensor, with_zeros) == 1
        assert calls_of(torch_private.from_local, lambda: DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])) == 1
        assert calls_of(torch_private.redistribute, lambda: made[0].redistribute(mesh, [Replicate()])) == 1
    finally:
        dist.destroy_process_group()


@check("keep_every_box")
def boxes_in_files() -> None:
    from torch.distributed.checkpoint import hf_storage
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    items = [
        WriteItem(MetadataIndex(name, torch.Size([row])), WriteItemType.SHARD)
        for name, row in (("a", 0), ("b", 0), ("a", 1), ("a", 2))
    ]
    torch_private.keep_every_box(hf_storage)
    writer = hf_storage.HuggingFaceStorageWriter("nowhere", save_distributed=True)
    found = writer._split_by_storage_plan({"a": 1, "b": 2}, items)
    assert found == {1: items[:1], 2: items[1:2], 3: items[2:3], 5: items[3:]}
    assert writer._split_by_storage_plan(None, items) == {1: items[:2], 2: items[2:3], 3: items[3:]}


class Named(nn.Parameter):
    def __new__(cls, data: torch.Tensor, name: str) -> Named:
        raise AssertionError("nobody knows the name")


@check("groups_of")
def groups_that_are_cut() -> None:
    assert torch_private.groups_of(_StridedShard(1, split_factor=3)) == (1, 3)
    assert torch_private.groups_of(Shard(1)) is None


@check("rows_of_chunks")
def rows_of_what_is_cut_into_rows() -> None:
    """What torch's own `fully_shard` calls them: two ranks' tiles of four rows, each cut between two ranks."""
    assert torch_private.rows_of_chunks(2) == _StridedShard(0, split_factor=2)
    assert torch_private.rows_of_chunks(2) != Shard(0)


@check("made_as")
def a_subclass_past_its_constructor() -> None:
    data = torch.zeros(3)
    made = torch_private.made_as(Named, data, requires_grad=True)
    assert type(made) is Named and made.requires_grad and made.data_ptr() == data.data_ptr()


@check("joined", "flattened", "set_local")
def meshes_of_several_axes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
        both = torch_private.joined([mesh["replicate", "shard"], mesh["tp"]])
        assert both.mesh_dim_names == ("replicate", "shard", "tp") and both.get_group("tp") is mesh.get_group("tp")
        other = init_device_mesh("cpu", (1,))
        with pytest.raises(RuntimeError, match="unnamed axis"):
            torch_private.joined([other, mesh["tp"]])
        whole = torch_private.flattened(mesh["replicate", "shard"], "all")
        assert whole.mesh_dim_names == ("all",) and dist.get_process_group_ranks(whole.get_group()) == [0]
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh["tp"], [Shard(1)]))
        halves = distribute_tensor(torch.ones(2, 3, dtype=torch.bfloat16), mesh["tp"], [Shard(1)])
        torch_private.set_local(parameter, halves)
        assert parameter.dtype == torch.bfloat16 and parameter.is_leaf and parameter.requires_grad
        assert torch.equal(parameter.full_tensor().detach(), torch.ones(2, 3, dtype=torch.bfloat16))  # type: ignore[attr-defined]
        (parameter * 2).sum().backward()
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
    finally:
        dist.destroy_process_group()


@check("DispatchMode", "schema_of", "read_item", "leaves_of", "copy_all", "zero_all", "grouped_matmul")
def every_operation_is_seen() -> None:
    seen: list[Any] = []

    class Seeing(torch_private.DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            seen.append(function)
            if function.overloadpacket is torch_private.copy_all:
                assert torch_private.leaves_of(given) == [tensor, other]
            return function(*given, **(named or {}))

    tensor, other = torch.ones(4, 4), torch.zeros(4, 4)
    with Seeing():
        tensor.t()
        tensor + tensor
        tensor[0, 0].item()
        torch._foreach_copy_([tensor], [other])
        torch._foreach_zero_([tensor])
    packets = [function.overloadpacket for function in seen]
    for packet in (torch_private.read_item, torch_private.copy_all, torch_private.zero_all):
        assert packet in packets
    alias = {f.name(): torch_private.schema_of(f).returns[0].alias_info for f in seen[:2]}
    assert alias["aten::t"] is not None and alias["aten::add.Tensor"] is None
    assert hasattr(torch_private.grouped_matmul, "default")


@check("wrap_to_wait")
def unfinished_results() -> None:
    """It takes one tensor, and returns one."""
    schema = torch_private.schema_of(torch_private.wrap_to_wait.default)
    assert [str(one.type) for one in (*schema.arguments, *schema.returns)] == ["Tensor", "Tensor"]


@check("view_of_a_product")
def kernels_of_products() -> None:
    seen: list[Any] = []

    class Seen(torch_private.DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            seen.append(function.overloadpacket)
            return function(*given, **(named or {}))

    rows = torch.zeros(2, 3, 4, requires_grad=True)
    with Seen():
        torch.matmul(rows.transpose(0, 1), torch.zeros(4, 5))
    assert torch_private.view_of_a_product in seen
    assert not torch_private.schema_of(torch_private.view_of_a_product.default).returns[0].alias_info


@check("shapes_learned", "is_for_shapes")
def tensors_made_to_learn_a_shape() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake, rebuild = torch_private.shapes_learned

    def add() -> None:
        with FakeTensorMode():
            assert torch_private.is_for_shapes(type(torch.ones(3) + 1))

    assert calls_of(fake, add) > 0
    assert not torch_private.is_for_shapes(torch.Tensor)

    def shard() -> None:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.ones(37, 41), mesh, [Shard(0)])  # no shape that torch has learned before
        (weight @ distribute_tensor(torch.ones(41, 43), mesh, [Replicate()])).sum()

    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        assert calls_of(rebuild, shard) > 0
    finally:
        dist.destroy_process_group()


@check("fused_devices")
def which_devices_fuse() -> None:
    place = torch_private.fused_devices
    assert calls_of(place, torch.optim.AdamW([with_gradient()], fused=True).step) > 0
    assert "cpu" in place.torchs()


@check("attend")
def attention_in_one_kernel() -> None:
    query, key, value = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    shapes = [tensor.to("meta") for tensor in (query, key, value)]
    assert torch_private.attend(*shapes).shape == expected.shape


@check("set_rotate_method")
def the_rotation_of_context_parallelism() -> None:
    for name in ("alltoall", "allgather"):  # the last one is the default
        torch_private.set_rotate_method(name)
    with pytest.raises(NotImplementedError):
        torch_private.set_rotate_method("other")


@check("wrap_to_wait")
def results_that_are_not_finished() -> None:
    seen: list[Any] = []

    class Seen(torch_private.DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            seen.append(function.overloadpacket)
            return function(*given, **(named or {}))

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with Seen():
            permute_tensor(torch.zeros(4, device="meta"), [1, 0], dist.group.WORLD)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    assert torch_private.wrap_to_wait in (seen[-1], torch_private.wait_tensor)


# -- a job whose other ranks are not there ----------------------------------------------------------------------


@check("groups_made", "call_backend")
def who_makes_groups() -> None:
    place = torch_private.groups_made
    found: list[Any] = []

    def made(*given: Any, **named: Any) -> Any:
        found.append(given[:4])
        return place.torchs(*given, **named)

    setattr(place.owner, place.name, made)
    try:
        dist.init_process_group("fake", rank=0, world_size=2)
        part = dist.new_group([0])
        assert [given[:3] for given in found] == [(2, 0, []), (1, 0, [0])]
        torch_private.call_backend(part, "gloo")
        assert dist.get_backend(part) == "gloo"
    finally:
        setattr(place.owner, place.name, place.torchs)
        dist.destroy_process_group()


@check("ranks_awaited")
def who_has_created_a_group() -> None:
    store = dist.HashStore()
    torch_private.ranks_awaited.torchs(0, store, "group", 1, timedelta(seconds=10))
    assert store.num_keys() == 2


@check("parts_checked")
def which_parts_overlap() -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    assert torch_private.parts_checked.torchs([], Metadata({})) in (True, [])


@check("ranks_of_a_save")
def who_plans_a_save() -> None:
    ranks = object.__new__(torch_private.ranks_of_a_save.owner)
    torch_private.ranks_of_a_save.torchs(ranks, None, False, 0)
    assert (ranks.rank, ranks.is_coordinator, ranks.coordinator_rank) == (0, True, 0)


@check("copies_divided")
def what_several_ranks_would_save() -> None:
    from torch.distributed.checkpoint import SavePlan
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    plans = [SavePlan(_create_write_items(name, torch.ones(2))) for name in ("shared", "shared", "own")]
    divided = torch_private.copies_divided.torchs(plans)
    assert sorted(len(plan.items) for plan in divided) == [0, 1, 1]
    assert len(divided[2].items) == 1


@check("next_batch")
def every_loader_asks_for_batches() -> None:
    data: Any = [1.0, 2.0]
    assert torch_private.next_batch.torchs(iter(DataLoader(data))) == 1.0


@check("reduction_of")
def kinds_of_reductions() -> None:
    options = dist.AllreduceOptions()
    assert torch_private.reduction_of(options.reduceOp) == (dist.ReduceOp.SUM, None)
    options.reduceOp = dist._make_nccl_premul_sum(0.5)
    assert torch_private.reduction_of(options.reduceOp) == (dist.ReduceOp.PREMUL_SUM, 0.5)


@check("take_links", "wait_on_device")
def kernels_that_wait() -> None:
    signature = inspect.signature(torch.cuda._compile_kernel)
    signature.bind("source", "name")
    with pytest.MonkeyPatch.context() as patch:  # a host without CUDA's toolkit
        patch.setattr(cpp_extension, "CUDA_HOME", None)
        patch.setattr(torch.cuda, "_compile_kernel", lambda *_: partial(print, cpp_extension.include_paths("cuda")))
        torch_private._kernel.__wrapped__("wait")
        assert cpp_extension.CUDA_HOME is None
    if torch.cuda.is_available():
        (place, sent), ends = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), torch.cuda.Event(enable_timing=True)
        begins = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        for _ in range(2):
            torch_private.take_links(place, sent, 0.025)
        torch_private.wait_on_device(place, 0.025)
        assert sent.item() - place.item() == 25_000_000
        ends.record()
        ends.synchronize()
        assert 50 <= begins.elapsed_time(ends) < 60


class Slow(Dataset[int]):
    """Its only item is the worker's process id."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5)
        return os.getpid()


@check("awaited_worker")
def awaited_worker() -> None:
    found, trained = set[str](), threading.get_ident()

    def look() -> None:
        frame = sys._current_frames().get(trained)
        while frame is not None:
            found.add(torch_private.awaited_worker(frame))
            frame = frame.f_back

    threading.Timer(0.3, look).start()
    (worker,) = DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")
    assert f"worker 0 (process {int(worker)})" in found, found
