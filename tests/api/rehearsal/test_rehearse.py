"""`fullshard rehearse`: scripts of torch and of this package, unchanged, as one rank of many.

pytest tests/api/rehearsal/test_rehearse.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_here

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES, SCRIPTS = ROOT / "examples", ROOT / "tests" / "scripts"


KINDS = ("torch", "full", "hybrid", "lora", "qlora", "checkpointing", "offload")
"""How a script trains."""


def rehearse(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the answer of a rehearsal, and what the script has printed."""
    capfd.readouterr()
    done = run_here("rehearse", "--json", *words)
    said = "".join([*capfd.readouterr(), done.stderr])
    assert done.returncode == code, said + done.stderr
    return json.loads(done.stdout or "{}"), said


@pytest.mark.full
def test_a_script_is_one_rank_of_many(capfd: pytest.CaptureFixture[str]) -> None:
    """A script of torch's DDP at 64 ranks: it sees its rank, what it asks for, and ends; the answer is complete."""
    found, said = rehearse(capfd, "--as", "64xH100", "--rank", "9", "--", "--cpu", str(SCRIPTS / "rehearsed.py"), "ddp")
    assert "rank 9 of 64, 1 of 8 on host 1, gloo, finite" in said
    assert (found["as"], found["rank"], found["steps"]) == ("64 x H100 in 8 hosts", 9, 8)
    assert found["fits"]
    assert found["step_seconds"] > 0
    assert found["exposed_seconds"] >= 0
    assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
    assert [*found["phases"]] == ["load and first forward", "forward", "backward", "optimizer"]
    assert 0 < max(phase["allocated"] for phase in found["phases"].values()) <= found["peak_allocated"]
    assert found["unknown"].keys() == {"broadcast from rank 0 of 64"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "devices", "seen"), [(None, "2xH100", "131072"), (None, "2xCPU", "None"), ("4096", "2xH100", "4096")]
)
def test_freed_memory_is_returned_as_on_a_device(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    devices: str,
    seen: str,
) -> None:
    """Ranks of CPUs keep the memory that they would keep in the real job."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", given)
    (tmp_path / "train.py").write_text(
        "import os, torch\nprint('from', os.environ.get('MALLOC_MMAP_THRESHOLD_'), 'bytes')\n"
        "model = torch.nn.Linear(2, 2)\nmodel(torch.ones(2)).sum().backward()\n"
        "torch.optim.SGD(model.parameters(), 0.1).step()\n"
    )
    _, said = rehearse(capfd, "--as", devices, "--", "--cpu", str(tmp_path / "train.py"))
    assert f"from {seen} bytes" in said


@pytest.mark.full
@pytest.mark.parametrize("ranks", [8, 1024])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "hybrid", "fullshard"])
def test_engines_of_torch_and_of_this_package(capfd: pytest.CaptureFixture[str], engine: str, ranks: int) -> None:
    """Each runs and ends at other numbers of ranks."""
    script = str(SCRIPTS / "rehearsed.py")
    found, said = rehearse(capfd, "--as", f"{ranks}xH100", "--rank", "1", "--", "--cpu", script, engine)
    assert f"rank 1 of {ranks}, 1 of 8 on host 0, gloo, finite" in said
    assert found["steps"] == 8


@pytest.mark.full
@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_examples_run_unchanged(capfd: pytest.CaptureFixture[str], tmp_path: Path, ranks: int) -> None:
    """A loop of one's own, and the Trainer with its save."""
    own_loop = [str(EXAMPLES / "own_loop.py"), "--batch-size", "1"]  # of the few texts that 1,024 ranks get
    found, said = rehearse(capfd, "--as", f"{ranks}xH100", "--steps", "4", "--", "--cpu", *own_loop)
    assert f"sharded over {ranks} ranks" in said
    assert found["steps"] == 4
    trainer = [str(EXAMPLES / "trainer.py"), "--output_dir", str(tmp_path), "--max_steps", "4"]
    found, said = rehearse(capfd, "--as", f"{ranks}xH100", "--", "--cpu", *trainer)
    assert f"sharded over {ranks} ranks" in said
    assert found["steps"] == 4
    assert found["saves"]["fullshard"]["count"] > 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_the_engine_reads_the_peaks_of_whole_steps(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the steps after which it decides what fits, peaks do not start anew."""
    lines = [
        "import re, torch",
        "from pathlib import Path",
        "model = torch.nn.Linear(8, 8)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "block = torch.ones(2**26)",
        "del block",
        "for step in range(1, 6):",
        "    model(torch.ones(8)).sum().backward()",
        "    optimizer.step()",
        "    text = Path('/proc/self/status').read_text()",
        "    peak, now = (int(re.search(rf'{name}:\\s+(\\d+) kB', text)[1]) for name in ('VmHWM', 'VmRSS'))",
        "    print(f'step {step}: {peak - now > 200_000}', flush=True)",
    ]
    (tmp_path / "reads.py").write_text("\n".join(lines))
    _, said = rehearse(capfd, "--as", "8xH100", "--", "--cpu", str(tmp_path / "reads.py"))
    assert "step 2: True" in said
    assert "step 5: False" in said


@pytest.mark.full
def test_what_does_not_fit_and_free_links(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The exit code is 1 if a device has too little memory; with free links, nothing is exposed."""
    device = {"name": "tiny", "memory": 10**6, "flops": 1e12, "flops_fp32": 1e12, "memory_bandwidth": 1e11,
              "link": 1e9, "network": 1e9, "per_host": 8, "source": "a test", "framework": 0}  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(device))
    words = ["--links", "free", "--", "--cpu", str(SCRIPTS / "rehearsed.py"), "fullshard"]
    found, _ = rehearse(capfd, "--as", f"8x{tmp_path / 'tiny.json'}", *words, code=1)
    assert not found["fits"]
    assert found["needed"] > found["memory"] == 10**6
    assert found["step_seconds"] > 0
    assert found["exposed_seconds"] is None


