"""The Accelerator in a single process: arguments, refusals, and the parts that need no other rank.

pytest tests/api/test_accelerator.py
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import shutil
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.utils import DistributedType, GradientAccumulationPlugin, send_to_device
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import fullshard
from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.api.options import ProjectConfiguration
from fullshard.checkpoint.save import Pending
from fullshard.config.schema import CheckpointConfig, RunConfig, ShardingConfig
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.features import FSDPModule


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    yield


def _arguments(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_prepared_optimizer_is_pickled_with_all_that_it_holds() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    other = pickle.loads(pickle.dumps(optimizer))  # noqa: S301
    assert other.param_groups[0]["lr"] == 0.1 and other.gradient_state.sync_gradients
    _, sharded = accelerator.prepare(*model_and_optimizer())
    with pytest.raises(LifecycleError, match=r"cannot pickle 0\.weight"):
        pickle.dumps(sharded)


def test_a_copy_of_a_prepared_optimizer_steps_on_its_own() -> None:
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # which puts its own around `step`
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        (weight, _), (own, _) = optimizer.param_groups[0]["params"], other.param_groups[0]["params"]
        before, weight.grad, own.grad = weight.detach().clone(), torch.ones(2, 2), torch.ones(2, 2)
        other.step()
        assert torch.equal(weight, before) and torch.allclose(own, before - 0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precison": "bf16"}, TypeError, "unexpected keyword argument 'mixed_precison'"),
        ({"mixed_precision": "fp4"}, ConfigError, "setting 'mode': input should be .* got 'fp4'"),
        ({"gradient_accumulation_steps": 0}, ConfigError, "greater than or equal to 1"),
        ({"rng_types": ["numpy"]}, ConfigError, "rng_types contains unknown generators"),
        ({"log_with": "dvclive"}, ConfigError, r"'dvclive' is not installed\nhint: pip install 'fullshard\[dvclive\]'"),
        ({"log_with": "tensorbord"}, ConfigError, "Unsupported logging capability: tensorbord"),
        ({"log_with": "tensorboard"}, ConfigError, "requires a `logging_dir`"),
        ({"fsdp_plugin": {"strateg": 1}}, ConfigError, "unknown setting 'strateg'"),
        ({"fsdp_plugin": SimpleNamespace()}, ConfigError, "unsupported type types.SimpleNamespace"),
        ({"kwargs_handlers": [SimpleNamespace()]}, ConfigError, "kwargs handler SimpleNamespace is not supported"),
        ({"kwargs_handlers": SimpleNamespace()}, ConfigError, "expected a list of handlers, got SimpleNamespace"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Accelerator(**arguments)


def test_accelerates_own_option_classes_serve() -> None:
    utils = pytest.importorskip("accelerate.utils")
    handlers = [utils.GradScalerKwargs(init_scale=8.0), utils.AutocastKwargs(enabled=False)]
    accelerator = Accelerator(
        mixed_precision="fp16",
        kwargs_handlers=handlers,
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=3),
        project_config=utils.ProjectConfiguration(project_dir="out"),
    )
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0
    assert not accelerator.autocast_handler.enabled
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.split_batches
    assert accelerator.project_dir == "out"
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert accelerator.distributed_type == utils.DistributedType.FSDP


def test_what_accelerate_launch_exports_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator._config.sharding.strategy == "NO_SHARD"
    with pytest.warns(UserWarning, match="no is used instead of bf16 from .ACCELERATE_MIXED_PRECISION"):
        assert Accelerator(mixed_precision="no").mixed_precision == "no"


def test_a_plugins_precision_wins_and_says_so() -> None:
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    assert Accelerator(fsdp_plugin=plugin).mixed_precision == "bf16"
    with pytest.warns(UserWarning, match="is overridden by the plugin's mixed_precision_policy"):
        assert Accelerator(fsdp_plugin=plugin, mixed_precision="fp16").mixed_precision == "bf16"


def test_methods_that_are_absent_say_why() -> None:
    with pytest.raises(AttributeError, match=r"no 'lomo_backward'.*training.step_in_backward"):
        Accelerator().lomo_backward(None, 0.1)  # type: ignore[attr-defined]
    assert not hasattr(Accelerator(), "nonsense")


def test_state_is_what_scripts_read() -> None:
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.state.fsdp_plugin is plugin
    assert accelerator.distributed_type == DistributedType.FSDP
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_last_process


def test_prepare_returns_what_it_was_given_in_order() -> None:
    accelerator = Accelerator()
    model, optimizer = model_and_optimizer()
    marker = object()
    loss_function = nn.CrossEntropyLoss()
    prepared = accelerator.prepare(None, optimizer, marker, model, loss_function)
    assert prepared[0] is None
    assert prepared[2] is marker
    assert prepared[3] is model
    assert isinstance(model, FSDPModule)
    assert prepared[4] is loss_function
    assert not isinstance(loss_function, FSDPModule)
    assert accelerator.prepare(model) is model
    with pytest.raises(ConfigError, match="device_placement has 1 entries, but 2 objects were passed"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert accelerator.free_memory(model, optimizer) == [None, None]


def test_a_scheduler_steps_once_per_optimizer_step() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(TensorDataset(torch.randn(5, 4)), batch_size=1)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates, ends = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert all((p.grad is None) == accelerator.sync_gradients for p in model.parameters())
        rates.append(scheduler.get_last_lr()[0])
        ends.append(accelerator.sync_gradients)
        assert not accelerator.optimizer_step_was_skipped, "what scripts ask whose schedule is not prepared"
    assert ends == [False, True, False, True, True], "the last batch of an epoch ends a step"
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.0125]


def test_an_epoch_may_end_within_a_step_if_asked() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(3, 4)), batch_size=1))
    ends = []
    for _ in loader:
        with accelerator.accumulate():
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, False]
    plain = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin())
    assert plain.gradient_accumulation_steps == 1, "as with Accelerate"


@pytest.mark.parametrize(("with_optimizer", "rates"), [(True, [0.1, 0.05]), (False, [0.05, 0.0125])])
def test_a_scheduler_may_step_on_its_own(with_optimizer: bool, rates: list[float]) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=with_optimizer)
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for losses, rate in zip(((1.0, 2.0), (3.0, 4.0)), rates, strict=True):
        with accelerator.accumulate(model):
            for loss in losses:  # each that is seen after a lower one halves the rate
                scheduler.step(loss)
        assert scheduler.get_last_lr() == [rate]


def test_a_scheduler_made_from_the_prepared_optimizer() -> None:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10))
    accelerator.backward(model(torch.randn(1, 4)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] > 0.04


def test_clipping_between_steps_only_measures() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, _ = accelerator.prepare(*model_and_optimizer())
    with accelerator.accumulate(model):
        accelerator.backward(100 * model(torch.ones(1, 4)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        assert accelerator.clip_grad_norm_(model.parameters(), 0.1) == norm > 1
    with accelerator.accumulate(model):
        assert accelerator.clip_grad_norm_(model.parameters(), 0.1) == norm
        assert accelerator.clip_grad_norm_(model.parameters(), float("inf")) == pytest.approx(0.1, rel=1e-4)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == pytest.approx(0.01)


def test_groups_and_state_are_those_of_the_optimizer_inside() -> None:
    accelerator, (model, _) = Accelerator(cpu=True), model_and_optimizer()
    first, second = (list(layer.parameters()) for layer in model.children())
    inner = torch.optim.SGD(first, lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, inner)
    optimizer.add_param_group({"params": second, "lr": 0.2})
    assert [p for group in inner.param_groups for p in group["params"]] == list(model.parameters())
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][1]["lr"] = 0.3
    inner.state.clear()
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.3] and len(inner.state) == 4


def test_a_closure_is_called_in_the_step_that_ends_an_accumulation() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    before = accelerator.get_state_dict(model)
    losses: list[float] = []

    def closure() -> float:
        loss = model(torch.ones(1, 4)).sum()
        accelerator.backward(loss)
        losses.append(loss.item())
        return losses[-1]

    with accelerator.accumulate(model):
        assert optimizer.step(closure) is None and not losses
    with accelerator.accumulate(model):
        assert [optimizer.step(closure)] == losses
    assert not any(torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(model).items())


def test_fp16_with_two_optimizers_is_refused() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.prepare(*model_and_optimizer())
    with pytest.raises(ConfigError, match="supports only one optimizer"):
        accelerator.prepare(*model_and_optimizer())


def test_wrappers_that_replicate_are_taken_off() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    assert accelerator.unwrap_model(nn.DataParallel(nn.DataParallel(model))) is model
    assert accelerator.unwrap_model(model) is accelerator.unwrap_model(accelerator.prepare(model)) is model


def test_a_model_that_was_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="was compiled before sharding"):
        Accelerator().prepare(torch.compile(model_and_optimizer()[0]))


def test_recomputing_a_model_that_is_one_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes the model a single unit"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP", activation_checkpointing=True)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module: False, activation_checkpointing=True)
    with pytest.warns(UserWarning, match="only the root"), pytest.raises(ConfigError, match="is a single unit"):
        Accelerator(fsdp_plugin=plugin).prepare(model_and_optimizer()[0])


def test_settings_that_come_too_late_for_a_sharded_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fullshard.fully_shard(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin={"activation_checkpointing": True})
    with pytest.raises(ConfigError, match=r"sharding\.activation_checkpointing cannot be applied to a FSDPSequential"):
        accelerator.prepare(model)
    plugin = {"activation_checkpointing": True, "wrap_classes": ["Linear"]}
    own = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    assert accelerator.prepare(own) is own


def test_a_model_that_is_already_sharded_runs_under_autocast_too() -> None:
    model, _ = model_and_optimizer()
    other = copy.deepcopy(model)
    fullshard.fully_shard(other)
    accelerator, batch = Accelerator(cpu=True, mixed_precision="bf16"), torch.randn(3, 4)
    expected, found = accelerator.prepare(model)(batch), accelerator.prepare(other)(batch)
    assert torch.equal(found, expected) and not torch.equal(found, model_and_optimizer()[0](batch))
    assert torch.equal(accelerator.prepare(other)(batch), expected)


def test_sizes_of_pickles_are_those_of_other_files(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(64, 64))
    accelerator.save_model(model, tmp_path / "saved", "16KiB", safe_serialization=False)
    weights = [torch.load(path) for path in sorted((tmp_path / "saved").glob("*.bin"))]
    assert [tensor.shape for part in weights for tensor in part.values()] == [(64, 64), (64,)] and len(weights) == 2
    with pytest.raises(ConfigError, match="nonsense"):
        accelerator.save_model(model, tmp_path / "not", "nonsense", safe_serialization=False)
    assert not (tmp_path / "not").exists()


def test_a_checkpoint_holds_no_pickles_whatever_is_asked_for(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.prepare(model_and_optimizer()[0])
    with pytest.warns(UserWarning, match="has no effect: a checkpoint holds no pickles"):
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert (tmp_path / "state" / "manifest.json").is_file()
    value = torch.arange(6.0).view(2, 3).t()
    accelerator.save({"value": value}, tmp_path / "new" / "value.safetensors", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "new" / "value.safetensors")["value"], value)


def test_saving_needs_a_place_and_something_to_save(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with pytest.raises(LifecycleError, match="nothing to save"):
        accelerator.save_state(tmp_path / "state")
    accelerator.prepare(model_and_optimizer()[0])
    with pytest.raises(ConfigError, match="needs a directory"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="no checkpoint was found at") as refused:
        accelerator.load_state(tmp_path / "state")
    assert refused.value.hint == f"{tmp_path} holds no checkpoint either; relative paths start at {Path.cwd()}"
    with pytest.raises(ConfigError, match=r"cannot checkpoint int \(Item at index 1\): the object must have"):
        accelerator.register_for_checkpointing(nn.Linear(1, 1), 3)
    with pytest.raises(ConfigError, match="cannot checkpoint SimpleNamespace"):
        accelerator.register_for_checkpointing(SimpleNamespace(state_dict=dict))
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(ConfigError, match="save_on_each_node is not supported: checkpoints must be in storage"):
        accelerator.save_state(tmp_path / "state")


def test_loading_into_other_objects_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(total_limit=1))
    accelerator.prepare(*accelerator.prepare(*model_and_optimizer()))  # twice the same is one
    for name in ("state", "later"):  # the limit is of those that are numbered
        accelerator.save_state(tmp_path / name)
    other = Accelerator()
    other.prepare(*model_and_optimizer(), *model_and_optimizer())
    with pytest.raises(CheckpointError, match="holds 1 models with optimizers, but 2 are prepared"):
        other.load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="no checkpoint was found at") as refused:
        other.load_state(tmp_path / "stat")
    assert refused.value.hint == f"the newest in this folder is {tmp_path / 'later'}"


@pytest.mark.parametrize("beside", [True, False])
def test_a_model_without_an_optimizer_is_saved_too(tmp_path: Path, beside: bool) -> None:
    accelerator = Accelerator(cpu=True)
    if beside:
        accelerator.prepare(*model_and_optimizer())
    model = accelerator.prepare(model_and_optimizer()[0])
    expected = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.save_state(tmp_path)
    for parameter in model.parameters():
        parameter.detach().zero_()
    accelerator.load_state(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in accelerator.get_state_dict(model).items())


def test_a_damaged_part_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    models = accelerator.prepare(*model_and_optimizer(), *model_and_optimizer())[::2]
    accelerator.save_state(tmp_path)
    for parameter in itertools.chain(*(model.parameters() for model in models)):
        parameter.detach().zero_()
    for number in range(2):
        [file] = (tmp_path / f"part_{number}").glob("model-*")
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"part_{number}.* is damaged"):
            accelerator.load_state(tmp_path)
        file.write_bytes(whole)
    assert not any(value.any() for model in models for value in accelerator.get_state_dict(model).values())
    accelerator.load_state(tmp_path)
    assert all(value.any() for model in models for value in accelerator.get_state_dict(model).values())


def test_a_model_is_saved_where_a_save_of_it_was_killed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model_and_optimizer()[0])
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        (tmp_path / ".fullshard-export").mkdir()
        (tmp_path / ".fullshard-export" / "model-00001-of-00002.safetensors").write_text("half")
        accelerator.save_model(model, tmp_path, safe_serialization=safe)
        assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_process_that_no_launcher_started_is_told_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (4, 1):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        Accelerator(cpu=True).prepare(model_and_optimizer()[0])
        told = (
            f"no launcher started this process: on the {count} processors of this host, use `fullshard launch SCRIPT`"
        )
        assert (told in capsys.readouterr().err) == (count > 1)


def test_what_another_accelerator_prepared_is_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    first = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    _, optimizer = first.prepare(*model_and_optimizer())
    second = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=3)
    assert "gradient_accumulation_steps is now 3 for earlier Accelerators" in (capsys.readouterr().err)
    assert second.prepare(optimizer).scaler is second.scaler is not first.scaler
    assert first.gradient_accumulation_steps == 3


@pytest.mark.parametrize("is_configured", [True, False])
def test_a_save_in_the_background_that_failed_is_told_by_the_next_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_configured: bool
) -> None:
    numbers = itertools.count()

    def fail(*_: Any) -> None:
        raise CheckpointError(f"save {next(numbers)} failed")

    monkeypatch.setattr(Pending, "complete", fail)
    config = RunConfig(checkpoint=CheckpointConfig(async_save=is_configured))
    accelerator = Accelerator(fsdp_plugin=config)
    accelerator.prepare(*model_and_optimizer())
    for number, then in enumerate(
        (lambda: accelerator.save_state(tmp_path / "next", wait=True), accelerator.end_training)
    ):
        accelerator.save_state(tmp_path / str(number), wait=None if is_configured else False)
        with pytest.raises(CheckpointError, match=f"save {number} failed"):
            then()
    accelerator.end_training()


def test_loading_never_numbers_checkpoints_anew(tmp_path: Path) -> None:
    def made() -> Accelerator:
        options = ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=options)
        accelerator.prepare(*model_and_optimizer())
        return accelerator

    numbered = made()
    first = numbered.save_state()
    numbered.save_state()
    numbered.load_state(first)
    assert numbered.save_iteration == 2, "an earlier one, to go back to"
    shutil.copytree(first, tmp_path / "checkpoint_7")
    numbered.load_state(tmp_path / "checkpoint_7")
    shutil.copytree(first, tmp_path / "best")
    numbered.load_state(tmp_path / "best")
    assert numbered.save_iteration == 2, "of no number of this project"
    assert numbered.save_state().endswith("checkpoint_2")
    resumed = made()
    resumed.load_state()
    assert resumed.save_iteration == 3


def test_one_process_gathers_whatever_it_has() -> None:
    accelerator = Accelerator(cpu=True)
    for value in ({"text": "abc"}, "abc", None, ("a", "b"), 1.5, {"ids": [1, 2], "none": None}):
        assert accelerator.gather(value) == accelerator.gather_for_metrics(value) == value
        assert accelerator.gather_for_metrics(value, use_gather_object=True) is value
        with accelerator.split_between_processes(value) as part:
            assert part is value
    assert accelerator.gather_for_metrics(torch.tensor(2.0)).tolist() == [2.0], "of as many dimensions as on many ranks"


def test_containers_of_batches_are_kept() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = send_to_device({"packed": packed, "user": UserDict(x=torch.ones(1))}, torch.device("meta"))
    assert moved["packed"].data.is_meta and not moved["packed"].batch_sizes.is_meta, "torch wants these on the CPU"
    assert moved["user"]["x"].is_meta


def test_accelerate_takes_a_config_and_refuses_fp16() -> None:
    model, optimizer = model_and_optimizer()
    sharded, same, loader = fullshard.accelerate(model, optimizer, config=ShardingConfig(strategy="NO_SHARD"))
    assert isinstance(sharded, FSDPModule)
    assert same is optimizer
    assert loader is None
    with pytest.raises(ConfigError, match="fp16 needs loss scaling"):
        fullshard.accelerate(model_and_optimizer()[0], mixed_precision="fp16")
    with pytest.raises(ConfigError, match="model: expected a module, got SGD"):
        fullshard.accelerate(cast(Any, model_and_optimizer()[1]))
