"""The planner's clock: what its constants count, and what is particular to a CPU.

pytest tests/plan/test_plan_time.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.api import calibration
from fullshard.api.calibration import calibrate
from fullshard.api.virtual.costs import is_view
from fullshard.core.errors import ConfigError
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.hardware import DEVICES, Device, find_device, parse_cluster, write_calibration
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.optimizers import OPTIMIZERS
from fullshard.plan.time import steps
from fullshard.plan.work import LAYER_KERNELS, LAYER_VIEWS

MEASURED = dataclasses.replace(
    DEVICES["CPU"],
    efficiency=1.0,
    link_efficiency=1.0,
)
"""A calibrated CPU, without the machine's part in it."""


class Counting(TorchDispatchMode):
    """Counts ATen operations, those without a kernel apart, and the elements that elementwise ones read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.views = self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if is_view(function):
            self.views += 1
        else:
            self.kernels += 1
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor) and t.numel() > 1]
        self.elements += sum(t.numel() for t in tensors)
        return out


def test_operations_of_a_layer() -> None:
    """Counted in Transformers' Llama; within a tenth, because versions differ by a few."""

    def count(layers: int) -> tuple[int, ...]:
        config = AutoConfig.for_model(
            "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, vocab_size=9
        )
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        tokens = torch.zeros(1, 8, dtype=torch.long)
        with Counting() as forward:
            loss = model(input_ids=tokens, labels=tokens).loss
        with Counting() as backward:
            loss.backward()
        return forward.kernels, backward.kernels, forward.views, backward.views

    one, three = count(1), count(3)
    for planned, few, many in zip((*LAYER_KERNELS, *LAYER_VIEWS), one, three, strict=True):
        assert planned == pytest.approx((many - few) / 2, rel=0.1)


def test_an_all_reduce_of_many_ranks_goes_up_and_down_a_tree() -> None:
    """So that a message of a few bytes among 1,024 ranks takes microseconds, where a ring takes 6 milliseconds."""
    assert [steps(ranks, times=2) for ranks in (2, 3, 8, 1024)] == [2, 4, 6, 20]
    assert [steps(ranks, times=1) for ranks in (2, 3, 8, 1024)] == [1, 2, 7, 1023]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd-momentum"])
def test_optimizers_read_and_write_what_is_said(kind: str) -> None:
    """Every operation of torch's loop takes its tensors from memory and puts its result there."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = {
        "adamw": lambda: torch.optim.AdamW([parameter], foreach=False),
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1, foreach=False),
        "sgd-momentum": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=False),
    }[kind]()
    for _ in range(2):
        parameter.grad = torch.ones(1000)
        with Counting() as counting:
            optimizer.step()
    assert 4 * counting.elements / 1000 == OPTIMIZERS[kind].step_nbytes("float32")


def plan(device: Device, count: int, **job: Any) -> Plan:
    from fullshard.plan.hardware import Cluster

    shape, _ = load_model("GPT-2")
    return evaluate(shape, Job.of({"precision": "fp32", **job}), Cluster(device, count, 1))


def test_nothing_is_hidden_on_a_cpu() -> None:
    """The processor that computes also copies; on an accelerator most of it is beside computing."""
    cpu = plan(MEASURED, 2, seq_len=512).time
    assert cpu.exposed == pytest.approx(cpu.communication)
    assert cpu.communication > 0
    gpu = plan(DEVICES["A100-80"], 2, seq_len=2048, micro_batch=8).time
    assert gpu.exposed < 0.5 * gpu.communication


def test_what_a_calibration_measures_costs_time() -> None:
    """Each figure of its own."""

    def seconds(**changes: Any) -> float:
        return plan(dataclasses.replace(MEASURED, **changes), 2, seq_len=128).time.total

    for name in ("flops_fp32", "memory_bandwidth", "link"):
        assert seconds(**{name: getattr(MEASURED, name) / 2}) > seconds(), name


def test_offload_moves_nothing_on_a_cpu() -> None:
    assert plan(MEASURED, 2, offload=True).time.total == plan(MEASURED, 2).time.total


def test_a_calibration_with_other_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_calibration(MEASURED, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "replicate_link": 1e9}))
    with pytest.raises(ConfigError, match=r"is not a calibration file: .*replicate_link.*\nhint: create one"):
        find_device(str(path))


def test_a_calibration_that_cannot_be_written_is_said_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that was asked for it; what measures has said nothing until then."""

    def measure(_: str, arguments: list[str], **__: object) -> int:
        write_calibration(MEASURED, Path(arguments[0]))
        return 0

    monkeypatch.setattr(calibration, "launch_local", measure)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        calibrate(Path("/dev/full"))


@pytest.mark.full
def test_this_machine_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "this.json"
    calibrate(path)
    device = parse_cluster(f"2x{path}").device
    assert device.flops_fp32 > 1e9 < device.memory_bandwidth and device.link > 1e7
    assert plan(device, 2, micro_batch=4).time.total > plan(device, 2).time.total > 0
