"""`fullshard launch` on one host: scripts run as under plain Python, logs, failures, signals, and what it prints.

Run: pytest tests/launch/test_launch.py. Real processes over Gloo.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.launching import LAUNCH, TRAIN, alive, environment, launch, norms, read, started, wait_until

SELF = """
import multiprocessing, os, pickle, sys
class Local: pass
def child(queue): queue.put((__name__, os.getpid()))
def describe():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name,
        "doc": __doc__,
        "names": sorted(name for name in vars(main) if not name.startswith("__")), "same": vars(main) is globals(),
        "pickled": pickle.loads(pickle.dumps(Local())).__class__ is Local,
        "torch": "torch" in sys.modules, "flags": tuple(sys.flags)[:12],
    }
if __name__ == "__main__":
    import json
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = describe() | {"child": queue.get()[0]}
    process.join()
    print(json.dumps(found))
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own.py").write_text(SELF)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize(
    "target", [["inner/own.py", "a", "--b", "$HOME", "$$x ${local_rank}"], ["-m", "inner.own", "-m", "--num_processes"]]
)
def test_a_script_runs_as_under_plain_python(scripts: Path, target: list[str]) -> None:
    """Names, arguments, search path, pickling, and child processes of multiprocessing."""
    plain = subprocess.run(
        [sys.executable, *target],
        cwd=scripts,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    done = launch("--num_processes", "1", "--cpu", "--quiet", *target, cwd=scripts)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(plain.stdout)


@pytest.mark.full
def test_training_on_two_ranks_with_every_kind_of_log(scripts: Path) -> None:
    """Rank 0 is plain, rank 1 has its prefix, and files hold the same; a torchrun command line does."""
    flags = ["--standalone", "--nproc-per-node=2", "--log-dir", "logs", "--cpu"]
    done = launch(*flags, "train.py", str(scripts), "2", "0", cwd=scripts)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] trained rank 0 of 2 norm" in done.stdout
    assert "[rank 1] trained rank 1 of 2 norm" in done.stdout
    assert len(norms(done.stdout)) == 1
    assert "fullshard: starting 2 processes on this host, cpu (gloo), FULL_SHARD: 1 replica x 2 shards" in done.stderr
    assert "no model was sharded" not in done.stderr
    (run,) = (scripts / "logs").iterdir()
    for rank in (0, 1):
        assert f"\ntrained rank {rank} of 2" in "\n" + (run / "attempt_0" / str(rank) / "stdout.log").read_text()
    pids = [int(read(scripts / f"pid{rank}")) for rank in (0, 1)]
    assert not any(alive(pid) for pid in pids)


ENDS_EARLY = """
import sys, time, torch
import torch.distributed as dist
from fullshard.launch import init_process_group_from_environment

init_process_group_from_environment(torch.device("cpu"))
group = dist.distributed_c10d._get_default_group()
tensors = [torch.ones(4)]
sys.setswitchinterval(60)  # the interpreter is not given up while the thread that runs the operation asks for it
group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
del tensors
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
"""


