"""`mixed_precision="fp8"`: Accelerate's own conversion to torchao's float8 layers, before the model is sharded."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import AORecipeKwargs, convert_model_to_fp8_ao
from torch import nn

import fullshard
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError, MissingExtraError
from tests.differential import EPS, TOLERANCE
from tests.distributed import preload, run_ranks
from tests.launching import LAUNCH, environment
from tests.traps import batch, rank_and_size

pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
preload("torchao.float8")


def network() -> nn.Sequential:
    """Four linear layers, of which torchao replaces the two in the middle."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48, bias=False)]
    return nn.Sequential(*layers, nn.Linear(48, 4))


def emulated(**options: Any) -> Any:
    """A recipe that computes in float32 with values rounded to 8 bits, as every processor can."""
    config: Any = importlib.import_module("torchao.float8").Float8LinearConfig
    return AORecipeKwargs(config=config(enable_fsdp_float8_all_gather=True, emulate=True, **options))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=EPS)


def prepared(recipe: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any]:
    """The optimizer is older than the layers of torchao, as in most scripts."""
    model = network().to(dtype)
    handlers = [] if recipe is None else [recipe]
    accelerator = fullshard.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **options)
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert [type(layer).__name__ for layer in model][::2] == ["Linear", "Float8Linear", "Float8Linear"]
    return accelerator, model, optimizer


def trained(model: Any, optimizer: Any, ranks: list[int], steps: range = range(3)) -> list[list[float]]:
    """The losses of the given ranks' batches in each step."""
    found = []
    for number in steps:
        losses = []
        for rank in ranks:
            loss = model(batch(number, rank, 8, 32).float()).float().square().mean()
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


def check_beside_torch() -> None:
    """torchao's layers, in torch's `fully_shard`, in bfloat16 under autocast, as Accelerate has them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    theirs: Any = network()
    recipe = emulated()
    convert_model_to_fp8_ao(theirs, config=recipe.config)
    for module in (*theirs.children(), theirs):
        if module is theirs or isinstance(module, nn.Linear):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    theirs.forward = torch.autocast("cpu", torch.bfloat16)(theirs.forward)
    expected = trained(theirs, adamw(theirs), [0])
    _, model, optimizer = prepared(recipe)
    assert trained(model, optimizer, [0]) == expected
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        whole = other.full_tensor()
        assert torch.equal(mine.full_tensor(), getattr(whole, "_tensor", whole))


def test_losses_and_weights_are_those_of_torchao_and_torchs_fully_shard() -> None:
    run_ranks(check_beside_torch, 1)


def check_ranks(directory: Path, recipe_is_emulated: bool, reference: list[list[float]]) -> None:
    rank, size = rank_and_size()
    recipe = emulated() if recipe_is_emulated else None
    accelerator, model, optimizer = prepared(recipe)
    assert model[2].weight.bucket.full_nbytes == 64 * 64, "a byte for each element"
    losses = [step[0] for step in trained(model, optimizer, [rank])]
    if size > 1:
        assert losses == pytest.approx([step[rank] for step in reference], rel=TOLERANCE)
    accelerator.save_state(directory)
    expected = trained(model, optimizer, [rank], range(3, 5))
    accelerator.free_memory()
    again, model, optimizer = prepared(recipe)
    again.load_state(directory)
    assert trained(model, optimizer, [rank], range(3, 5)) == expected


def reference() -> list[list[float]]:
    """Both ranks' batches, one after the other, in one process."""
    _, model, optimizer = prepared()
    return trained(model, optimizer, [0, 1])


def test_two_ranks_train_as_one_and_resume(tmp_path: Path) -> None:
    [alone] = run_ranks(reference, 1)
    run_ranks(check_ranks, 2, tmp_path, False, alone)


def check_modes() -> list[Any]:
    found: list[Any] = []
    for dtype in (torch.bfloat16, torch.float32):
        model = network().to(torch.bfloat16).to(dtype)
        accelerator = fullshard.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated()])
        model, optimizer = accelerator.prepare(model, adamw(model))
        found.append(trained(model, optimizer, [0]))
    return found


def test_weights_in_half_precision_get_main_weights_in_float32() -> None:
    [(half, whole)] = run_ranks(check_modes, 1)
    assert half == whole


def check_facts() -> None:
    accelerator, model, _ = prepared()
    facts = accelerator.fp8_enabled, accelerator.has_fp8_handler, accelerator.fp8_backend, accelerator.native_amp
    assert facts == (True, True, "AO", True)
    assert accelerator.state.mixed_precision == "fp8"
    config = accelerator.ao_recipe_handler.config
    assert (config.pad_inner_dim, config.enable_fsdp_float8_all_gather) == (True, True)
    with accelerator.autocast():
        assert model[0](torch.ones(1, 32)).dtype is torch.bfloat16
    settings = {"mode": "fp8", "fp8_all_gather": False, "fp8_pad_inner_dim": False}
    run = RunConfig.of({"launch": {"device": "cpu"}, "precision": settings})
    accelerator = fullshard.Accelerator(cpu=True, fsdp_plugin=run)
    config = accelerator.ao_recipe_handler.config
    assert (config.pad_inner_dim, config.enable_fsdp_float8_all_gather) == (False, False)
    plain = accelerator.prepare(network())
    assert type(plain[2].weight.bucket).__name__ == "Bucket"


def test_settings_make_accelerates_recipe() -> None:
    run_ranks(check_facts, 1)


