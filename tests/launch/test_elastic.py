"""Hosts come and go: the job goes on with those that are left, at the same batch, and grows again.

pytest tests/launch/test_elastic.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import fullshard
from fullshard.core.errors import ConfigError
from fullshard.core.journal import read_journal
from fullshard.launch.preemption import PREEMPTED
from fullshard.observe import StepMetrics, read_metrics
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.train import for_any_size, train
from tests.differential import TOLERANCE
from tests.launching import LAUNCH, free_port, launch, read, started, started_into, wait_until
from tests.namespaces import can_have_namespaces, namespaces

STEPS = 50
Host = subprocess.Popen[str]
SLOW = """
import os, time
from fullshard.cli.main import main
from fullshard.recipes.train import Run

step = Run.step
Run.step = lambda *arguments: time.sleep(float(os.environ.get("PAUSE", 0.3))) or step(*arguments)
main()
"""
"""`fullshard` with steps that leave time for hosts to come and go."""


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Data, and a tiny Llama without dropout, so that losses do not depend on how ranks draw random numbers."""
    (tmp_path / "data.txt").write_text("".join(f"line {i} is {i * i % 17} long\n" for i in range(1500)))
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=320, max_position_embeddings=64, **sizes)
    (tmp_path / "config.json").write_text(config.to_json_string())
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def settings(inputs: Path, output: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "model": str(inputs / "config.json"),
        "data": str(inputs / "data.txt"),
        "output_dir": str(output),
        "steps": STEPS,
        "batch_size": 8,
        "seq_len": 16,
        "lr": 3e-3,
        "save_every": 5,
        "log_every": 1,
        "vocab_size": 320,
        "export": False,
        "plot": False,
        "device": "cpu",
    }
    return values | changes


def command(port: int, *program: str, nnodes: str = "1:2", flags: Sequence[str] = ()) -> list[str]:
    """One launcher; each plays a host with one rank."""
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [*LAUNCH, "--nnodes", nnodes, "--nproc_per_node", "1", *address, "--cpu", *flags, *program]


def trainer(values: dict[str, Any]) -> list[str]:
    words = ["slow.py", "train"]
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return words


@contextmanager
def two_hosts(directory: Path, port: int, words: Sequence[str]) -> Iterator[tuple[Host, Host]]:
    """Two launchers, the first of which is where they meet; what it has said is in the error of what fails inside."""
    with started(*words, cwd=directory) as first:
        wait_until(lambda: is_open(port), 60, "the server")
        with started(*words, cwd=directory) as second:
            try:
                yield first, second
            except AssertionError as error:
                os.killpg(first.pid, signal.SIGKILL)
                error.add_note(first.communicate()[0])
                raise


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def steps_done(output: Path) -> int:
    return read(output / "metrics.jsonl").count("\n")


def starts(output: Path) -> list[int]:
    """Ranks of each attempt."""
    return [event["world_size"] for event in read_journal(output) if event["kind"] == "start"]


def check_same(output: Path, reference: list[StepMetrics], *, tolerance: float = TOLERANCE) -> None:
    """Compare the records with those of a run that nothing happened to: steps, losses, learning rates."""
    found = list(read_metrics(output / "metrics.jsonl"))
    assert [record.step for record in found] == [record.step for record in reference]
    assert [record.loss for record in found] == pytest.approx(
        [record.loss for record in reference], rel=tolerance, abs=0
    )
    assert [record.learning_rate for record in found] == [record.learning_rate for record in reference]


@pytest.mark.full
def test_a_host_is_killed_and_another_comes(inputs: Path) -> None:
    train(TrainArguments.of(settings(inputs, inputs / "alone")))
    output = inputs / "out"
    port = free_port()
    words = command(port, *trainer(settings(inputs, output)))
    with two_hosts(inputs, port, words) as (first, second):
        wait_until(lambda: steps_done(output) > 8, 120, "the first steps on two hosts")
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(lambda: len(starts(output)) == 2, 120, "going on alone")
        wait_until(lambda: steps_done(output) > 12, 60, "steps alone")
        with started(*words, cwd=inputs) as third:
            said = [process.communicate(timeout=240)[0] for process in (first, third)]
    assert (first.returncode, third.returncode) == (0, 0), said
    assert starts(output) == [2, 1, 2], said
    check_same(output, list(read_metrics(inputs / "alone" / "metrics.jsonl")))
    events = list(read_journal(output))
    restarts = [event["message"] for event in events if event["kind"] == "restart"]
    assert restarts == ["the set of hosts has changed"] * 2
    assert [event["kind"] for event in events if event["kind"] in ("shrink", "growth")] == ["shrink", "growth"]
    assert ["is gone: " in event["message"] for event in events if event["kind"] == "failure"] == [True]
    assert "continuing with the remaining hosts" in said[0] and "is gone: its launcher was killed" in said[0]
    # Nothing was lost when it grew: the checkpoint is of the step that all ranks had come to.
    assert "another host has joined; the processes save" in said[0]
    stopped, resumed = (re.findall(rf"{words} (\d+)", said[0]) for words in ("after step", ", after step"))
    assert stopped[-1] == resumed[-1]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not can_have_namespaces(), reason="network namespaces need root and the program `ip`")