@pytest.mark.full
def test_the_last_operation_does_not_abort_the_exit(tmp_path: Path) -> None:
    """Gloo's thread needs the interpreter to let go of its tensors, after the operation is over."""
    (tmp_path / "train.py").write_text(ENDS_EARLY)
    done = launch("--num_processes", "1", "--cpu", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


CASES = """
import os, subprocess, sys, time
kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "lines" and rank == 1:
    sys.stdout.write("one\\ntwo\\rthree\\r\\n" * 500 + "the last, unfinished")
if kind == "raise" and rank == 1: raise ValueError("the cause")
if kind == "code": sys.exit(7 if rank == 1 else 0)
if kind == "words": sys.exit("said at the end")
if kind == "again" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 0: raise ValueError("once")
if kind in ("raise", "code") and rank == 0: time.sleep(60)
if kind == "syntax": exec(compile("a b", "inner.py", "exec"))
"""


@pytest.mark.parametrize(
    ("kind", "code", "last"),
    [
        ("raise", 1, "ValueError: the cause"),
        ("code", 7, "failed with exit code 7"),
        pytest.param("words", 1, "failed with exit code 1", marks=pytest.mark.full),
        pytest.param("syntax", 1, "SyntaxError: invalid syntax", marks=pytest.mark.full),
    ],
)
def test_first_failure_last_in_full(tmp_path: Path, kind: str, code: int, last: str) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = launch("--num_processes", "2", "--cpu", "--log_dir", "logs", "cases.py", kind, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert last in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("Traceback") <= 1
    if kind == "raise":
        assert f'File "{tmp_path / "cases.py"}", line 6, in <module>' in done.stderr
        assert "bootstrap" not in done.stderr
        (report,) = (tmp_path / "logs").glob("*/attempt_0/1/error.json")
        assert "ValueError: the cause" in report.read_text()


def test_restart_says_so_and_succeeds(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = launch(
        *("--num_processes", "2", "--cpu", "--max_restarts", "1", "--main_process_port", "0"),
        *("cases.py", "again"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: once" in done.stderr
    assert "restarting all processes (1 of 1 restarts)" in done.stderr
    # The script used nothing of fullshard's, and is told so: two copies may have done the same work.
    assert done.stderr.count("no model was sharded on rank 0") == 1
    assert "each of the 2 processes" in done.stderr


def test_an_import_that_was_not_changed_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("class Accelerator: ...")
    (tmp_path / "old.py").write_text(
        "import sys\nfrom accelerate import Accelerator\nprint('training', file=sys.stderr)\n"
    )
    done = launch("--num_processes", "1", "--cpu", "old.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hint: change the import to `from fullshard import Accelerator`\ntraining\n" in done.stderr
    (tmp_path / "trainer.py").write_text("from accelerate import Accelerator\nclass Trainer: ...\n")
    done = launch("--num_processes", "1", "--cpu", "trainer.py", cwd=tmp_path)
    assert "change the import" not in done.stderr


def test_no_line_of_another_rank_is_lost(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = launch("--num_processes", "2", "--cpu", "cases.py", "lines", cwd=tmp_path)
    shown = done.stdout.replace("[rank 1] ", "")  # in the middle of a line that was read while it was written, too
    assert done.stdout.startswith("[rank 1] one\n[rank 1] two\n[rank 1] three\n")
    assert shown.split() == ["one", "two", "three"] * 500 + ["the", "last,", "unfinished"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "terminal", "files"),
    [
        (["-r", "3"], set(), {"0.out", "0.err", "1.out", "1.err"}),
        (["-t", "1"], {"0.out", "0.err", "1.out", "1.err"}, {"0.out", "1.out"}),
        (["--redirects", "1:3", "--tee", "0:2"], {"0.out", "0.err"}, {"0.err", "1.out", "1.err"}),
    ],
)
def test_tee_and_redirects_as_torchrun_has_them(
    tmp_path: Path, flags: list[str], terminal: set[str], files: set[str]
) -> None:
    # Each line is written at once: that of the first rank, as it is for the terminal, is not waited for to end.
    lines = "sys.stdout.write(r + '.out\\n')\nsys.stderr.write(r + '.err\\n')\n"
    (tmp_path / "say.py").write_text(f"import os, sys\nr = os.environ['RANK']\n{lines}")
    done = launch("--num_processes=2", "--cpu", "--log_dir=logs", *flags, "say.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = {line.partition("] ")[2] or line for line in (done.stdout + done.stderr).splitlines()}
    assert {word for word in shown if word[1:] in (".out", ".err")} == terminal
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    assert {word for word in logs.split() if word[1:] in (".out", ".err")} == files


STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
directory, rank = Path(sys.argv[1]), os.environ["RANK"]
# A child in a session of its own, which ignores what its parent ignores.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(directory / f"pids{rank}").write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_a_signal_ends_everything_within_5_seconds(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ranks that ignore it, and their children in other sessions; a second Ctrl-C changes nothing."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [*LAUNCH, "--num_processes", "2", "--cpu", "stubborn.py", str(tmp_path)]
    with started(*command, cwd=tmp_path) as launcher:
        wait_until(lambda: all(read(tmp_path / f"pids{rank}") for rank in (0, 1)), 60, "the start")
        pids = [int(pid) for rank in (0, 1) for pid in read(tmp_path / f"pids{rank}").split()]
        assert all(alive(pid) for pid in pids)
        launcher.send_signal(number)
        wait_until(lambda: not any(alive(pid) for pid in pids[::2]) or launcher.poll() is None, 1, "a look")
        launcher.send_signal(number)
        wait_until(lambda: not any(alive(pid) for pid in pids), 5, "the end of all four processes")
        assert launcher.wait(timeout=5) == code
        assert launcher.stdout is not None
        assert f"{number.name}: 2 processes on this host ended" in launcher.stdout.read()


@pytest.mark.full
def test_programs_and_their_end_with_the_launcher(tmp_path: Path) -> None:
    """Not only Python: the environment is there, exit codes are kept, and a killed launcher leaves nothing."""
    done = launch("--num_processes", "2", "--cpu", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE", cwd=tmp_path)
    assert sorted(done.stdout.split("\n")) == ["", "0 of 2", "[rank 1] 1 of 2"]
    missing = launch("--num_processes", "1", "--cpu", "--no_python", "not-a-program", cwd=tmp_path)
    assert (missing.returncode, "cannot run 'not-a-program'" in missing.stderr) == (127, True)
    script = f"echo $$ > {tmp_path}/pid$RANK; exec sleep 600"
    with started(*LAUNCH, "--num_processes", "2", "--cpu", "--no_python", "sh", "-c", script, cwd=tmp_path) as launcher:
        wait_until(lambda: all(read(tmp_path / f"pid{rank}").strip() for rank in (0, 1)), 60, "the start")
        pids = [int(read(tmp_path / f"pid{rank}")) for rank in (0, 1)]
        launcher.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), 5, "the end of the programs")


def test_dry_run_and_notes(tmp_path: Path) -> None:
    """What would run on each of two hosts, what differs from defaults and why, and what became of every key."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n"
        "  fsdp_sharding_strategy: 4\n  fsdp_use_orig_params: true\n"
    )
    flags = ["--config_file", "run.yaml", "--nnodes", "2", "--master_addr", "10.0.0.1", "--machine_rank", "0", "--cpu"]
    done = launch(*flags, "--dry-run", "train.py", "--lr", "1e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "starting 4 processes on 2 hosts (2 each), cpu (gloo), HYBRID_SHARD: 2 replicas x\n  2 shards" in done.stdout
    assert "precision.mode = bf16  (run.yaml:2:1)" in done.stdout
    assert "launch.num_machines = 2  (--nnodes)" in done.stdout
    assert "host 1 of 2: ranks 2 to 3" in done.stdout
    assert "--machine_rank 1 train.py --lr 1e-4" in done.stdout
    assert "all meet at 10.0.0.1 port 29500" in done.stdout
    assert "RANK=3 LOCAL_RANK=1" in done.stdout
    assert (
        "run.yaml:6:3: fsdp_use_orig_params has no effect here: the original parameters are always kept" in done.stderr
    )
    assert "--nnodes is translated to launch.num_machines = 2" in done.stderr


def test_the_default_file_of_accelerate_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "accelerate").mkdir()
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.write_text("distributed_type: FSDP\nmixed_precision: fp16\nnum_processes: 3\n")
    done = launch("--cpu", "--dry_run", "train.py", cwd=tmp_path, HF_HOME=str(tmp_path))
    assert f"using {path}, which `accelerate config` wrote" in done.stderr
    assert "starting 3 processes" in done.stdout
    flags = ["--config_file=none", "--cpu", "--mixed_precision", "bf16", "--param_dtype", "float32"]
    without = launch(*flags, "--dry_run", "train.py", cwd=tmp_path, HF_HOME=str(tmp_path))
    assert "default" not in without.stderr
    assert "precision bf16 (param_dtype float32)" in without.stdout


@pytest.mark.full
def test_printed_slurm_script_really_trains(tmp_path: Path) -> None:
    """`srun` is a shell function here that starts one task per host, with Slurm's variables."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fullshard").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{LAUNCH[2]}' \"$@\"\n")
    (tmp_path / "fullshard").chmod(0o755)
    flags = ["--num_machines", "2", "--num_processes", "2", "--cpu", "--print", "slurm"]
    done = launch(*flags, "train.py", str(tmp_path), "2", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "#SBATCH --ntasks-per-node=1\n" in done.stdout
    srun = """
srun() {
    echo "srun $*"; while [ "${1#--}" != "$1" ]; do shift; done
    for task in 0 1; do SLURM_PROCID=$task SLURM_NODEID=$task "$@" & tasks="$tasks $!"; done
    for task in $tasks; do wait $task || return 1; done
}
tasks=""
"""
    script = tmp_path / "job.sh"
    script.write_text(done.stdout.replace("set -euo pipefail\n", f"set -euo pipefail\n{srun}"))
    assert subprocess.run(["bash", "-n", str(script)], check=False, timeout=20).returncode == 0
    slurm = {"SLURM_JOB_ID": "31", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    slurm["SLURM_CPUS_PER_TASK"] = "3"
    variables = environment(**slurm, SLURM_JOB_NODELIST="localhost", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with started("bash", str(script), cwd=tmp_path, **variables) as job:
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert "trained rank 0 of 2" in output
    assert "trained rank 1 of 2" in output
    assert len(norms(output)) == 1
    assert "srun --ntasks-per-node=1 --cpus-per-task=3 --kill-on-bad-exit=1 fullshard launch" in output
    assert "$SLURM_JOB_ID: the allocation is translated to num_machines = 2" in output


def test_printed_manifest(tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text("")
    flags = ["--num_machines", "3", "--num_processes", "24", "--device", "cuda", "--mixed_precision", "bf16"]
    done = launch(*flags, "--print", "kubernetes", "my_train.py", "--out", "$(date)", "yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = YAML(typ="safe").load(done.stdout)
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: role["replicas"] for name, role in roles.items()} == {"Master": 1, "Worker": 2}
    container = roles["Worker"]["template"]["spec"]["containers"][0]
    command = container["command"]
    assert command[:2] == ["fullshard", "launch"]
    assert command[-4:] == ["my_train.py", "--out", "$$(date)", "yes"]
    assert '"yes"' in done.stdout  # unquoted, it is a boolean in YAML 1.1, which Kubernetes reads
    assert command[command.index("--machine_rank") + 1] == "$(RANK)"
    assert command[command.index("--main_process_ip") + 1] == "my-train-master-0"
    assert command.count("--num_machines") == 1
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_a_launcher_loads_what_it_needs_of_torch(tmp_path: Path) -> None:
    """Every launch waits for it; DTensor and what that brings along are half as much again as torch."""
    (tmp_path / "script.py").write_text("")
    code = "import sys\nfrom fullshard.cli.main import main\ntry: main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", code, "launch", "--cpu", "--num_processes", "1", "--quiet", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "torch.distributed.elastic.agent.server.local_elastic_agent" in loaded
    assert not loaded & {"torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy"}
    assert not {name for name in loaded if name.startswith(("fullshard.engine.", "fullshard.api."))}


def test_help_is_quick_and_loads_no_torch(tmp_path: Path) -> None:
    """Under half a second in the best of five: the machine may be busy with something else."""
    code = "import sys, time\nfrom fullshard.cli.main import main\nsys.argv[1:] = ['launch', '--help']\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "import os; sys.stderr.write(f\"{'torch' in sys.modules} {sum(os.times()[:2])}\")"
    spent = 1.0
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        loaded, text = done.stderr.split()
        assert loaded == "False"
        if (spent := float(text)) < 0.5:
            break
    assert spent < 0.5
    assert "--num_processes" in done.stdout
    assert "--help_all" in done.stdout
