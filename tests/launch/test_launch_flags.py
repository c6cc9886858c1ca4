"""The command line of `fullshard launch`: which flags it takes, what they set, and what it says about the rest.

Run: pytest tests/launch/test_launch_flags.py. Nothing is started here.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.api import Accelerator
from fullshard.api.state import ProcessState
from fullshard.cli.launch import help_text
from fullshard.comm import device
from fullshard.config.dialect import Status
from fullshard.config.flags import FLAGS, OPTIONS, CommandLine, parse
from fullshard.config.handover import hand_over
from fullshard.config.hardware import Hardware
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.schema import GROUPS, RunConfig
from fullshard.core.errors import ConfigError
from fullshard.launch.logs import RankLogs
from fullshard.launch.plan import make_plan, shared_settings
from fullshard.launch.report import make_report
from tests.commands import run_here
from tests.launching import environment, launch


def resolved(*argv: str) -> Resolved:
    return resolve(parse([*argv, "train.py"]).readings())


def test_a_source_tree_that_is_not_installed_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name == "fullshard":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)
    assert shared_settings(RunConfig())["version of fullshard"] == fullshard.__version__
    assert make_report(Hardware(1, None), {})["packages"]["fullshard"] == fullshard.__version__


def test_the_command_line_is_cut_at_the_script() -> None:
    line = parse(["--num-processes=2", "-q", "--debug", "train.py", "--num_processes", "9", "-m"])
    assert (line.kind, line.target, line.arguments) == ("script", "train.py", ["--num_processes", "9", "-m"])
    assert line.option("quiet") is True
    line = parse(["-n", "2", "train.py", "-n", "9"])
    assert (line.target, line.arguments) == ("train.py", ["-n", "9"])
    line = parse(["-m", "pack.age", "--x"])
    assert (line.kind, line.target, line.arguments) == ("module", "pack.age", ["--x"])
    line = parse(["--no-python", "--", "-strange", "--", "y"])
    assert (line.kind, line.target, line.arguments) == ("program", "-strange", ["--", "y"])


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--num-processes", "8"], "launch.num_processes", 8),
        (["-n", "8"], "launch.num_processes", 8),
        (["-n=8"], "launch.num_processes", 8),
        (["--nnodes", "2:2"], "launch.num_machines", 2),
        (["--nnodes", "1:4"], "launch.min_machines", 1),
        (["--num_machines", "1:4"], "launch.min_machines", 1),
        (["--nnodes", "1:4"], "launch.num_machines", 4),
        (["--node_rank", "1", "--nnodes", "2"], "launch.machine_rank", 1),
        (["--rdzv-endpoint", "node1:1234"], "launch.main_process_port", 1234),
        (["--rdzv_endpoint=[fe80::1]:7"], "launch.main_process_ip", "fe80::1"),
        (["--rdzv_endpoint=fe80::1"], "launch.main_process_ip", "fe80::1"),
        (["--cpu"], "launch.device", "cpu"),
        (["--use_cpu"], "launch.device", "cpu"),
        (["--gpu_ids", "0,2"], "launch.gpu_ids", ("0", "2")),
        (["--debug"], "launch.debug", True),
        (["--mixed_precision", "bf16"], "precision.mode", "bf16"),
        (["--use_fsdp", "--fsdp_offload_params", "true"], "sharding.cpu_offload", True),
        (["--fsdp_sharding_strategy=2"], "sharding.strategy", "SHARD_GRAD_OP"),
        (["--multi_gpu"], "sharding.strategy", "NO_SHARD"),
        (["--cpu_offload"], "sharding.cpu_offload", True),
        (["--no_sync_module_states"], "sharding.sync_module_states", False),
        (["--reshard-after-forward", "false"], "sharding.reshard_after_forward", False),
        (["--strategy", "hybrid_shard", "--shard_size", "4"], "sharding.shard_size", 4),
        (["--wrap_classes", "A, B"], "sharding.wrap_classes", ("A", "B")),
        (["--dynamo_backend", "inductor"], "sharding.compile", True),
        (["--state_dict_type", "FULL_STATE_DICT"], "checkpoint.state_dict_type", "FULL_STATE_DICT"),
        (["--fsdp=full shard"], "sharding.strategy", "FULL_SHARD"),
        (["--fsdp", "shard_grad_op auto_wrap offload"], "sharding.cpu_offload", True),
        (["--reshard_after_forward", "auto"], "sharding.reshard_after_forward", "auto"),
        (["--reshard_after_forward"], "sharding.reshard_after_forward", True),
        (["--fsdp_config", '{"min_num_params": 1000}'], "sharding.wrap_min_numel", 1000),
        (["--gradient_accumulation_steps", "4"], "training.gradient_accumulation_steps", 4),
        (["--log_dir", "logs"], "launch.log_dir", "logs"),
    ],
)
def test_what_flags_set(argv: list[str], path: str, value: Any) -> None:
    found = resolved(*argv)
    assert found.config.value(path) == value
    assert found.origin(path).text.startswith("-")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--fsdp_offload_param", "true"],
            ["--fsdp_offload_param: unknown flag", "did you mean --fsdp_offload_params?"],
        ),
        (["--nproc", "2"], ["--nproc: unknown flag", "did you mean --num_processes?"]),
        (["--epochs", "3"], ["--epochs: unknown flag", "after the script"]),
        (["-x"], ["-x: unknown flag"]),
        (["--num_processes", "--debug"], ["--num_processes: the flag requires a value", "--num_processes=VALUE"]),
        (["--quiet=yes"], ["does not take a value"]),
        (["--megatron_lm_tp_degree", "2"], ["only be divided by sharding"]),
        (["--use_megatron_lm"], ["use_megatron_lm", "only be divided by sharding"]),
        (["--tpu"], ["--tpu: true requests PyTorch/XLA", "pip install 'fullshard[xla]'"]),
        (["--tpu_cluster"], ["start the launcher on each host"]),
        (["--device", "tpu"], ["PyTorch/XLA's own launcher starts TPU jobs"]),
        (["--env", "A=1"], ["set the variables where you start the launcher"]),
        (["--fp8_backend", "TE"], ["--fp8_backend", "TE is not supported", "use torchao"]),
        (
            ["--num_processes", "2:4"],
            ["2:4 processes are not supported: only the number of hosts may vary", "use --nnodes MIN:MAX"],
        ),
        (["--nnodes", "4:1"], ["min_machines = 4 is more than num_machines = 1", "the maximum number of hosts"]),
        (["--nnodes", "1:4", "--machine_rank", "0"], ["cannot have a fixed machine rank", "remove it"]),
        (["--nnodes", "2", "--num_machines", "3"], ["--nnodes, --num_machines", "keep one of the two"]),
        (["--fsdp_sharding_strategy", "FUL_SHARD"], ["--fsdp_sharding_strategy", "'FUL_SHARD'"]),
        (["--fsdp_config", "path/to/ train.py"], ["a closing quote is missing"]),
        (["--fsdp_config", "."], [". is a directory"]),
        (["--fsdp", "full_shrad"], ["--fsdp: unknown option 'full_shrad' in 'full_shrad'"]),
        (["--config_file", "a", "--config_file", "b"], ["given twice"]),
    ],
)
def test_what_is_refused_and_how(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*argv)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "flag", ["same_network", "main_training_function=f", "fsdp_use_orig_params", "start_method=fork"]
)
def test_flags_without_effect_say_why(flag: str) -> None:
    (note,) = resolved(f"--{flag}").notes
    assert note.status is Status.NO_EFFECT
    assert "has no effect here: " in str(note)
    assert len(str(note)) > 40


def test_every_setting_has_a_flag_and_every_flag_is_found() -> None:
    targets = {key.target for key in FLAGS.keys}
    for group in GROUPS:
        model: Any = RunConfig.model_fields[group].annotation
        assert {f"{group}.{name}" for name in model.model_fields} <= targets
    names = [key.name for key in FLAGS.keys] + [option.name for option in OPTIONS]
    assert len(names) == len(set(names))
    text = run_here("launch", "--help-all").stdout
    assert text == help_text()
    assert all(f"--{option.name}" in text for option in OPTIONS)


def test_the_short_help_has_the_common_flags_in_groups() -> None:
    text = run_here("launch", "--help").stdout
    assert text == run_here("launch", "-h").stdout
    entries = [line for line in text.splitlines() if line.startswith("  -")]
    assert 20 <= len(entries) <= 26 and len(text.splitlines()) < 100
    everything = help_text()
    assert all(entry.split()[0].strip(",") in everything for entry in entries)
    assert [line for line in text.splitlines() if line and line[0] != " "][-5:] == [
        *("Script and settings:", "Processes:", "Several hosts:", "Sharding and memory:", "Training:")
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_every_flag_of_accelerate_and_torchrun_is_known() -> None:
    """Read from their own parsers. Known means used, translated, explained or refused, never taken for the script."""
    code = (
        "from accelerate.commands.launch import launch_command_parser as a\n"
        "from torch.distributed.run import get_args_parser as t\n"
        "for parser in (a(), t()):\n"
        "    for action in parser._actions: print(*action.option_strings)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    flags = {word for line in done.stdout.splitlines() for word in line.split() if word.startswith("-")}
    assert len(flags) > 150
    unknown = []
    for flag in sorted(flags):
        try:
            parse([f"{flag}=x" if flag.startswith("--") else flag, "x", "train.py"])
        except ConfigError as error:
            if "unknown flag" in str(error):
                unknown.append(flag)
    assert unknown == []


def plan(*argv: str, **environ: str) -> Any:
    line = parse([*argv, "train.py"])
    return make_plan(line, line.readings(), environ)


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch find four GPUs where CUDA_VISIBLE_DEVICES is set, as CUDA counts them, and none otherwise."""

    def count(kind: str) -> int:
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return len(list(itertools.takewhile(lambda name: name in ("0", "1", "2", "3"), ids)))

    monkeypatch.setattr(device, "count", count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_plan_fills_in_what_is_not_said() -> None:
    made = plan("--cpu", "--num_processes", "4", "--num_cpu_threads_per_process", "3")
    assert (made.device, made.per_host, made.world_size, made.mesh()) == ("cpu", 4, 4, (1, 4))
    assert made.variables == {
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    made = plan("--gpu_ids", "1,3", "--debug", OMP_NUM_THREADS="5")
    assert (made.device, made.per_host) == ("cuda", 2)
    assert made.variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert made.variables["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "OMP_NUM_THREADS" not in made.variables
    hosts = ("--nnodes", "2", "--master_addr", "a", "--strategy", "HYBRID_SHARD", "--cpu", "--num_processes", "8")
    assert plan(*hosts).mesh() == (2, 4)
    assert plan(SLURM_GPUS_ON_NODE="8").world_size == 8


def test_what_does_nothing_with_the_rest_is_said() -> None:
    made = plan("--cpu", "--gpu_ids", "0,1", "--main_process_ip", "10.0.0.1", "--rdzv_conf", "join_timeout=3")
    notes = [str(note) for note in made.resolved.notes if "no effect" in str(note)]
    assert [note.rpartition(": ")[0] for note in notes] == [
        "--gpu_ids: gpu_ids has no effect here",
        "--main_process_ip: main_process_ip has no effect here",
        "--rdzv_conf: rdzv_conf has no effect here",
    ]
    assert not plan("--cpu", "--num_processes", "2", CUDA_VISIBLE_DEVICES="7").resolved.notes[1:]


def test_processes_that_find_no_gpu_do_not_go_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("-n", "8", SLURM_GPUS_ON_NODE="8")
    monkeypatch.setattr(os, "environ", {**os.environ, **hand_over(made.handed_over(), tmp_path / "config.json")})
    with pytest.raises(ConfigError, match="local rank 0 has no CUDA device: this host has 0"):
        Accelerator()
    assert ProcessState.start(device="cpu").device.type == "cpu"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_machines", "2", "--cpu"], "2 hosts need main_process_ip, which is not set"),
        (["--gpu_ids", "0", "-n", "2"], "-n: 2 processes per host need as many devices, but this host has 1 GPU"),
        (["--num_processes", "15", "--num_machines", "2"], "is not a multiple of num_machines"),
        (["--cpu", "--rdzv_conf", "read_timeout=3"], "rdzv_conf must contain join_timeout=SECONDS"),
        (["--cpu", "--rdzv_conf", "join_timeout=nan"], "rdzv_conf must contain join_timeout=SECONDS"),
        (["--cpu", "--rdzv_conf", "join_timeout=0"], "rdzv_conf must contain join_timeout=SECONDS"),
        (["--cpu", "--rdzv_conf", "join_timeout=1e300"], "rdzv_conf must contain join_timeout=SECONDS"),
        (["--cpu", "--strategy", "HYBRID_SHARD"], "without shard_size"),
        (["--cpu", "--num_processes", "4", "--strategy", "HYBRID_SHARD", "--shard_size", "3"], "does not divide"),
        (["--cpu", "--num_machines", "2", "--machine_rank", "2"], "machine_rank is 2, but num_machines is 2"),
        (["--cpu", "--num_processes", "9" * 20], "num_processes.*less than or equal to 1000000, got 9999"),
        (
            ["--cpu", "--num_processes", "1000000"],
            "1000000 processes are too many for a host with .* processors",
        ),
        (["--cpu", "--nnodes", "9" * 20], "less than or equal to 1000000, got 9999"),
        (["--cpu", "--monitor_interval", "1e300"], "less than or equal to 1000000000"),
        (["--cpu", "--timeout", "1e300"], "less than or equal to 1000000000"),
    ],
)
def test_plan_refuses_before_anything_starts(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(*argv)


def test_streams_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tee must be 0 to 3"):
        RankLogs(tmp_path, 2, "4", None, is_kept=True)
    with pytest.raises(ConfigError, match="--redirects writes to files"):
        RankLogs(tmp_path, 2, None, "3", is_kept=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no script was given"),
        (["-m", ""], "no script was given"),
        (["trian.py"], "the script trian.py does not exist\nhint: choose a script in .: train.py"),
        (["."], "the directory . does not contain a __main__.py\nhint: pass the path of a script"),
        *(
            (["--nproc_per_node", text, "train.py"], "--nproc_per_node: expected a number, auto, gpu or cpu")
            for text in ("all", "0", "-2", "1.5", "²", "9" * 5000)
        ),
        (["--num_processes", "2", "--nproc_per_node", "4", "train.py"], "keep one of the two"),
        (["--standalone", "--nnodes", "2", "train.py"], "--nnodes"),
        (["--config_file", "nothing.yaml", "train.py"], "nothing.yaml does not exist"),
        (["--print", "pbs", "train.py"], "--print must be slurm, kubernetes or trainjob, got 'pbs'"),
    ],
)
def test_mistakes_are_a_message_with_exit_code_2(tmp_path: Path, argv: list[str], words: str) -> None:
    (tmp_path / "train.py").write_text("")
    done = run_here("launch", "--cpu", *argv, cwd=tmp_path, environ=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_fits_into_80_columns_except_for_commands(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    hosts = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "host-0.of.the.cluster.example.org"]
    sharding = ["--strategy", "HYBRID_SHARD", "--shard_size", "4"]
    flags = ["--cpu", "--dry_run", "-n", "8", *hosts, *sharding]
    lines = run_here("launch", *flags, "train.py", cwd=tmp_path, environ=environment()).stdout.splitlines()
    assert [line for line in lines if len(line) > 80 and not re.match("  (RANK=|start with: )", line)] == []
    assert any("WORLD_SIZE=8" in line for line in lines)


def test_per_host_count_becomes_the_total(tmp_path: Path) -> None:
    """Also when the number of hosts comes from elsewhere."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.yaml").write_text(
        "launch: {num_machines: 3, main_process_ip: 10.0.0.1}\nsharding: {wrap_classes: [Block]}\n"
    )
    flags = ["--config_file", "run.yaml", "--nproc_per_node", "2", "--cpu", "--dry_run"]
    done = launch(*flags, "train.py", cwd=tmp_path, timeout=60)
    assert "starting 6 processes on 3 hosts (2 each)" in done.stdout, done.stderr
    assert "sharding.wrap = class  (follows from other settings)" in done.stdout


def test_environment_wins_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.yaml").write_text("mixed_precision: fp16\nfsdp_config:\n  fsdp_sharding_strategy: 1\n")
    flags = ["--config_file", "run.yaml", "--cpu", "--dry_run", "--num_processes", "2"]
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_SHARDING_STRATEGY": "2"}
    done = launch(*flags, "--strategy", "NO_SHARD", "train.py", cwd=tmp_path, timeout=60, **variables)
    assert "precision.mode = bf16  ($ACCELERATE_MIXED_PRECISION)" in done.stdout, done.stderr
    assert "sharding.strategy = NO_SHARD  (--strategy)" in done.stdout
    assert "FSDP_SHARDING_STRATEGY" not in environment()


def test_an_empty_command_line_has_no_target() -> None:
    assert parse([]) == CommandLine()
