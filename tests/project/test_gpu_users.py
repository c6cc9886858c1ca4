"""What somebody with one GPU does, from the first command to a compiled model.

make test-gpu ARGS=tests/project/test_gpu_users.py

In the full set the same is done on a CPU, so that on a GPU only what CUDA changes is new.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.features import ShardedParameter, shard_model
from fullshard.observe import read_metrics
from tests.commands import run_here
from tests.launching import environment, run_python
from tests.recipes.test_recipe_sft import losses as sft_losses
from tests.recipes.test_recipe_sft import place, small_run
from tests.recipes.test_recipe_train import inputs
from tests.scripts.user_loop import loss_of, made

__all__ = ["inputs", "place"]  # fixtures

pytestmark = pytest.mark.filterwarnings("default")  # compilers and kernels of others warn of much on a GPU

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
FULLSHARD = [sys.executable, "-c", "from fullshard.cli.main import main; main()"]

HALF = 0.03
"""How far losses may be apart whose bf16 or fp16 numbers are rounded elsewhere: some of bf16's places of 2**-8."""


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch finds no GPU: these tests are for machines that have one")
    return str(request.param)


def run(*words: str, cwd: Path, **variables: str) -> tuple[str, str]:
    """What Python says with these words, on one GPU at most, if all goes well."""
    places = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = run_python([sys.executable, *words], cwd, environment(**variables), 150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout, done.stderr


def launched(device: str, *words: str, cwd: Path) -> tuple[str, str]:
    """The same of a script in one process that the launcher has started; nothing says which device but for a CPU."""
    place = ["--cpu"] if device == "cpu" else []
    return run(*FULLSHARD[1:], "launch", "--num_processes", "1", *place, *words, cwd=cwd)


def said_by(output: str) -> dict[str, Any]:
    """The line of JSON that a script ends with."""
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def test_doctor_finds_the_device_and_that_it_computes(device: str, tmp_path: Path) -> None:
    asked = [] if device == "cuda" else ["--device", "cpu"]
    output, _ = run(*FULLSHARD[1:], "doctor", "--run", "-n", "1", "--json", *asked, cwd=tmp_path)
    found = json.loads(output)
    assert found["healthy"], found["findings"]
    assert found["trial"]["exit_code"] == 0 and found["trial"]["facts"]["device"].startswith(device)
    assert not any(outcome.startswith("wrong") for outcome in found["trial"]["checks"].values())
    if device == "cuda":
        assert torch.cuda.get_device_name(0) in found["report"]["accelerators"]["0"]
        assert found["report"]["torch"]["accelerator"].startswith("cuda, ")
        assert found["report"]["torch"]["NCCL"]


def test_the_planner_measures_the_device(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is two processes, which takes longer."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    done = run_here("plan", "--calibrate", str(tmp_path / "here.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "here.json").read_text())
    assert found["flops"] > 1e9 and found["memory_bandwidth"] > 1e8 and found["memory"] > 2**28
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        assert found["name"] == properties.name and found["memory"] == properties.total_memory
        assert 1e13 < found["flops"] < 5e15 and 1e11 < found["memory_bandwidth"] < 1e13
    words = ("plan", "--model", "7B", "--devices", f"1x{tmp_path / 'here.json'}", "--method", "qlora")
    assert found["name"] in run_here(*words).stdout


