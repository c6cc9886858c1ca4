"""Every public name and argument that Accelerate has is here: it does what it says, or is refused with the reason.

pytest tests/api/test_accelerate_surface.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState as TheirState
from accelerate.state import GradientState as TheirGradientState
from accelerate.state import PartialState as TheirPartialState
from accelerate.utils import TorchContextParallelConfig
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset

import fullshard
from fullshard import api
from fullshard.api import Accelerator
from fullshard.api.refused import ACCELERATES_OWN, ARGUMENTS, METHODS, NAMES
from fullshard.config.handover import hand_over
from fullshard.config.schema import CheckpointConfig, RunConfig
from fullshard.core.errors import CheckpointError, CommunicationError, ConfigError
from tests.distributed import preload, run_ranks

preload("accelerate")

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _assigned(cls: type) -> set[str]:
    """Public attributes that the methods of a class set on the instance."""
    nodes = ast.walk(ast.parse(inspect.getsource(cls)))
    stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self" and n.attr[0] != "_"}


def _public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def _function(cls: type, name: str) -> Any:
    found = inspect.getattr_static(cls, name, None)
    return getattr(found, "__func__", found)


# Set by Accelerate on the way to another engine, and read by nobody without it.
_OTHER_ENGINES = {
    "deepspeed_engine_wrapped", "deepspeed_plugins", "deepspeed_config", "te_recipe_handler", "downcast_bfloat",
}  # fmt: skip


def test_every_name_of_the_accelerator_is_here_or_refused() -> None:
    ours = Accelerator(cpu=True)
    for name in sorted((_public(accelerate.Accelerator) | _assigned(accelerate.Accelerator)) - _OTHER_ENGINES):
        if name in METHODS:
            with pytest.raises(AttributeError) as refusal:
                getattr(ours, name)
            assert METHODS[name] in str(refusal.value)
        else:
            assert hasattr(ours, name), name
    theirs = _public(accelerate.Accelerator) | _assigned(accelerate.Accelerator)
    own = {"initialized", "keep_copy", "load_copy", "shares_losses", "steps_in_backward"}
    assert _public(Accelerator) - theirs == own
    assert METHODS.keys() - {"log_images"} <= _public(accelerate.Accelerator), "refused, but not there to be refused"


def test_every_argument_of_every_method_is_here() -> None:
    for name in sorted(_public(accelerate.Accelerator) - METHODS.keys()):
        theirs, ours = _function(accelerate.Accelerator, name), _function(Accelerator, name)
        if not (inspect.isfunction(theirs) and inspect.isfunction(ours)):
            continue
        taken = inspect.signature(ours).parameters
        for argument in inspect.signature(theirs).parameters.values():
            assert argument.name in taken or argument.kind in VARIADIC, f"{name}({argument.name})"


def test_every_argument_of_the_constructor_is_here_or_refused() -> None:
    ours = inspect.signature(Accelerator).parameters
    assert {name for name, argument in ours.items() if argument.annotation == "None"} == ARGUMENTS.keys()
    assert inspect.signature(accelerate.Accelerator).parameters.keys() <= ours.keys()
    for name, reason in ARGUMENTS.items():
        refused: dict[str, Any] = {name: "something"}
        with pytest.raises(ConfigError) as refusal:
            Accelerator(**refused)
        assert reason in str(refusal.value)


def test_a_dynamo_plugin_says_how_units_are_compiled() -> None:
    plugin = accelerate.utils.TorchDynamoPlugin

    def compiled(plugin: Any, backend: str | None = None) -> tuple[Any, ...]:
        config = Accelerator(cpu=True, dynamo_plugin=plugin, dynamo_backend=backend)._config.sharding
        names = ("compile", "compile_backend", "compile_mode", "compile_fullgraph", "compile_dynamic")
        return tuple(getattr(config, name) for name in names)

    regional = plugin(backend="aot_eager", fullgraph=True, use_regional_compilation=True)
    assert compiled(regional) == (True, "aot_eager", "default", True, None)
    assert compiled(plugin(backend="inductor", mode="reduce-overhead", dynamic=True))[1:3] == (
        "inductor", "reduce-overhead",
    )  # fmt: skip
    assert not compiled(plugin(backend="inductor", disable=True))[0] and not compiled(plugin())[0]
    for wrong, backend, message in (
        (plugin(backend="eager"), "eager", "both select a compiler"),
        (plugin(backend="eager", options={"trace": 1}), None, "options = {'trace': 1}"),
        ("eager", None, "dynamo_plugin has the wrong type str"),
    ):
        with pytest.raises(ConfigError, match=message):
            compiled(wrong, backend)


@pytest.mark.parametrize("theirs", [TheirState, TheirPartialState, TheirGradientState])
def test_every_name_of_the_states_is_here(theirs: type) -> None:
    accelerator = Accelerator(cpu=True)
    ours = accelerator.gradient_state if theirs is TheirGradientState else accelerator.state
    refused = {"get_deepspeed_plugin", "select_deepspeed_plugin"}
    for name in sorted((_public(theirs) | _assigned(theirs)) - _OTHER_ENGINES - refused):
        assert hasattr(ours, name), name
    for name in refused & _public(theirs):
        with pytest.raises(AttributeError, match="fullshard has only one engine"):
            getattr(ours, name)


def test_every_name_of_the_package_can_be_imported_or_is_refused() -> None:
    tree = ast.parse(Path(accelerate.__file__).read_text())
    imported = {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names} - {"rich"}
    for name in sorted(imported):
        if name in NAMES:
            with pytest.raises(AttributeError) as refusal:
                getattr(fullshard, name)
            assert NAMES[name] in str(refusal.value)
        else:
            assert getattr(fullshard, name) is not None
            assert (getattr(fullshard, name) is getattr(accelerate, name)) == (name in ACCELERATES_OWN), name
    with pytest.raises(AttributeError, match="has no attribute 'Acelerator'"):
        fullshard.Acelerator  # type: ignore[attr-defined]  # noqa: B018
    assert set(api.__all__) - {"ShardedDataLoader"} <= set(fullshard.__all__)


def _kinds_of_handlers() -> list[type]:
    base = accelerate.utils.KwargsHandler
    found = [value for value in vars(accelerate.utils).values() if isinstance(value, type) and issubclass(value, base)]
    return [kind for kind in found if kind is not base and "Plugin" not in kind.__name__]


@pytest.mark.parametrize("kind", [kind for kind in _kinds_of_handlers() if kind.__name__.endswith("Kwargs")])
def test_every_kind_of_handler_is_used_or_refused(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handler = kind()
    except Exception:
        pytest.skip("needs a package that is not installed")
    used = {"GradScalerKwargs", "AutocastKwargs", "InitProcessGroupKwargs", "DistributedDataParallelKwargs"}
    used |= {"ProfileKwargs", "AORecipeKwargs"}
    if kind.__name__ not in used:
        with pytest.raises(ConfigError, match=kind.__name__):
            Accelerator(cpu=True, kwargs_handlers=[handler])
        return
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.handlers[kind.__name__] is handler
    said = "have no effect: the model is sharded" in capsys.readouterr().err
    assert said == (kind.__name__ == "DistributedDataParallelKwargs")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (accelerate.DistributedDataParallelKwargs(comm_hook=accelerate.DDPCommunicationHookType.FP16), "comm_hook"),
        (accelerate.InitProcessGroupKwargs(init_method="tcp://127.0.0.1:1"), "init_method"),
        (accelerate.InitProcessGroupKwargs(backend="mpi"), "backend = 'mpi'"),
    ],
)
def test_values_of_handlers_that_cannot_be_honored_are_refused(handler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, kwargs_handlers=[handler])


def test_a_gradient_state_that_accelerates_class_has_reset_is_made_anew() -> None:
    Accelerator(cpu=True, gradient_accumulation_steps=3)
    TheirGradientState._reset_state()
    assert Accelerator(cpu=True).gradient_accumulation_steps == TheirGradientState().num_steps == 1


def test_values_that_scripts_set() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 3
    accelerator.sync_gradients = False
    theirs = TheirGradientState()
    assert (theirs.num_steps, theirs.sync_gradients) == (3, False), "Accelerate's class sees the same"
    with pytest.raises(ConfigError, match="at least 1"):
        accelerator.gradient_accumulation_steps = 0
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    assert accelerator.gradient_state.active_dataloader is None
    for number, _ in enumerate(loader):
        assert accelerator.gradient_state.active_dataloader is TheirGradientState().active_dataloader is loader
        assert TheirGradientState().end_of_dataloader == (number == 1)
    assert accelerator.gradient_state.active_dataloader is None
    spread = nn.Linear(2, 2)
    spread.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    assert accelerator.verify_device_map(nn.Sequential(spread))
    assert not accelerator.verify_device_map(nn.Linear(2, 2))
    assert (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank) == (0, 0)
    ran: list[int] = []
    accelerator.on_local_process(ran.append, local_process_index=0)(0)
    accelerator.on_local_process(local_process_index=1)(ran.append)(
        1
    )  # one process does everything, as with Accelerate
    assert ran == [0, 1]


# -- plugins ----------------------------------------------------------------------------------------------------


def _their_plugin(**fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions
        return accelerate.FullyShardedDataParallelPlugin(**fields)


@pytest.mark.parametrize("version", [1, 2])
def test_accelerates_plugin_means_what_it_says(version: int) -> None:
    fields: dict[str, Any] = {
        "fsdp_version": version,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Linear"],
        "activation_checkpointing": True,
        "mixed_precision_policy": "bf16",
        "state_dict_type": "full_state_dict",
    }
    if version == 1:
        fields |= {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"}
    else:
        fields |= {"reshard_after_forward": False}
    accelerator = Accelerator(cpu=True, fsdp_plugin=_their_plugin(**fields))
    sharding, plugin = accelerator._config.sharding, accelerator.state.fsdp_plugin
    assert not sharding.resolved_strategy().reshards_after_forward
    assert sharding.activation_checkpointing
    assert accelerator._config.precision.compute_dtype == "bfloat16"
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    assert plugin.transformer_cls_names_to_wrap == ["Linear"]
    if version == 1:
        assert sharding.backward_prefetch == "BACKWARD_POST"
    # What nobody chose is fullshard's default and not Accelerate's.
    assert sharding.forward_prefetch and sharding.sync_module_states


def test_what_accelerates_plugin_leaves_at_its_default_is_left_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")  # as Accelerate's plugin does, which leaves it there
    config = RunConfig.of({"sharding": {"strategy": "SHARD_GRAD_OP", "cpu_offload": True}})
    for name, value in hand_over(config, tmp_path / "config.json").items():
        monkeypatch.setenv(name, value)
    theirs = _their_plugin(fsdp_version=2, activation_checkpointing=True)
    sharding = Accelerator(cpu=True, fsdp_plugin=theirs)._config.sharding
    assert sharding.activation_checkpointing and sharding.cpu_offload
    assert not sharding.resolved_strategy().reshards_after_forward
    replaced = dataclasses.replace(_their_plugin(fsdp_version=2), transformer_cls_names_to_wrap=["Linear"])
    assert Accelerator(cpu=True, fsdp_plugin=replaced)._config.sharding.cpu_offload


def test_accelerates_plugin_with_a_policy_for_a_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    plugin = _their_plugin(auto_wrap_policy="size_based_wrap", min_num_params=20)
    plugin.set_auto_wrap_policy(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(model)
    assert fullshard.describe(model).units == 3


def test_what_is_changed_on_accelerates_plugin_counts_for_the_next_model() -> None:
    theirs = _their_plugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=theirs)
    theirs.set_mixed_precision("bf16", override=True)
    theirs.reshard_after_forward, theirs.auto_wrap_policy = False, ModuleWrapPolicy({nn.Linear})
    model = accelerator.prepare(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.ReLU()))
    assert fullshard.describe(model).units == 3
    assert accelerator._config.precision.compute_dtype == "bfloat16"
    assert accelerator._config.sharding.resolved_strategy().name == "SHARD_GRAD_OP"
    theirs.activation_checkpointing, theirs.cpu_offload = True, CPUOffloadPolicy()
    accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert accelerator._config.sharding.activation_checkpointing and accelerator._config.sharding.cpu_offload
    theirs.reshard_after_forward, theirs.activation_checkpointing = True, False  # as they are by themselves
    theirs.mixed_precision_policy, theirs.cpu_offload = None, OffloadPolicy()
    accelerator.prepare(nn.Linear(4, 4))
    sharding = accelerator._config.sharding
    assert (sharding.activation_checkpointing, sharding.cpu_offload) == (False, False)
    assert sharding.resolved_strategy().name == "FULL_SHARD"
    assert accelerator._config.precision.compute_dtype is None


def _parallel(replicas: int, shards: int, **fields: Any) -> tuple[str, int, int]:
    plugin = _their_plugin(**fields) if fields else None
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    assert accelerator.parallelism_config is config
    mesh: Any = accelerator.torch_device_mesh
    assert mesh["dp_cp"].size() == mesh["dp"].size() == 2 and mesh["dp_shard_cp"].size() == shards
    assert mesh["dp_replicate"].get_local_rank() == accelerator.data_parallel_rank
    assert mesh[tuple(config.fsdp_dim_names)].size() == 2
    strategy = accelerator._config.sharding.resolved_strategy().name
    return strategy, accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank


def test_a_parallelism_config_is_a_strategy() -> None:
    assert run_ranks(_parallel, 2, 1, 2) == [("FULL_SHARD", 0, 0), ("FULL_SHARD", 0, 1)]
    assert run_ranks(_parallel, 2, 2, 1) == [("NO_SHARD", 0, 0), ("NO_SHARD", 1, 0)]


def _axes(sizes: dict[str, int], settings: dict[str, Any]) -> tuple[dict[str, int], list[int], list[list[int]]]:
    """Build an Accelerator and return the sizes of its axes, the rank in each, and what ranks gather."""
    config = ParallelismConfig(**sizes, cp_handler=TorchContextParallelConfig("alltoall")) if sizes else None
    plugin = RunConfig.of_paths(settings) if settings else None
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    mesh: Any = accelerator.torch_device_mesh
    given: Any = accelerator.parallelism_config
    assert given.total_size == accelerator.num_processes and given.cp_handler.cp_comm_strategy == "alltoall"
    names = ("dp_replicate", "dp_shard", "cp", "dp", "dp_shard_cp", "dp_cp")
    assert mesh["cp"].get_local_rank() == accelerator.context_parallel_rank
    assert mesh["dp_replicate"].get_local_rank() == accelerator.data_parallel_rank
    assert mesh["dp_shard"].get_local_rank() == accelerator.data_parallel_shard_rank
    assert mesh[tuple(given.fsdp_dim_names)].size() == accelerator.num_processes
    model = accelerator.prepare(nn.Linear(8, 8))
    assert fullshard.describe(model).shard_size == mesh["dp_shard_cp"].size()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
    found = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in loader]
    assert accelerator.gather(torch.ones(1)).numel() == accelerator.reduce(torch.ones(())) == accelerator.num_processes
    assert accelerator.gather_for_metrics(["text"]) == ["text"] * mesh["dp"].size()
    return {name: mesh[name].size() for name in names}, mesh["dp_shard_cp"].mesh.tolist(), found


SIZES = {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "dp": 1, "dp_shard_cp": 2, "dp_cp": 2}


@pytest.mark.parametrize("from_settings", [False, True])
def test_parameters_are_sharded_over_context_parallel_ranks(from_settings: bool) -> None:
    settings = {"parallelism.cp_size": 2, "parallelism.cp_comm_strategy": "alltoall"}
    given = ({}, settings) if from_settings else ({"cp_size": 2}, {})
    rows = [[0, 1, 0, 1], [2, 3, 2, 3], [4, 4]]
    assert run_ranks(_axes, 2, *given) == [(SIZES, [0, 1], rows)] * 2


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
def test_axes_beside_context_parallelism(replicas: int) -> None:
    settings: dict[str, Any] = {"parallelism.cp_size": 2, "parallelism.cp_comm_strategy": "alltoall"}
    settings |= {"sharding.strategy": "HYBRID_SHARD", "sharding.shard_size": 4} if replicas == 2 else {}
    assert run_ranks(_axes, 8, {}, settings)[0][0] == {
        **{"dp_replicate": replicas, "dp_shard": 4 // replicas, "cp": 2},
        **{"dp": 4, "dp_shard_cp": 8 // replicas, "dp_cp": 8},
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp_shard_size": 2}, "the job, which has 1 rank"),
        ({"tp_size": 2}, "x tp_size 2 does not match the job, which has 1 rank"),
        ({"cp_size": 2}, "x cp_size 2 does not match the job"),
        ({"sp_size": 2}, "x sp_size 2 does not match the job"),
    ],
)
def test_other_parallelism_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(**fields))


# -- gradients --------------------------------------------------------------------------------------------------


def _synchronized() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(3, 1, bias=False))
    inputs = [torch.full((1, 3), float(10 * step + accelerator.process_index)) for step in range(3)]

    def gradient() -> Any:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients:
            return None
        with pytest.raises(CommunicationError, match="full_tensor"):
            accelerator.reduce(gradients[0], "sum")  # each rank has other elements
        total = sum(gradient.sum() for gradient in gradients)
        assert accelerator.reduce(total, "mean") == total.full_tensor()
        return total.item()

    seen: dict[str, Any] = {}
    for name, context in (("accelerator", accelerator.no_sync), ("model", lambda m: m.no_sync())):
        model.zero_grad()
        with context(model):
            accelerator.backward(model(inputs[0]).sum())
            seen[f"{name}, kept"] = any(p.grad is not None for p in model.parameters())
            accelerator.backward(model(inputs[1]).sum())
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(model(inputs[2]).sum())
        seen[f"{name}, reduced"] = gradient()
    return seen


def test_gradients_are_kept_until_they_are_to_be_reduced() -> None:
    # Of x.sum() over 3 weights the gradient is x: means over ranks of 0.5 + 10.5 + 20.5, for each of 3 weights.
    expected = {
        "accelerator, kept": False, "accelerator, reduced": 94.5, "model, kept": False, "model, reduced": 94.5,
    }  # fmt: skip
    assert run_ranks(_synchronized, 2) == [expected, expected]


# -- state ------------------------------------------------------------------------------------------------------


def _hooked(directory: str) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = nn.Linear(4, 4), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    calls: list[Any] = []

    def write(models: list[Any], weights: list[Any], output: str) -> None:
        calls.append((models[0] is model, weights, output))
        if accelerator.is_main_process:
            (Path(output) / "config.json").write_text(json.dumps({"kept": 1}))

    def read(models: list[Any], source: str) -> None:
        calls.append((models, json.loads((Path(source) / "config.json").read_text())))

    handle = accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(read)
    accelerator.save_state(directory)
    accelerator.save_state(directory)  # what the hook put there may be replaced with the rest
    accelerator.load_state(directory, strict=True, map_location="cpu")
    with pytest.raises(ConfigError, match="needs the complete checkpoint"):
        accelerator.save_state(directory, wait=False)
    handle.remove()
    accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    calls.append((Path(directory) / "config.json").exists())
    with pytest.raises(ConfigError, match="nothing is unpickled"):
        accelerator.load_state(directory, load_kwargs={"weights_only": False})
    return calls


def test_hooks_around_save_and_load(tmp_path: Path) -> None:
    directory = str(tmp_path / "state")
    for calls in run_ranks(_hooked, 2, directory):
        assert calls == [(True, [], directory), (True, [], directory), ([], {"kept": 1}), False]


def _hooks_that_fail(directory: str) -> list[str]:
    accelerator, found = Accelerator(cpu=True), []
    accelerator.prepare(nn.Linear(4, 4))

    def fail(*_: Any) -> None:
        if accelerator.process_index == 1:
            raise OSError("no room")

    accelerator.save_state(directory)
    accelerator.register_save_state_pre_hook(fail)
    accelerator.register_load_state_pre_hook(fail)
    for do in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError) as error:
            do(directory)
        found.append(str(error.value))
    accelerator.wait_for_everyone()
    return found


def test_a_hook_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    expected = ["a hook in the script failed\nrank 1: OSError: no room"] * 2
    assert run_ranks(_hooks_that_fail, 2, str(tmp_path / "state"), timeout=60) == [expected] * 2


def test_files_that_no_hook_put_there_are_kept(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 4))
    accelerator.register_save_state_pre_hook(lambda models, weights, output: None)
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        accelerator.save_state(tmp_path / "state")


def _loaders_alone(directory: str) -> tuple[list[float], list[float]]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True))
    rest: list[float] = []
    for number, (x,) in enumerate(loader):
        if number == 0:
            accelerator.save_state(directory)
        else:
            rest += x.tolist()
    accelerator.load_state(directory)
    return rest, [value for (x,) in loader for value in x.tolist()]


def test_loaders_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    for rest, resumed in run_ranks(_loaders_alone, 2, str(tmp_path / "state")):
        assert rest == resumed and len(rest) == 4


def test_a_state_dict_type_may_be_torchs_enumeration(tmp_path: Path) -> None:
    from torch.distributed.fsdp import StateDictType

    plugin = fullshard.FullyShardedDataParallelPlugin(state_dict_type=StateDictType.FULL_STATE_DICT)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.prepare(nn.Linear(4, 4))
    accelerator.save_state(tmp_path / "whole")
    assert (tmp_path / "whole" / "model").is_dir()
    plugin.state_dict_type = StateDictType.SHARDED_STATE_DICT
    accelerator.save_state(tmp_path / "sharded")
    assert not (tmp_path / "sharded" / "model").exists()
    config = RunConfig(checkpoint=CheckpointConfig(state_dict_type="FULL_STATE_DICT"))
    configured = Accelerator(fsdp_plugin=config)
    configured.prepare(nn.Linear(4, 4))
    assert (Path(configured.save_state(tmp_path / "configured")) / "model").is_dir()
    with pytest.raises(ConfigError, match="strict=False"):
        accelerator.load_state(tmp_path / "sharded", strict=False)
