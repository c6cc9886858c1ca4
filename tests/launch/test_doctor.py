"""`fullshard doctor`: the report, what it finds wrong in words, and the ranks that it starts.

Run: pytest tests/launch/test_doctor.py
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.comm import device
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.torch_dist import completed
from fullshard.config.hardware import DetectedDevice, Hardware
from fullshard.core.errors import ConfigError
from fullshard.core.sizes import GIB, MIB
from fullshard.launch import doctor, doctor_ranks
from fullshard.launch.doctor import Finding, Trial, judge
from fullshard.launch.report import make_report
from tests.distributed import run_ranks
from tests.launching import run_python

LAPTOP = Hardware(cpu_count=4, memory_nbytes=2**34)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", "from fullshard.cli.main import main; main()", "doctor", *arguments]
    return run_python(command, Path.cwd(), environment, 120)


def texts(findings: Iterable[Finding]) -> list[str]:
    return [finding.text for finding in findings]


# -- the report ---------------------------------------------------------------------------------------------------


def test_report_names_what_an_issue_needs_and_no_secret() -> None:
    done = run(NCCL_DEBUG="INFO", HF_TOKEN="hf_secret", AWS_SECRET_ACCESS_KEY="secret", FSDP_VERSION="2")
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("python", "processors", "memory", "fullshard", "torch", "/dev/shm", "open files", "gloo"):
        assert wanted in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["NCCL_DEBUG", "INFO"] in lines
    assert ["FSDP_VERSION", "2"] in lines
    assert ["torch", torch.__version__] in lines
    assert "secret" not in done.stdout
    assert "no problems found without --run" in done.stdout


def test_report_in_json() -> None:
    found = json.loads(run("--json").stdout)
    assert found["healthy"] is True
    assert found["trial"] is None
    assert found["report"]["packages"]["torch"] == torch.__version__
    assert found["report"]["variables"] == {"OMP_NUM_THREADS": "1"}


# -- what can be seen without a rank ------------------------------------------------------------------------------


def variables(**environ: str) -> list[Finding]:
    return [*doctor._variables(environ), *doctor._interfaces(environ)]


@pytest.mark.parametrize(
    ("environ", "words", "hint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK=0, WORLD_SIZE=4 is set, but no launcher is running", "unset"),
        (
            {"GLOO_SOCKET_IFNAME": "eth77"},
            "GLOO_SOCKET_IFNAME=eth77 contains eth77, which is not a network interface",
            "use one of lo",
        ),
        (
            {"NCCL_SOCKET_IFNAME": "=l"},
            "NCCL_SOCKET_IFNAME==l contains l, which is not a network interface",
            "unset NCCL_SOCKET_IFNAME",
        ),
        ({"FSDP_OFFLOAD_PARAM": "true"}, "unknown variable FSDP_OFFLOAD_PARAM", "FSDP_OFFLOAD_PARAMS"),
        ({"ACCELERATE_MIXED_PRECISION": "fp9"}, "$ACCELERATE_MIXED_PRECISION: setting 'mode': input should be", "fp"),
        ({"FULLSHARD_TIMEOUT": "soon"}, "FULLSHARD_TIMEOUT has the invalid value 'soon'", "use a number of seconds"),
    ],
)
def test_variables_that_break_a_run(environ: dict[str, str], words: str, hint: str) -> None:
    [finding] = variables(**environ)
    assert finding.is_wrong
    assert words in finding.text
    assert hint in finding.hint


def test_variables_that_are_fine() -> None:
    assert variables(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="^docker,veth") == []
    assert variables(NCCL_SOCKET_IFNAME="l") == []  # NCCL takes prefixes
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x"}
    assert variables(**launched) == []
    [stale] = variables(MASTER_ADDR="127.0.0.1")
    assert not stale.is_wrong
    assert "may belong to another job" in stale.text


def test_threads_that_take_processors_from_each_other() -> None:
    assert list(doctor._threads({}, 8, 4)) == []
    assert list(doctor._threads({"OMP_NUM_THREADS": "2"}, 2, 4)) == []
    [finding] = doctor._threads({"OMP_NUM_THREADS": "8"}, 2, 4)
    assert "gives 2 ranks 16 threads, but there are only 4 processors" in finding.text
    assert "set it to 2" in finding.hint
    [finding] = doctor._threads({"OMP_NUM_THREADS": "all"}, 2, 4)
    assert finding.is_wrong


def test_limits_of_a_container() -> None:
    assert list(doctor._limits(8 * 2**30, 4096)) == []
    assert list(doctor._limits(None, None)) == []
    shared, files = doctor._limits(64 * MIB, 256)
    assert "/dev/shm has 64.00 MiB" in shared.text
    assert "--shm-size" in shared.hint
    assert "a process may open only 256 files" in files.text


@pytest.mark.parametrize("address", ["203.0.113.9", "no-such-host.invalid"])
def test_host_name_that_leads_elsewhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    [finding] = doctor._host_name()
    assert f"the name of this host, {socket.gethostname()}, does not resolve to one of its addresses" in finding.text
    assert not finding.is_wrong


def test_torch_that_cannot_use_the_devices() -> None:
    hardware = Hardware(8, 2**34, (DetectedDevice("NVIDIA H200"),) * 2)
    report = make_report(hardware, {})
    report["torch"] |= {"CUDA available": "false", "built for": "processors only"}
    [finding] = doctor._torch(hardware, report, "auto")
    assert "the driver shows 2 GPUs, but torch (built for processors only) cannot use them" in finding.text
    report["packages"]["torch"] = "2.3.1+cpu"
    assert "torch 2.3.1+cpu is too old" in texts(doctor._torch(hardware, report, "auto"))
    failed = Hardware(8, 2**34, failure="nvidia-smi failed: driver mismatch")
    assert "nvidia-smi failed: driver mismatch" in texts(doctor._torch(failed, report, "auto"))
    assert not any("GPU" in text for text in texts(doctor._torch(LAPTOP, report, "cpu")))
    no_gpu = "device is cuda, but this host has no GPU that torch (built for processors only) can use"
    assert no_gpu in texts(doctor._torch(LAPTOP, report, "cuda"))


def test_stale_variables_make_the_exit_code_1() -> None:
    done = run(RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "WRONG: RANK=0, WORLD_SIZE=2 is set" in done.stdout
    assert "no problems found" not in done.stdout


def test_n_without_run_is_an_error() -> None:
    done = run("-n", "2")
    assert (done.returncode, "add --run" in done.stderr) == (2, True)


def test_what_torch_sees_where_there_is_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as devices, which are in the report."""
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    started: list[int] = []

    def try_ranks(count: int, *_: Any) -> Trial:
        started.append(count)
        return Trial(0, {}, {})

    monkeypatch.setattr(doctor, "try_ranks", try_ranks)
    said = [
        CliRunner().invoke(app, ["doctor", "--run", *more]).stdout for more in ([], ["--device", "cpu"], ["-n", "1"])
    ]
    assert started == [3, 2, 1]
    assert "NVIDIA H100, 80.00 GiB, compute capability 9.0" in said[0]

    def fail(_: int) -> None:
        raise RuntimeError("CUDA error: system not yet initialized\nFor debugging consider")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert "CUDA error: system not yet initialized" in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_rank_that_sigint_has_ended_is_not_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_ranks", lambda *_: Trial(128 + signal.SIGINT, {}, {}))
    found = CliRunner().invoke(app, ["doctor", "--run"])
    assert found.exit_code == 1 and "exit code 130; checks that were reached: none" in " ".join(found.stdout.split())