@pytest.mark.parametrize("count", [2, 3])
def test_hosts_are_lost_and_come_back_again_and_again(inputs: Path, count: int) -> None:
    """Ten times on two and on three hosts, once two together: the losses of a run in which nothing happened."""
    changes = {"steps": 3000, "save_every": 20, "keep_checkpoints": 2}
    output, losses = inputs / "out", int(os.environ.get("LOSSES", 10))
    flags = ["--nnodes", f"1:{count}", "--nproc_per_node", "1", "--main_process_ip", "10.77.0.1", "--cpu"]
    words = [*LAUNCH, *flags, *trainer(settings(inputs, output, **changes))]
    with namespaces(count) as names, ExitStack() as processes, (inputs / "said").open("w") as said:

        def start(name: str) -> Host:
            return processes.enter_context(started_into(said, "ip", "netns", "exec", name, *words, cwd=inputs))

        def come_to(size: int, attempts: int) -> None:
            wait_until(
                lambda: starts(output)[attempts:][-1:] == [size], 200, f"{size} ranks; {read(inputs / 'said')[-4000:]}"
            )
            before = steps_done(output)
            wait_until(lambda: steps_done(output) >= before + 3, 100, "three steps")

        hosts = [start(name) for name in names]
        come_to(count, 0)
        lost, cycles = 0, 0
        while lost < losses:
            numbers = [1, 2] if count == 3 and lost == 4 else [1 + cycles % (count - 1)]
            attempts = len(starts(output))
            for number in numbers:
                os.killpg(hosts[number].pid, signal.SIGKILL)
            come_to(count - len(numbers), attempts)
            attempts = len(starts(output))
            for number in numbers:
                hosts[number] = start(names[number])
            come_to(count, attempts)
            lost, cycles = lost + len(numbers), cycles + 1
        for host in hosts:
            host.send_signal(signal.SIGTERM)
        assert [host.wait(100) for host in hosts] == [PREEMPTED] * count, read(inputs / "said")[-4000:]
    alone = [sys.executable, *trainer(settings(inputs, inputs / "alone", **changes))]
    with started_into(subprocess.DEVNULL, *alone, cwd=inputs, PAUSE="0") as reference_run:
        wait_until(lambda: steps_done(inputs / "alone") >= steps_done(output), 600, "as many steps alone")
        reference_run.send_signal(signal.SIGTERM)
        reference_run.wait(100)
    reference = list(read_metrics(inputs / "alone" / "metrics.jsonl"))
    check_same(output, reference[: steps_done(output)])
    assert len(starts(output)) >= 1 + 2 * cycles
    assert "Traceback" not in read(inputs / "said")
    worst = max(
        abs(a.loss / b.loss - 1) for a, b in zip(read_metrics(output / "metrics.jsonl"), reference, strict=False)
    )
    print(f"{count} hosts: {lost} lost and back, {steps_done(output)} steps, {worst:.1e} at most between losses")


@pytest.mark.full
def test_a_host_that_is_told_to_end_leaves_the_others_a_checkpoint(inputs: Path) -> None:
    exact = {"save_every": 0}
    train(TrainArguments.of(settings(inputs, inputs / "alone", **exact)))
    output = inputs / "out"
    port = free_port()
    words = command(port, *trainer(settings(inputs, output, **exact)))
    with two_hosts(inputs, port, words) as (first, second):
        wait_until(lambda: steps_done(output) > 8, 120, "the first steps on two hosts")
        second.send_signal(signal.SIGTERM)
        left = second.communicate(timeout=60)[0]
        assert second.returncode == PREEMPTED, left
        said = first.communicate(timeout=240)[0]
    assert first.returncode == 0, said
    assert starts(output) == [2, 1], said
    assert "resume: from" in said, "no step was made twice"
    check_same(output, list(read_metrics(inputs / "alone" / "metrics.jsonl")))