def check_without_effect() -> None:
    accelerator = fullshard.Accelerator(cpu=True, mixed_precision="fp8")
    said: list[str] = []
    accelerator._say = said.append  # type: ignore[method-assign, assignment]
    accelerator.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)))
    assert any("fp8 has no effect, because it selects no linear layer" in line for line in said)
    late = fullshard.fully_shard(network())
    with pytest.raises(ConfigError, match="the FSDPSequential is already sharded") as caught:
        accelerator.prepare(late)
    assert caught.value.hint is not None
    assert "convert_model_to_fp8_ao" in caught.value.hint


def test_what_cannot_be_converted_is_said() -> None:
    run_ranks(check_without_effect, 1)


def test_other_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERecipeKwargs", "MSAMPRecipeKwargs"):  # Accelerate makes them only beside their libraries
        handlers = [type(name, (), {})()]
        with pytest.raises(ConfigError, match=f"the kwargs handler {name} is not supported") as caught:
            fullshard.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
        assert "use torchao" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingExtraError, match=r"mixed_precision = fp8 needs the package 'torchao'") as missing:
        fullshard.Accelerator(cpu=True, mixed_precision="fp8")
    assert missing.value.hint == "pip install 'fullshard[quant]'"


SCRIPT = """
import os
from fullshard import Accelerator
from tests.api.test_float8 import adamw, network, trained

accelerator = Accelerator()
model = network()
model, optimizer = accelerator.prepare(model, adamw(model))
assert model[2].weight.bucket.full_nbytes == 64 * 64
losses = trained(model, optimizer, [accelerator.process_index])
line = " ".join(map(str, ["LOSSES", accelerator.process_index, *(step[0] for step in losses)]))
os.write(1, f"{line}\\n".encode())  # in one piece: two ranks write
"""
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_processes: 2
mixed_precision: fp8
fp8_config:
  backend: AO
  enable_fsdp_float8_all_gather: true
  pad_inner_dim: true
fsdp_config:
  fsdp_version: 2
"""
FLAGS = ["--use_cpu", "--num_processes", "2", "--mixed_precision", "fp8", "--fp8_backend", "ao"]
EXPORTED = {
    **{"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"},
    **{"ACCELERATE_FP8_MARGIN": "0", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "True"},
}


@pytest.mark.full
@pytest.mark.parametrize("way", ["file", "flags", "variables"])
def test_launched(tmp_path: Path, way: str) -> None:
    [alone] = run_ranks(reference, 1)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(FILE)
    options = {"file": ["--config_file", "accelerate.yaml"], "flags": FLAGS, "variables": ["--num_processes", "2"]}[way]
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), **(EXPORTED if way == "variables" else {})}
    command = [*LAUNCH, *options, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("LOSSES ")[1].split() for line in done.stdout.splitlines() if "LOSSES" in line]
    found = {int(rank): [float(value) for value in values] for rank, *values in lines}
    for rank in range(2):
        assert found[rank] == pytest.approx([step[rank] for step in alone], rel=TOLERANCE)


def through_trainer(output: str, stock: bool) -> dict[str, Any]:
    trainers = importlib.import_module("tests.trainers")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    if stock:
        os.environ["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
    made = trainers.trainer(
        trainers.build(),
        trainers.arguments(output, stock=stock, save_strategy="no" if stock else "steps", save_steps=2),
        stock=stock,
    )
    made.train()
    found: dict[str, Any] = trainers.logged(made)
    kinds = {type(module).__name__ for module in made.model.modules()}
    assert "Float8Linear" in kinds
    if not stock:
        again = trainers.trainer(trainers.build(), trainers.arguments(output))
        again.train(resume_from_checkpoint=f"{output}/checkpoint-2")
        assert trainers.logged(again)["losses"][-2:] == found["losses"][-2:]
    return found


@pytest.mark.full
def test_trainer_beside_accelerates_own(tmp_path: Path) -> None:
    [stock] = run_ranks(through_trainer, 1, str(tmp_path / "stock"), True)
    for size in (1, 2):
        found = run_ranks(through_trainer, size, str(tmp_path / str(size)), False)
        for name, tolerance in (("losses", 1e-3), ("norms", 2e-2)):  # other weights are rounded, and of half a batch
            assert found[0][name] == pytest.approx(stock[name], rel=tolerance)


class Experts(nn.Module):
    """A layer of four experts, each with an equal part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 32) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(32, 129, 32, dtype=torch.int32)
        found: torch.Tensor = torch._grouped_mm(x.bfloat16(), self.weight.bfloat16().transpose(-2, -1), offs=ends)
        return found


def microscaled(layer: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """A model with one layer of torchao's MXFP8, emulated, and the units of it."""
    config = importlib.import_module("torchao.prototype.moe_training.config")
    quantize: Any = importlib.import_module("torchao.quantization").quantize_
    emulated = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.Linear(32, 32))
    quantize(model, emulated, filter_fn=lambda module, name: module is layer)
    assert type(layer.weight.data).__name__ == "MXFP8TrainingWeightWrapperTensor"
    return model, [layer, model]


def check_microscaled(kind: str) -> None:
    from torch.distributed import fsdp

    found = []
    for engine in (fsdp, fullshard):
        torch.manual_seed(0)
        model, units = microscaled(Experts() if kind == "experts" else nn.Linear(32, 32, bias=False))
        for unit in units:
            engine.fully_shard(unit, mp_policy=engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = []
        for number in range(3):
            loss = model(batch(number, rank_and_size()[0], 128, 32).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_microscaled_layers_train_as_under_torchs_fully_shard(kind: str) -> None:
    run_ranks(check_microscaled, 2, kind)
