"""`fullshard.EMA` on sharded models against `torch.optim.swa_utils.AveragedModel` in one process.

pytest tests/optim/test_average.py
"""

from __future__ import annotations

import copy
import shutil
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import swa_utils

import fullshard
from fullshard import EMA
from fullshard.checkpoint import AsyncSaver, export_hf, full_state_dict, load_checkpoint, save_checkpoint
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError, OptimizerError
from fullshard.features import ShardedParameter, fully_shard, init_mesh, shard_model, unsharded
from tests import optimizers, trainers
from tests.differential import CLOSE, TOLERANCE, check, compare, parameters, rounding
from tests.distributed import run_ranks
from tests.optim.test_muon_runs import fullshard as fullshard_command
from tests.recipes.test_recipe_train import inputs as inputs

STEPS = 4
DECAY = 0.9


class Model(nn.Module):
    """A tied weight, a frozen one, an unused one, blocks whose matrices are cut; batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 17), nn.GELU(), nn.Linear(17, 10)) for _ in range(2))
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(self.frozen(x))
        return out


def model_of() -> Model:
    torch.manual_seed(1)
    return Model()


def sharded(strategy: str = "FULL_SHARD", **options: Any) -> Model:
    model = model_of()
    shard_model(model, strategy=strategy, unit_modules=list(model.blocks), **options)
    return model


def step_with(model: nn.Module, optimizer: Any, average: Any, *, first: int = 0, steps: int = STEPS) -> None:
    """The same gradients everywhere, so that the numbers are the same bits."""
    unused: Any = {"leaves_out": lambda name, step: "unused" in name}
    optimizers.step_with(model, optimizer, first=first, steps=steps, after=average, **unused)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def reference(steps: int = STEPS) -> tuple[nn.Module, nn.Module]:
    """(the model, its average), by torch in one process."""
    model = model_of()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    step_with(model, adamw(model), lambda: average.update_parameters(model), steps=steps)
    return model, average.module


def compared(model: nn.Module, expected: nn.Module) -> dict[str, float]:
    return compare({"parameters": parameters(model)}, {"parameters": parameters(expected)})


TOKENS = torch.arange(12).view(2, 6)


# -- numbers ------------------------------------------------------------------------------------------------------


def check_numbers(sharding: dict[str, Any]) -> dict[str, float]:
    expected, average = reference()
    model = sharded(**sharding)
    optimizer, ema = adamw(model), EMA(model, DECAY)
    step_with(model, optimizer, ema.update, steps=STEPS - 1)
    with torch.no_grad():
        model(TOKENS)  # units stay unsharded with some strategies
    with ema.swapped(), torch.no_grad():
        model(TOKENS)
    step_with(model, optimizer, ema.update, first=STEPS - 1)  # nothing is left of the averages
    found = compared(model, expected)
    with ema.swapped(), torch.no_grad():
        found |= {f"{name} on average": value for name, value in compared(model, average).items()}
        torch.testing.assert_close(model(TOKENS), average(TOKENS))
    assert compared(model, expected) == {name: value for name, value in found.items() if "average" not in name}
    torch.testing.assert_close(model(TOKENS), expected(TOKENS))
    assert ema.updates == STEPS
    held = sum(tensor.numel() for tensor in ema.by_parameter.values())
    assert held == sum(
        p.interval.numel for p in model.parameters() if isinstance(p, ShardedParameter) and p.requires_grad
    )
    return found


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [
        (2, {}),
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(3, {"strategy": "SHARD_GRAD_OP"}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "NO_SHARD"}, marks=pytest.mark.full),
        (2, {"strategy": "SHARD_GRAD_OPTIMIZER"}),
        pytest.param(2, {"strategy": "SHARD_OPTIMIZER"}, marks=pytest.mark.full),
        pytest.param(4, {"strategy": "HYBRID_SHARD", "shard_size": 2}, marks=pytest.mark.full),
    ],
)
def test_the_numbers_are_torchs(world_size: int, sharding: dict[str, Any]) -> None:
    check(run_ranks(check_numbers, world_size, sharding), exact=True)


def test_decays() -> None:
    """A function of the number of updates: the mean of all, and diffusers' warm-up; one process needs no sharding."""
    model = nn.Linear(1, 1, bias=False)
    mean = EMA(model, lambda t: t / (t + 1), key="mean")
    warm = EMA(model, lambda t: min(0.9999, (1 + t) / (10 + t)) if t else 0.0)
    kept = EMA(model, 1.0)
    by_hand = 0.0
    for step in range(5):
        with torch.no_grad():
            model.weight.fill_(float(step))
        for ema in (mean, warm, kept):
            ema.update()
        decay = min(0.9999, (1 + step) / (10 + step)) if step else 0.0
        by_hand = decay * by_hand + (1 - decay) * step
    values = {ema.key: float(*ema.by_parameter.values()) for ema in (mean, warm)}
    assert values == pytest.approx({"mean": 2.0, "average": by_hand})
    assert float(*kept.by_parameter.values()) == 0.0