def plain_losses(device: str, steps: int) -> list[float]:
    """Of `user_loop` without fullshard: fp32 weights, of which a copy in bf16 computes."""
    main, copy = made().to(device), made().to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(main.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        for own, other in zip(copy.parameters(), main.parameters(), strict=True):
            own.data.copy_(other)
            own.grad = None
        loss = loss_of(copy, step, torch.device(device))
        loss.backward()
        for own, other in zip(copy.parameters(), main.parameters(), strict=True):
            other.grad = None if own.grad is None else own.grad.float()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_loop_of_ones_own_goes_from_device_to_host_and_back(device: str, tmp_path: Path) -> None:
    """Three times ten steps, each from the checkpoint of those before; losses as without fullshard, in one go."""
    found: list[float] = []
    for number, where in enumerate([device, "cpu", device]):
        before = [str(tmp_path / str(number - 1))] if number else []
        words = [str(SCRIPTS / "user_loop.py"), str(10 * number), "10", str(tmp_path / str(number)), *before]
        output, errors = launched(where, *words, cwd=tmp_path)
        said = said_by(output)
        assert said["device"] == ("cuda:0" if where == "cuda" else "cpu")
        if where == "cuda":
            assert "cpu:gloo,cuda:nccl" in said["backends"] and "cuda (nccl)" in errors
        found += said["losses"]
    assert found == pytest.approx(plain_losses(device, 30), rel=HALF)
    assert found[:10] == pytest.approx(plain_losses(device, 10), rel=2**-8)  # no other device has been in between
    assert found[-1] < 0.7 * found[0]


@pytest.mark.gpu
def test_more_processes_than_gpus_are_refused(inputs: Path, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    assert count, "torch finds no GPU: this test is for machines that have one"
    words = [*FULLSHARD, "launch", "--num_processes", str(count + 1), str(SCRIPTS / "user_loop.py")]
    done = run_python(words, tmp_path, environment(), 60)
    assert done.returncode == 2, done.stderr
    assert f"{count + 1} processes per host need as many devices, but this host has {count} GPU" in done.stderr, (
        done.stderr
    )
    assert f"hint: use {count}, or --cpu" in done.stderr
    data = ["--model", str(inputs / "config.json"), "--data", str(inputs / "data.txt"), "--output-dir", str(tmp_path)]
    done = run_python([*FULLSHARD, "train", "--nproc", str(count + 1), *data], tmp_path, environment(), 60)
    assert done.returncode != 0
    assert f"local rank {count} has no CUDA device: this host has {count}" in done.stderr, done.stderr


def train(device: str, inputs: Path, output: Path, *more: str) -> str:
    """`fullshard train` for a few steps in bf16."""
    settings = {
        "model": inputs / "config.json",
        "data": inputs / "data.txt",
        "output-dir": output,
        "batch-size": 8,
        "micro-batch-size": 4,
        "seq-len": 32,
        "lr": 0.01,
        "vocab-size": 320,
        "precision": "bf16",
        "nproc": 1,
    }
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    place = ["--device", "cpu"] if device == "cpu" else []
    return run(*FULLSHARD[1:], "train", *options, *place, *more, cwd=output)[0]


def test_a_training_run_says_what_it_does_and_leaves_it(device: str, inputs: Path, tmp_path: Path) -> None:
    """Its lines, its records, its profile with the device's kernels, its report; and it goes on."""
    watched = ["--profile", "--save-every", "6", "--log-every", "1"]
    said = train(device, inputs, tmp_path, "--steps", "12", *watched)
    assert "after step 12" in train(device, inputs, tmp_path, "--steps", "16", "--save-every", "6")
    metrics = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [record.step for record in metrics] == list(range(1, 17))
    assert metrics[15].loss < 0.8 * metrics[0].loss
    for record in metrics:
        assert record.tokens_per_second > 0 and record.memory_nbytes[0] > 0
    assert "tokens/s" in said and "plan: the run needs" in said and ("MFU" in said) == (device == "cuda")
    trace = json.loads((tmp_path / "profile" / "profile_0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in trace) == (device == "cuda")
    report = (tmp_path / "report.html").read_text()
    assert all(word in report for word in ("tokens", "memory", "step"))
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_training_run_that_compiles_and_recomputes(device: str, inputs: Path, tmp_path: Path) -> None:
    """The losses of a run that does neither, as far as bf16's rounding goes."""
    found = []
    for name, more in (("plain", []), ("compiled", ["--compile", "--activation-checkpointing", "--loss-chunk", "64"])):
        (tmp_path / name).mkdir()
        own = ["--steps", "4", "--held-out", "0", "--no-export", "--no-plot", *more]
        train(device, inputs, tmp_path / name, *own)
        found.append([record.loss for record in read_metrics(tmp_path / name / "metrics.jsonl")])
    assert found[1] == pytest.approx(found[0], rel=HALF)


@pytest.mark.parametrize("base", ["whole", "quantized"])
def test_fine_tuning_with_adapters(device: str, base: str, place: Path, tmp_path: Path) -> None:
    """LoRA, with the merged model; and QLoRA: losses fall, and what is saved is what PEFT reads."""
    if base == "quantized":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
        own = ["--use_4bit_quantization", "True", "--use_nested_quant", "True", "--bnb_4bit_compute_dtype", "bfloat16"]
    else:
        own = []
    words = small_run(
        place, tmp_path / "out", "--max_steps", "8", "--save_steps", "8", "--logging_steps", "1",
        "--learning_rate", "0.02", "--lr_scheduler_type", "constant", *own,
    )  # fmt: skip
    words[words.index("--bf16") + 1] = "True"
    words[words.index("--per_device_train_batch_size") + 1] = "8"
    launched(device, "-m", "fullshard.recipes.sft", *words, cwd=tmp_path)
    found = sft_losses(tmp_path / "out")
    assert len(found) == 8 and sum(found[-2:]) < 0.98 * sum(found[:2])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names


LOGGING = ["--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True", "--learning_rate", "1e-2"]


def trainer_losses(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("LOSS")]


def trainer_words(device: str, output: Path, *more: str) -> list[str]:
    sizes = ["--per_device_train_batch_size", "4", "--max_steps", "6"]
    exact = ["--tf32", "False"] if device == "cuda" else []  # which Transformers refuses on a CPU
    return [str(SCRIPTS / "trainer_script.py"), "--output_dir", str(output), *LOGGING, *sizes, *exact, *more]


def test_a_trainer_script_has_the_losses_it_has_without_sharding(device: str, tmp_path: Path) -> None:
    """In fp32, where the kernels are the same and only sums may be added in another order."""
    words = trainer_words(device, tmp_path / "out", "--generate", "5", "--save_strategy", "no")
    variables = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    plain, _ = run(*words, cwd=tmp_path, **variables)
    sharded, _ = launched(device, "--fsdp", "full_shard auto_wrap", *words, cwd=tmp_path)
    assert trainer_losses(sharded) == pytest.approx(trainer_losses(plain), rel=1e-3)
    assert len(trainer_losses(plain)) == 6
    for output in (plain, sharded):
        assert f"DEVICE {device}" in output
        [tokens] = [line.split()[1:] for line in output.splitlines() if line.startswith("TOKENS")]
        assert 1 <= len(tokens) <= 5
    assert "PARAMETERS True" in sharded


def test_a_trainer_script_in_bf16_with_checkpointing_goes_on(device: str, tmp_path: Path) -> None:
    more = ["--bf16", "True", "--gradient_checkpointing", "True", "--save_steps", "3", "--generate", "5"]
    words = trainer_words(device, tmp_path / "out", *more)
    fsdp = ["--fsdp", "full_shard auto_wrap"]
    whole, _ = launched(device, *fsdp, *words, cwd=tmp_path)
    resumed, _ = launched(
        device, *fsdp, *words, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-3"), cwd=tmp_path
    )
    losses = trainer_losses(whole)
    assert len(losses) == 6 and all(0 < loss < 6 for loss in losses)
    assert trainer_losses(resumed) == pytest.approx(losses[3:], rel=2**-8)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def accelerated(device: str, library: str, mode: str, directory: Path, scale: float = 65536.0) -> dict[str, Any]:
    words = [str(SCRIPTS / "user_accelerate.py"), library, mode, str(directory / library), str(scale)]
    if library == "fullshard":
        return said_by(launched(device, *words, cwd=directory)[0])
    return said_by(run(*words, cwd=directory, **({"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}))[0])


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_an_accelerate_script_has_accelerates_losses(device: str, mode: str, tmp_path: Path) -> None:
    ours, theirs = (accelerated(device, library, mode, tmp_path) for library in ("fullshard", "accelerate"))
    assert ours["device"].startswith(device)
    assert ours["skipped"] == theirs["skipped"] == 0 and (ours["scale"] is not None) == (mode == "fp16")
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=HALF)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=0.15)
    assert ours["again"] == pytest.approx(ours["losses"][12:], rel=2**-8)  # after load_state
    assert sum(ours["losses"][-4:]) < 0.95 * sum(ours["losses"][:4])


def test_a_loss_scale_that_is_too_large_comes_down(device: str, tmp_path: Path) -> None:
    found = accelerated(device, "fullshard", "fp16", tmp_path, scale=2.0**26)
    assert 3 <= found["skipped"] <= 12 and found["scale"] < 2.0**24
    assert all(0 < loss < 2 for loss in found["losses"])


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_quantized_layers_train_as_unsharded_ones(device: str, kind: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    from tests.features.quantized_weights.test_quantized import FourBits, check_training, eight_bits

    check_training(FourBits() if kind == "4 bits" else eight_bits, torch.float32, device=device)


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, scales not quantized", "8 bits"])
def test_layers_that_the_cpu_has_quantized_compute_on_the_device(device: str, kind: str) -> None:
    """They compute what layers do that were moved there without sharding. A batch of one row has its own kernel."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    from tests.features.quantized_weights.test_quantized import FourBits, batch, build, eight_bits

    make = eight_bits if kind == "8 bits" else FourBits(nested=kind == "4 bits", compute=torch.bfloat16)
    expected = build(make)
    with torch.no_grad():
        expected(batch(0, 0))  # 8-bit layers hand their codes over in the first forward; `to` moves them after that
    for module in expected.modules():
        module.to(device)  # `expected.to` alone would leave the scales of 8-bit layers on the CPU
    model = build(make)
    shard_model(model, unit_modules=list(model), device=torch.device(device))
    for rows in (1, 6):
        x = batch(0, 0, device=device)[:rows]
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected(x))
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        model(ours).sum().backward()
        expected(theirs).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_optimizers_in_8_bits_step_as_without_sharding(device: str, name: str) -> None:
    """One rank has all of each parameter, so that blocks are cut where they are without sharding."""
    bnb: Any = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")

    def losses(is_sharded: bool) -> list[float]:
        model: nn.Module = made().to(device)
        if is_sharded:
            shard_model(model, unit_modules=list(model.layers), device=torch.device(device))  # type: ignore[arg-type]
        optimizer = getattr(bnb.optim, name)(model.parameters(), lr=1e-3)
        found = []
        for step in range(6):
            loss = loss_of(model, step, torch.device(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert any(value.dtype is torch.uint8 for state in optimizer.state.values() for value in state.values()
                   if isinstance(value, torch.Tensor))  # fmt: skip
        return found

    assert losses(True) == pytest.approx(expected := losses(False), rel=1e-3)
    assert expected[-1] < expected[0]


def compiled_losses(device: str, how: str, mode: str | None) -> list[float]:
    """Of six steps in fp32; `how`: what is compiled."""
    torch._dynamo.reset()
    model = made().to(device)
    if how == "layers":
        for layer in model.layers:
            layer.compile(mode=mode)
    shard_model(model, unit_modules=list(model.layers), device=torch.device(device))
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    called: Any = torch.compile(model, mode=mode) if how == "model" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(called, step, torch.device(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("how", ["layers", "model"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_have_the_losses_they_have_without(device: str, how: str, mode: str) -> None:
    """In fp32; a fused kernel may add in another order, of which AdamW's first steps make at most as much again."""
    expected = compiled_losses(device, "nothing", None)
    assert compiled_losses(device, how, mode) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