@pytest.mark.full
def test_time_is_that_of_the_links(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A DDP step waits for its gradients on slow links: 2 x 7/8 of them, less what the backward hides."""
    device = {"name": "slow", "memory": 10**12, "flops": 1e12, "flops_fp32": 1e12, "memory_bandwidth": 1e11,
              "link": 5e5, "network": 5e5, "per_host": 8, "source": "a test", "link_efficiency": 1.0}  # fmt: skip
    (tmp_path / "slow.json").write_text(json.dumps(device))
    words = ["--links", str(tmp_path / "slow.json"), "--", "--cpu", str(SCRIPTS / "rehearsed.py"), "ddp"]
    found, said = rehearse(capfd, "--as", "8xH100", *words)
    nbytes = int(re.findall(r"(\d+) bytes of gradients", said)[0])
    assert found["exposed_seconds"] == pytest.approx(2 * nbytes * 7 / 8 / 5e5, rel=0.15)


def _grown(said: str) -> list[float]:
    """Return the bytes that a script says it has grown by, and those before its model was sharded."""
    return [float(word) for word in re.findall(r"grown by (\d+) after (\d+)", said)[0]]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_a_real_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    """The growth of the resident memory of one rank, in own loops, an Accelerator and the Trainer."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))  # freed tensors go back to the system
    monkeypatch.setenv("FULLSHARD_COMM", "gloo")
    script = [str(SCRIPTS / "rehearsed_memory.py"), kind]
    command = [sys.executable, "-m", "fullshard", "launch", "--cpu", "--num_processes", str(ranks), *script]
    real = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert real.returncode == 0, real.stderr
    found, said = rehearse(capfd, "--as", f"{ranks}xCPU", "--", "--cpu", *script)
    grown, own = found["peak_allocated"] - _grown(said)[1], _grown(real.stdout)[0]
    print(f"{kind} on {ranks} ranks: real {own / 1e6:.1f} MB, rehearsed {grown / 1e6:.1f} MB, {grown / own - 1:+.1%}")
    assert grown == pytest.approx(own, rel=0.03)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--as", "8xH100", "--rank", "8", "--", "x.py"], "a job of 8 ranks has no rank 8"),
        (["--as", "8xH100", "--links", "wires", "--", "x.py"], "unknown hardware 'wires'"),
        (["--as", "8xH100", "--", "nowhere.py"], "the script nowhere.py does not exist"),
        (["--as", "8xH100", "--", "--no_python", "true"], "only a Python script or module can be rehearsed"),
    ],
)
def test_wrong_words_are_errors(words: list[str], said: str) -> None:
    """Before anything starts."""
    done = run_here("rehearse", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "--cpu", "--max_steps", "1"],
        ["--cpu", "fullshard", "sft", "run.yaml", "--max_steps", "1"],
        [
            "fullshard",
            "launch",
            "--cpu",
            "--config_file",
            "run.yaml",
            "-m",
            "fullshard.recipes.sft",
            "run.yaml",
            "--max_steps",
            "1",
        ],
    ],
)
def test_commands_and_recipes_are_rehearsed_as_launched(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.cli.rehearse import _job

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("launch: {num_processes: 2}\nsharding: {strategy: NO_SHARD}\n")
    (tmp_path / "scratch").mkdir()
    program = _job(words, tmp_path / "scratch", for_cpus=False)[0]
    assert program == ["module", "fullshard.recipes.sft", "run.yaml", "--max_steps", "1"]
    assert "NO_SHARD" in (tmp_path / "scratch" / "config.json").read_text()
    trains = _job(["--cpu", "fullshard", "train", "--steps", "1"], tmp_path / "scratch", for_cpus=False)[0]
    elsewhere = ["--output-dir", str(tmp_path / "scratch" / "output")]
    assert trains == ["module", "fullshard", "train", "--steps", "1", *elsewhere]


@pytest.mark.full
def test_a_script_that_fails_ends_the_command_with_its_code(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """There is no answer then, but the values of other ranks that it may have lacked are named."""
    (tmp_path / "fails.py").write_text(
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.broadcast_object_list(objects := [None], src=0)\n"
        "sys.exit(7 if objects == [None] else 0)\n"
    )
    command = ["--as", "8xH100", "--rank", "1", "--", "--cpu", str(tmp_path / "fails.py")]
    found, said = rehearse(capfd, *command, code=7)
    assert found == {}
    assert "the script failed" in said
    assert "asked for values that only other ranks know" in said
    assert "broadcast_object_list from rank 0 (1x)\nhint: " in said


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["trainer", "accelerator", "train"])
def test_a_run_stays_as_it_is(capfd: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    """Its records, its checkpoints, which a limit would remove, and its model, in the same output directory."""
    lines = [
        "import torch, fullshard",
        f"accelerator = fullshard.Accelerator(cpu=True, project_dir={str(tmp_path / 'out')!r})",
        "accelerator.project_configuration.automatic_checkpoint_naming = True",
        "model = torch.nn.Linear(8, 8)",
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))",
        "for step in range(1, 3):",
        "    accelerator.backward(loss := model(torch.ones(8, 8)).sum())",
        "    optimizer.step()",
        "    accelerator.log({'loss': loss.item()}, step=step)",
        "accelerator.save_state()",
    ]
    (tmp_path / "own.py").write_text("\n".join(lines))
    limits = ["--save_steps", "1", "--save_total_limit", "2", "--max_steps", "3"]
    small = ["--steps", "2", "--batch-size", "4", "--max-data-mb", "0.2", "--seq-len", "32"]
    words = {
        "trainer": [str(EXAMPLES / "trainer.py"), "--output_dir", str(tmp_path / "out"), *limits],
        "accelerator": [str(tmp_path / "own.py")],
        "train": ["fullshard", "train", "--output-dir", str(tmp_path / "out"), *small],
    }[kind]
    launch = ["launch", "--cpu", "--num_processes", "2", *words]
    real = words[1:] if kind == "train" else launch
    done = subprocess.run([sys.executable, "-m", "fullshard", *real], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before = _files(tmp_path / "out")
    assert {"metrics.jsonl", "events.jsonl", "settings.json", "environment.json"} <= before.keys()
    assert [name for name in before if "checkpoint" in name]
    found, _ = rehearse(capfd, "--as", "4xH100", "--", "--cpu", *words)
    assert found["steps"] > 0
    assert found["saves"]["fullshard"]["count"] > 0
    assert _files(tmp_path / "out") == before


def test_a_script_without_a_step_is_an_error(tmp_path: Path) -> None:
    """With the memory that it took, and no word that it fits."""
    (tmp_path / "asks.py").write_text("import torch\ntorch.nn.Linear(8, 8)(torch.ones(8))\n")
    done = run_here("rehearse", "--as", "8xH100", "--", "--cpu", str(tmp_path / "asks.py"))
    assert done.returncode == 2
    assert "the script has taken no step, so the rehearsal cannot tell whether it fits\nhint: a step is" in done.stderr
    assert "before any step: needs 1.5" in done.stdout
    assert "fits" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.full
def test_a_comparison_runs_both_engines(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The script's own words say whose `fully_shard` it has got, and the chart is written."""
    words = ["--compare", "torch", "--plot", str(tmp_path / "a.png"), "--", "--cpu", str(EXAMPLES / "own_loop.py")]
    found, said = rehearse(capfd, "--as", "8xH100", "--steps", "5", *words)
    assert "sharded over 8 ranks" in said
    assert "FSDPModel is sharded by torch's engine" in said
    assert (found["engine"], found["torch"]["engine"]) == ("fullshard", "torch")
    assert found["torch"]["step_seconds"] > 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