def test_averages_of_half_precision_are_kept_in_single() -> None:
    """A thousandth of a step is lost in bfloat16."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    ema = EMA(model, 0.999)
    ema.update()
    with torch.no_grad():
        model.weight.fill_(1.5)
    for _ in range(100):
        ema.update()
    [average] = ema.by_parameter.values()
    assert average.dtype == torch.float32
    assert float(average) == pytest.approx(1.5 - 0.5 * 0.999**100, rel=rounding(torch.float32, 200))
    with ema.swapped():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == pytest.approx(float(average), rel=rounding(torch.bfloat16, 1))
    assert model.weight.item() == 1.5


# -- checkpoints --------------------------------------------------------------------------------------------------


def save(directory: str) -> None:
    model = sharded()
    optimizer, ema, mean = adamw(model), EMA(model, DECAY), EMA(model, lambda t: t / (t + 1), key="mean")
    with pytest.raises(CheckpointError, match=r"the key 'average' is used by two averages.*\n.*key="):
        save_checkpoint(Path(directory) / "two", model=model, optimizer=optimizer, objects=[ema, EMA(model)])
    with pytest.raises(CheckpointError, match="the key 'mean' is used by two averages"):
        save_checkpoint(Path(directory) / "two", model=model, optimizer=optimizer, objects=[ema, mean, mean])
    with pytest.raises(CheckpointError, match=r"no optimizer was passed\n.*ema.swapped"):
        save_checkpoint(Path(directory) / "none", model=model, objects=[ema])
    step_with(model, optimizer, lambda: (ema.update(), mean.update()), steps=STEPS - 1)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer, objects=[ema, mean])
    with AsyncSaver() as saver:
        saver.save(Path(directory) / "later", model=model, optimizer=optimizer, objects=[ema, mean])
        ema.update()  # it is copied at once, other than what only a step changes
    dcp.save({"ema": mean.state_dict()}, checkpoint_id=Path(directory) / "torch")


def resume(directory: str, name: str) -> dict[str, float]:
    """The last step, on another number of ranks, against a run in one piece."""
    expected, average = reference()
    torch.manual_seed(9)
    model = Model()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer, ema, mean = adamw(model), EMA(model, DECAY), EMA(model, lambda t: t / (t + 1), key="mean")
    load_checkpoint(Path(directory) / name, model=model, optimizer=optimizer, objects=[ema, mean])
    assert ema.updates == STEPS - 1
    assert all("average" not in state for state in optimizer.state.values())
    other = EMA(model, key="mean")
    state = {"ema": other.state_dict()}
    dcp.load(state, checkpoint_id=Path(directory) / "torch")
    other.load_state_dict(state["ema"])
    assert other.updates == mean.updates
    pairs = zip(mean.by_parameter.values(), other.by_parameter.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    step_with(model, optimizer, ema.update, first=STEPS - 1)
    found = compared(model, expected)
    with ema.swapped():
        return found | {f"{name} on average": value for name, value in compared(model, average).items()}


def check_without(directory: str) -> None:
    """Whoever does not ask for the average does not get it; who asks where there is none is told so."""
    model = sharded()
    optimizer = adamw(model)
    with pytest.raises(CheckpointError, match=r"got 1 object to load, but 2 were saved"):
        load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer, objects=[EMA(model)])
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    save_checkpoint(Path(directory) / "plain", model=model, optimizer=optimizer, objects=[nn.Linear(1, 1)])
    with pytest.raises(CheckpointError, match=r"'average' of 'blocks\.0\.0\.bias' was not saved"):
        load_checkpoint(Path(directory) / "plain", model=model, optimizer=optimizer, objects=[EMA(model)])


def test_saved_on_two_ranks_resumed_on_others(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    check(run_ranks(resume, 3, str(tmp_path), "here"), exact=True)
    check(run_ranks(resume, 1, str(tmp_path), "later"), exact=True)
    run_ranks(check_without, 1, str(tmp_path))


def check_export(directory: str) -> None:
    model = sharded()
    optimizer, ema = adamw(model), EMA(model, DECAY)
    step_with(model, optimizer, ema.update)
    with ema.swapped():
        export_hf(Path(directory) / "hf", model=model)
        whole = full_state_dict(model)
    average = reference()[1].state_dict()
    if init_mesh().rank == 0:
        assert all(torch.equal(whole[name], average[name]) for name in average)
        stored = load_file(Path(directory) / "hf" / "model.safetensors")
        assert stored.keys() == average.keys() - {"head.weight"}, "which is tied"
        assert all(torch.equal(stored[name], average[name]) for name in stored)


def test_export(tmp_path: Path) -> None:
    run_ranks(check_export, 2, str(tmp_path))


def accelerated(directory: str, loads: bool) -> dict[str, float]:
    """Made before the model is sharded, and kept by the Accelerator."""
    _, average = reference()
    model: Any = model_of()
    optimizer, ema = adamw(model), EMA(model, DECAY)
    accelerator = fullshard.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(ema)
    if not loads:
        step_with(model, optimizer, ema.update, steps=2)
        accelerator.save_state(directory)
        step_with(model, optimizer, ema.update, first=2, steps=3)
    accelerator.load_state(directory)
    step_with(model, optimizer, ema.update, first=2)
    with ema.swapped():
        return compared(model, average)


def test_accelerator(tmp_path: Path) -> None:
    check(run_ranks(accelerated, 2, str(tmp_path / "state"), False), exact=True)
    check(run_ranks(accelerated, 1, str(tmp_path / "state"), True), exact=True)


def of_two_models(directory: str, loads: bool) -> dict[str, float]:
    """A generator and a discriminator, each with an average; kept by one Accelerator."""
    _, average = reference()
    made: list[Any] = [model_of(), model_of()]
    with torch.no_grad():
        made[1].head.weight.mul_(2)
    other = copy.deepcopy(made[1])
    expected = swa_utils.AveragedModel(other, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    step_with(other, adamw(other), lambda: expected.update_parameters(other))
    accelerator = fullshard.Accelerator(cpu=True)
    steps = [adamw(model) for model in made]
    prepared = accelerator.prepare(*made, *steps)
    averages = [EMA(model, DECAY) for model in prepared[:2]]
    accelerator.register_for_checkpointing(*averages)
    pairs = list(zip(prepared[:2], prepared[2:], averages, strict=True))
    if not loads:
        for model, optimizer, ema in pairs:
            step_with(model, optimizer, ema.update, steps=2)
        accelerator.save_state(directory)
    accelerator.load_state(directory)
    found: dict[str, float] = {}
    for (model, optimizer, ema), wanted in zip(pairs, (average, expected.module), strict=True):
        step_with(model, optimizer, ema.update, first=2)
        with ema.swapped():
            found |= {f"{name} {len(found)}": value for name, value in compared(model, wanted).items()}
    assert len(found) == 2
    return found


def test_averages_of_two_models(tmp_path: Path) -> None:
    check(run_ranks(of_two_models, 2, str(tmp_path / "state"), False), exact=True)
    check(run_ranks(of_two_models, 1, str(tmp_path / "state"), True), exact=True)


# -- Trainer and train ----------------------------------------------------------------------------------------------


def trained(output: str, resumes: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, evaluations, the averages): evaluated with the averages, saved after two of four steps."""
    from fullshard.integrations.transformers import EMACallback

    callback = EMACallback(0.5)
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    made = trainers.trainer(
        trainers.build("tied"),
        trainers.arguments(output, **settings),
        callbacks=[callback],
        eval_dataset=trainers.samples(4),
    )
    made.train(resume_from_checkpoint=f"{output}/checkpoint-2" if resumes else None)
    assert callback.ema is not None
    assert callback.ema.updates == 4
    found = trainers.logged(made)
    with callback.ema.swapped():
        whole = full_state_dict(made.model)
        loss = made.model(**trainers.pad(trainers.samples(4))).loss.item()
    if not init_mesh().world_size > 1:
        assert found["evals"][-1] == pytest.approx(loss, rel=TOLERANCE)
    return found["losses"], found["evals"], {name: value.clone() for name, value in whole.items()}