OWN = """
import json, os, sys, time
from pathlib import Path

import torch

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint, whole_checkpoints

directory, steps = Path(sys.argv[1]), 40
accelerator = fullshard.Accelerator(project_dir=directory)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
data = torch.utils.data.TensorDataset(torch.arange(1280.0).reshape(160, 8) / 1280, torch.arange(160))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
step = 0
for path in whole_checkpoints(directory / "checkpoints"):
    step = load_checkpoint(path, model=model, optimizer=optimizer.optimizer)["step"]
    break


def save():
    path = directory / "checkpoints" / f"step-{step:04d}"
    save_checkpoint(path, model=model, optimizer=optimizer.optimizer, extra={"step": step}, overwrite=True)


seen = []
for batch, numbers in fullshard.skip_first_batches(loader, step * accelerator.gradient_accumulation_steps):
    with accelerator.accumulate(model):
        accelerator.backward((model(batch) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    seen += numbers.tolist()
    if not accelerator.sync_gradients:
        continue
    step += 1
    with (directory / f"samples{accelerator.process_index}").open("a") as file:
        file.write(json.dumps([step, accelerator.num_processes, seen]) + "\\n")
    seen = []
    time.sleep(0.3)
    if fullshard.should_stop():
        save()
        break
    if step % 5 == 0:
        save()
else:
    norm = sum(parameter.full_tensor().double().square().sum().item() for parameter in model.parameters())
    print(f"trained {norm:.10f}", flush=True)
"""
"""A script with an `Accelerator`: 4 samples a step on two ranks, and as many on one."""


@pytest.mark.full
def test_a_script_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "fixed").mkdir()
    (tmp_path / "out").mkdir()
    done = launch("--num_processes", "2", "--cpu", "own.py", str(tmp_path / "fixed"), cwd=tmp_path)
    right = float(re.findall(r"trained (\S+)", done.stdout)[0])
    port = free_port()
    words = command(port, "own.py", str(tmp_path / "out"))
    with two_hosts(tmp_path, port, words) as (first, second):
        wait_until(lambda: read(tmp_path / "out" / "samples0").count("\n") > 7, 120, "the first steps")
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(lambda: ", 1, " in read(tmp_path / "out" / "samples0"), 120, "a step alone")
        with started(*words, cwd=tmp_path) as third:
            said = [process.communicate(timeout=240)[0] for process in (first, third)]
    assert (first.returncode, third.returncode) == (0, 0), said
    assert float(re.findall(r"trained (\S+)", said[0])[0]) == pytest.approx(right, rel=TOLERANCE)
    last: dict[int, dict[int, list[int]]] = {}
    sizes, every_size = {}, set()
    for rank in (0, 1):
        for line in read(tmp_path / "out" / f"samples{rank}").splitlines():
            step, size, samples = json.loads(line)
            every_size.add(size)
            if rank == 0:
                sizes[step] = size  # of the last time that it was made
            if rank < sizes[step]:
                last.setdefault(step, {})[rank] = samples
    dealt = {step: sorted(number for part in parts.values() for number in part) for step, parts in last.items()}
    assert dealt == {step: list(range(4 * step - 4, 4 * step)) for step in range(1, 41)}
    assert every_size == {1, 2}  # what was done alone may have been made again by two


def test_what_cannot_be_shared_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FULLSHARD_ELASTIC", "1:2")
    assert fullshard.Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 6
    monkeypatch.setenv("FULLSHARD_ELASTIC", "1:3")
    assert fullshard.Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 6
    with pytest.raises(ConfigError, match=r"= 1 on 3 ranks makes a batch of 3 micro-batches, which cannot"):
        fullshard.Accelerator()
    values = {"batch_size": 2, "output_dir": tmp_path / "out"}
    with pytest.raises(ConfigError, match="--batch-size 2 is too small for up to 3 ranks"):
        train(TrainArguments.of(values))
    assert for_any_size(TrainArguments.of({"batch_size": 8})).micro_batch_size == 3
    assert for_any_size(TrainArguments.of({"batch_size": 8, "micro_batch_size": 2})).micro_batch_size == 2