def test_more_ranks_than_this_host_can_start() -> None:
    with pytest.raises(ConfigError, match=r"1000000 processes are too many for a host with .* processors"):
        doctor.try_ranks(1_000_000, "cpu", 10.0)


# -- ranks --------------------------------------------------------------------------------------------------------


def test_two_healthy_ranks() -> None:
    done = run("--run", "-n", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    trial = json.loads(done.stdout)["trial"]
    assert trial["facts"]["world size"] == 2
    assert trial["checks"]["all-gather and reduce-scatter"] == "right"
    assert trial["checks"]["sharded steps against DDP"].startswith("right: 3 steps")
    assert trial["facts"]["collectives"] == "shared memory"
    assert trial["facts"]["because"] == "all ranks are on one host"


@pytest.mark.full
def test_one_rank_and_nothing_left_behind(tmp_path: Path) -> None:
    done = run("--run", "-n", "1", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial of 1 rank:" in done.stdout
    assert "right: 3 steps, losses and parameters within" in done.stdout
    assert list(tmp_path.glob("fullshard*")) == []


@pytest.mark.full
def test_a_broken_interface_is_named() -> None:
    done = run("--run", GLOO_SOCKET_IFNAME="doesnotexist")
    assert done.returncode == 1
    cause = "GLOO_SOCKET_IFNAME=doesnotexist contains doesnotexist, which is not a network interface of this host"
    said = " ".join(done.stdout.split())
    assert f"WRONG: {cause}" in said
    assert "checks that were reached: none; most likely: GLOO_SOCKET_IFNAME" in said
    assert "Unable to find address for: doesnotexist" in done.stderr


class _Swapped(GlooCollectives):
    """Delivers intervals in the wrong order."""

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Any:
        super().all_gather(full, tag=tag).wait()
        return completed(full.copy_(full.flip(0)))


def _swapped() -> str:
    group = dist.group.WORLD
    assert group is not None
    return doctor_ranks._worst(doctor_ranks._check_collectives(_Swapped(group), torch.device("cpu")))


def _other_weights() -> str:
    """The two models that are compared begin with different weights: what a wrong step looks like."""
    same, calls = doctor_ranks._model, []

    def model(device: torch.device) -> nn.Sequential:
        calls.append(device)
        built = same(device)
        if len(calls) == 1:
            nn.init.ones_(next(built.parameters()))
        return built

    doctor_ranks._model = model
    try:
        return doctor_ranks._worst(doctor_ranks._check_step(torch.device("cpu")))
    finally:
        doctor_ranks._model = same


def test_checks_notice_what_is_wrong() -> None:
    assert all("wrong: an all-gather returned different elements" in text for text in run_ranks(_swapped, 2))
    assert all("wrong: the losses are" in text and "(rank 0)" in text for text in run_ranks(_other_weights, 2))


def test_a_trial_is_judged_in_words() -> None:
    checks = {
        "all-gather and reduce-scatter": "right",
        "sharded steps against DDP": "wrong: the losses are [1], but [2] with DDP (rank 0)",
    }
    [wrong] = judge(Trial(0, checks, {"device": "cpu"}), [])
    assert wrong.is_wrong
    assert wrong.text.startswith("sharded steps against DDP: wrong: the losses")
    [died] = judge(Trial(137, {"all-gather and reduce-scatter": "right"}, {}), [])
    assert "exit code 137; checks that were reached: all-gather and reduce-scatter" in died.text
    assert list(judge(Trial(0, {"a": "right"}, {}), [])) == []
    [without_cause] = judge(Trial(2, {}, {}), [])
    assert "most likely" not in without_cause.text and "traceback above" in without_cause.hint
    [with_cause] = judge(Trial(2, {}, {}), [Finding("few files", "...", is_wrong=False), Finding("no GPU", "...")])
    assert with_cause.text.endswith("most likely: no GPU")