def test_trainer(tmp_path: Path) -> None:
    """The averages go on where they were, at another number of ranks, and are what is evaluated."""
    losses, evals, averages = run_ranks(trained, 2, str(tmp_path), False)[0]
    [(resumed, evals_then, then)] = run_ranks(trained, 1, str(tmp_path), True)
    assert trainers.close(resumed, losses)  # those before are Trainer's own record
    assert trainers.close(evals_then, evals)
    for name, value in averages.items():
        torch.testing.assert_close(then[name], value, **CLOSE)


def best(output: str) -> None:
    """The model that was best when evaluated with its averages comes back with them."""
    from fullshard.integrations.transformers import EMACallback

    class Recorder(transformers.TrainerCallback):
        """What weights and averages were at each save."""

        def __init__(self) -> None:
            self.saved: dict[int, tuple[Any, Any]] = {}

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.saved[state.global_step] = held()

    def held() -> tuple[Any, Any]:
        assert callback.ema is not None
        averages = [average.clone() for average in callback.ema.by_parameter.values()]
        return averages, [p.local.clone() for p in made.model.parameters() if isinstance(p, ShardedParameter)]

    callback, recorder = EMACallback(0.5), Recorder()
    settings: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    made = trainers.trainer(
        trainers.build("tied"),
        trainers.arguments(output, **settings),
        callbacks=[callback, recorder],
        eval_dataset=trainers.samples(4),
    )
    made.train()
    step = int(made.state.best_model_checkpoint.rpartition("-")[2])
    assert step < 6
    assert callback.ema is not None
    assert callback.ema.updates == step
    for now, then in zip(held(), recorder.saved[step], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    last = recorder.saved[6][0]
    assert not all(torch.equal(a, b) for a, b in zip(held()[0], last, strict=True))


def test_the_best_model_comes_with_its_averages(tmp_path: Path) -> None:
    run_ranks(best, 2, str(tmp_path))


def test_transformers_own_trainer_would_not_save_it(tmp_path: Path) -> None:
    from fullshard.integrations.transformers import EMACallback

    made = trainers.trainer(
        trainers.build(), trainers.arguments(tmp_path, stock=True), stock=True, callbacks=[EMACallback(0.5)]
    )
    with pytest.raises(ConfigError, match=r"EMACallback requires fullshard's Trainer(.|\n)*import Trainer"):
        made.train()


def test_trls_average_of_whole_weights_is_refused() -> None:
    from trl import BEMACallback

    from fullshard.integrations.transformers.averaging import announce_averages

    holder: Any = types.SimpleNamespace(callback_handler=types.SimpleNamespace(callbacks=[BEMACallback()]))
    with pytest.raises(ConfigError, match=r"BEMACallback copies unsharded weights.*\n.*EMACallback from fullshard"):
        announce_averages(holder)


@pytest.mark.full
def test_train(inputs: Path, tmp_path: Path) -> None:
    """A run in one piece, and one that goes on from its middle, export the same averages."""
    words = ["train", "--model", inputs / "config.json", "--data", inputs / "data.txt", "--steps", 4, "--save-every",
             2, "--batch-size", 6, "--seq-len", 32, "--vocab-size", 320, "--device", "cpu", "--no-plot",
             "--ema-decay", 0.5]  # fmt: skip
    done = fullshard_command(*words, "--output-dir", tmp_path, "--nproc", 2)
    assert done.returncode == 0, done.stderr
    whole = load_file(tmp_path / "export" / "model.safetensors")
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")
    again = fullshard_command(*words, "--output-dir", tmp_path, "--nproc", 2)
    assert again.returncode == 0, again.stderr
    assert "after step 2" in again.stdout
    resumed = load_file(tmp_path / "export" / "model.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, **CLOSE)


# -- refused ------------------------------------------------------------------------------------------------------


def check_refused() -> None:
    model = sharded()
    ema = EMA(model)
    with ema.swapped():
        with pytest.raises(LifecycleError, match="where the averages replace the weights"):
            ema.update()
        with pytest.raises(LifecycleError, match=r"inside another ema\.swapped"), ema.swapped():
            pass
    before = parameters(model)
    with pytest.raises(LifecycleError, match=r"tokens.weight \(.* in all\) was changed inside"), ema.swapped():
        step_with(model, adamw(model), lambda: None, steps=1)
    assert not any(compare({"parameters": parameters(model)}, {"parameters": before}).values())
    with unsharded(model), pytest.raises(LifecycleError, match="is kept unsharded"), ema.swapped():
        pass
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    assert not any(compare({"parameters": parameters(model)}, {"parameters": before}).values())
    state = ema.state_dict()
    model.frozen.requires_grad_(True)
    with pytest.raises(
        LifecycleError, match=r"not the ones that the EMA was created with: frozen\.bias, frozen\.weight"
    ):
        ema.update()
    with pytest.raises(OptimizerError, match=r"frozen\.weight is missing"):
        EMA(model).load_state_dict(state)
    with pytest.raises(LifecycleError, match=r"support deepcopy(.|\n)*fullshard\.EMA\(model"):
        swa_utils.AveragedModel(model)
    with pytest.raises(LifecycleError, match=r"support deepcopy(.|\n)*fullshard\.EMA\(model"):
        copy.deepcopy(model)


def test_what_is_refused() -> None:
    run_ranks(check_refused, 2)
    for decay in (1.5, -0.1):
        with pytest.raises(ConfigError, match=f"decay is {decay}, expected a number from 0 to 1"):
            EMA(nn.Linear(1, 1), decay)
    with pytest.raises(ConfigError, match="decay is 2, expected a number from 0 to 1"):
        EMA(nn.Linear(1, 1), lambda t: 2).update()
    with pytest.raises(LifecycleError, match="Linear has no trainable parameter"):
        EMA(nn.Linear(1, 1).requires_grad_(False))
    with torch.device("meta"), pytest.raises(LifecycleError, match="weight is on the meta device"):
        EMA(nn.Linear(1, 1))


def check_own_lines() -> dict[str, float]:
    """What diffusers and torch_ema do with lists of parameters: copies, averages in place, weights put aside."""
    expected, average = reference()
    model = sharded()
    copies = [p.clone().detach() for p in model.parameters()]
    updates = 0

    def update() -> None:
        nonlocal updates
        with torch.no_grad():
            for own, p in zip(copies, model.parameters(), strict=True):
                own.sub_((1 - DECAY) * (own - p)) if updates else own.copy_(p)
        updates += 1

    step_with(model, adamw(model), update)
    stored = [p.detach().cpu().clone() for p in model.parameters()]
    for own, p in zip(copies, model.parameters(), strict=True):
        p.data.copy_(own.to(p.device).data)
    found = compared(model, average)
    for kept, p in zip(stored, model.parameters(), strict=True):
        p.data.copy_(kept.data)
    assert not any(compared(model, expected).values())
    return found


def test_averages_of_lists_of_parameters() -> None:
    check(run_ranks(check_own_lines, 2), exact=False)


class EMAModel:
    """As diffusers' is: copies of whole parameters, and an average that is saved by whoever is asked to."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        for own, p in zip(self.shadow_params, parameters, strict=True):
            own.sub_((1 - DECAY if self.steps else 1.0) * (own - p)) if p.requires_grad else own.copy_(p)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "shadow_params": self.shadow_params, "temp_stored_params": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.shadow_params = state["steps"], state["shadow_params"]


class _Pair(NamedTuple):
    one: Any
    other: Any


def check_diffusers(path: str) -> dict[str, float]:
    model, (_, average) = model_of(), reference()
    early = EMAModel(model.parameters())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(LifecycleError, match=r"and a plain tensor(.|\n)*fullshard\.EMA\(model"):
        early.step(model.parameters())
    ema = EMAModel(model.parameters())
    step_with(model, adamw(model), lambda: ema.step(model.parameters()))
    found: dict[str, Any] = {}  # as a module has it, and as torch has a tuple
    state = OrderedDict(first=torch.Size((3,)), own=_Pair(*ema.shadow_params[:2]))
    other: Any = types.SimpleNamespace(state_dict=lambda: state, load_state_dict=found.update)
    save_checkpoint(f"{path}-checkpoint", model=model, objects=[ema, other])
    whole = tuple(own.full_tensor() for own in ema.shadow_params[:2])
    ema = EMAModel([torch.zeros_like(own) for own in ema.shadow_params])
    load_checkpoint(f"{path}-checkpoint", model=model, objects=[ema, other])
    assert all(map(torch.equal, found["own"], whole)) and found["first"] == (3,)
    held: Any = list(model.parameters())
    for own, p in zip(ema.shadow_params, held, strict=True):
        p.data.copy_(distribute_tensor(own, p.device_mesh, p.placements))  # they were loaded whole
    return compared(model, average)


@pytest.mark.parametrize("world_size", [1, 2])
def test_diffusers_average_is_made_after_sharding(tmp_path: Path, world_size: int) -> None:
    found = run_ranks(check_diffusers, world_size, str(tmp_path / "average"))
    check(found, exact=False)


def check_a_shadow_that_is_sharded() -> dict[str, float]:
    """`AveragedModel` of a second model that is sharded as the first."""
    _, average = reference()
    model = sharded()
    shadow = swa_utils.AveragedModel(model_of(), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    inner: Any = shadow.module
    for block in inner.blocks:
        fully_shard(block)
    fully_shard(inner)
    step_with(model, adamw(model), lambda: shadow.update_parameters(model))
    return compared(inner, average)


@pytest.mark.full
def test_a_shadow_that_is_sharded() -> None:
    check(run_ranks(check_a_shadow_that_is_sharded, 2), exact=True)
