"""A whole training run on real processes: what it leaves, and that it goes on after a killed rank as if nothing was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from fullshard.checkpoint import latest_checkpoint
from fullshard.observe import StepMetrics, read_metrics
from tests.commands import run_here
from tests.distributed import run_ranks
from tests.launching import run_python

pytestmark = pytest.mark.timeout(1500)  # several whole runs, which a busy machine makes slow

STEPS, SAVE_EVERY = 60, 5
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data that is easy to learn, and the configuration of a tiny Llama with dropout."""
    directory = tmp_path_factory.mktemp("inputs")
    text = "".join(f"{WORDS[i % 10]} and {WORDS[(i + 1) % 10]} make {WORDS[(i * 7) % 10]}.\n" for i in range(3000))
    (directory / "data.txt").write_text(text)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
        # Dropout draws random numbers, which a resumed run must draw as the whole one did.
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    (directory / "config.json").write_text(config.to_json_string())
    return directory


def _command(inputs: Path, output: Path, *more: str) -> list[str]:
    settings = {
        "nproc": 2,
        "model": inputs / "config.json",
        "data": inputs / "data.txt",
        "output-dir": output,
        "steps": STEPS,
        "save-every": SAVE_EVERY,
        "batch-size": 6,
        "micro-batch-size": 2,
        "seq-len": 32,
        "lr": 0.01,
        "vocab-size": 320,
        "sample-tokens": 12,
        "device": "cpu",
    }
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-c", "from fullshard.cli.main import main; main()", "train", *options, *more]


def _train(inputs: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(inputs, output, *more), capture_output=True, text=True, timeout=600, check=False, env=_environ()
    )


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output directory and standard output of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    code, text, errors = run_ranks(_take_part, 2, _without_count(_command(inputs, output)))[0]
    assert code == 0, errors
    return output, text


def _take_part(words: list[str]) -> tuple[int, str, str]:
    """As under a launcher, of which others test the start: in a process that has imported torch already."""
    done = run_here(*words)
    return done.returncode, done.stdout, done.stderr


def _without_count(command: list[str]) -> list[str]:
    """The words of the command; it is the launcher that says how many ranks there are."""
    words = command[3:]
    place = words.index("--nproc")
    return words[:place] + words[place + 2 :]


def test_run_learns_and_says_so(whole: tuple[Path, str]) -> None:
    output, text = whole
    metrics = list(read_metrics(output / "metrics.jsonl"))
    assert [record.step for record in metrics] == list(range(1, STEPS + 1))
    entropy = _entropy(output)
    assert metrics[0].loss > entropy
    assert metrics[-1].loss < 0.8 * entropy
    assert _number_after(text, "held-out loss: ") < 0.8 * entropy
    assert all(len(record.memory_nbytes) == 2 for record in metrics)
    assert "resume: no complete checkpoint in" in text
    assert "sharded over 2 ranks" in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS // 10


def _entropy(output: Path) -> float:
    """The loss, in nats, of the best model that knows only how frequent each token is."""
    (tokens,) = output.glob("data-*/tokens.bin")
    shares = np.bincount(np.fromfile(tokens, "<u4"))
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log(shares)).sum())


def _number_after(text: str, label: str) -> float:
    return float(text.rpartition(label)[2].split()[0])


def test_run_leaves_whole_files(whole: tuple[Path, str]) -> None:
    """Checkpoints (the two newest), export, sample, report; each is named at the end; nothing temporary is left."""
    output, text = whole
    assert json.loads((output / "settings.json").read_text())["--steps"] == {"value": STEPS, "origin": "given"}
    for name in ("export", "sample.txt", "report.html", "metrics.jsonl"):
        assert f": {output / name}\n" in text
    names = sorted(path.name for path in (output / "checkpoints").iterdir() if path.is_dir())
    assert names == [f"step-{STEPS - SAVE_EVERY:06d}", f"step-{STEPS:06d}"]
    assert [path for path in output.rglob(".*") if path.name != ".gitattributes"] == []


def test_export_is_the_trained_model(whole: tuple[Path, str]) -> None:
    """Transformers loads it, and it predicts the data as well as the run said, and writes the run's sample."""
    output, text = whole
    model = AutoModelForCausalLM.from_pretrained(output / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    ids = tokenizer("one and two make one.\ntwo and three make eight.\n" * 3, return_tensors="pt")["input_ids"][:, :64]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss < 0.9 * _entropy(output)
    generated = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] == 8
    tokens = np.fromfile(next(output.glob("data-*/tokens.bin")), "<u4").astype(np.int64)
    held_out = torch.from_numpy(tokens[-int(len(tokens) * 0.02) :])
    torch.manual_seed(0)
    written = model.generate(
        held_out[None, :16], max_new_tokens=12, do_sample=True, temperature=0.7, top_p=0.9, no_repeat_ngram_size=8
    )
    sample = tokenizer.decode(written[0], skip_special_tokens=True)
    assert (output / "sample.txt").read_text() == sample + "\n"
    assert f"sample: {output / 'sample.txt'}\n{textwrap.indent(sample, '    ')}\n" in text


WORKER = """
import os, signal, sys
from fullshard.recipes.arguments import TrainArguments

steps, attempt = TrainArguments.model_validate_json(sys.argv[1]).steps, os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, attempt {attempt}: {steps} steps\\n")
sys.stdout.flush()
if attempt == "0" and os.environ["WORLD_SIZE"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""In place of the run, whose imports take seconds."""


@pytest.mark.parametrize(("nproc", "restarts"), [(2, 0), (1, 1)])
def test_the_command_starts_its_ranks(inputs: Path, tmp_path: Path, nproc: int, restarts: int) -> None:
    """One has a launcher of its own too, if it may be started again: in `test_memory_recovery` the run itself."""
    (tmp_path / "worker.py").write_text(WORKER)
    words = _command(inputs, tmp_path / "out", "--nproc", str(nproc), "--max-restarts", str(restarts))
    words[2] = f"import fullshard.cli.train as command; command._WORKER = 'worker'; {words[2]}"
    environ = _environ() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = run_python(words, tmp_path, environ, 100)
    assert done.returncode == 0, done.stderr
    said = sorted(line.removeprefix("[rank 1] ") for line in done.stdout.splitlines())
    attempts = [(rank, attempt) for rank in range(nproc) for attempt in range(1 + restarts)]
    assert said == [f"rank {rank} of {nproc}, attempt {attempt}: {STEPS} steps" for rank, attempt in attempts]


@pytest.mark.full
def test_killed_rank_then_resume_equals_the_whole_run(whole: tuple[Path, str], inputs: Path, tmp_path: Path) -> None:
    """kill -9 of one rank in the middle of the run; the same command ends bit for bit where the whole run ended."""
    killed_at = _kill_a_rank(_command(inputs, tmp_path), tmp_path, after_step=SAVE_EVERY + 2)
    assert killed_at < STEPS
    done = _train(inputs, tmp_path)
    assert done.returncode == 0, done.stderr
    resumed_at = int(_number_after(done.stdout, ", after step "))
    assert resumed_at in (killed_at // SAVE_EVERY * SAVE_EVERY, (killed_at // SAVE_EVERY - 1) * SAVE_EVERY)
    assert 0 < resumed_at < STEPS

    output, text = whole
    assert _trajectory(tmp_path) == _trajectory(output)
    assert _number_after(done.stdout, "held-out loss: ") == _number_after(text, "held-out loss: ")
    one, two = (load_file(directory / "export" / "model.safetensors") for directory in (output, tmp_path))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def _trajectory(output: Path) -> list[tuple[int, float, float | None, float]]:
    def numbers(record: StepMetrics) -> tuple[int, float, float | None, float]:
        return record.step, record.loss, record.grad_norm, record.learning_rate

    return [numbers(record) for record in read_metrics(output / "metrics.jsonl")]


def _kill_a_rank(command: list[str], output: Path, *, after_step: int) -> int:
    """Start a run, kill rank 1 once a step is done and a checkpoint complete, and return the last step it wrote."""
    metrics = output / "metrics.jsonl"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environ()
    ) as launcher:
        try:
            deadline = time.monotonic() + 400
            while _lines(metrics) < after_step or latest_checkpoint(output / "checkpoints") is None:
                assert launcher.poll() is None, launcher.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            os.kill(_worker(launcher.pid, rank=1), signal.SIGKILL)
            _, errors = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2" in errors
    assert "was ended by SIGKILL" in errors
    return _lines(metrics)


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _worker(launcher_pid: int, *, rank: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = stat.with_name("environ").read_bytes().split(b"\0") if parent == launcher_pid else []
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    raise AssertionError(f"rank {rank} is not running")


@pytest.mark.full
def test_finished_run_has_nothing_to_do(whole: tuple[Path, str], inputs: Path) -> None:
    """Started again it trains no step, and leaves the same."""
    output, _ = whole
    before = _trajectory(output)
    done = _train(inputs, output)
    assert done.returncode == 0, done.stderr
    assert f"after step {STEPS}" in done.stdout
    assert "\nstep " not in done.stdout
    assert _trajectory(output) == before


@pytest.mark.full
def test_bad_data_ends_the_job_with_one_message(inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "x"}\n')
    done = _train(inputs, tmp_path / "out", "--data", str(path))
    assert done.returncode == 2
    assert done.stderr == (
        f"DataError: {path}, row 2: expected text in 'text', got NoneType (available: 'text', 'body')\n"
        "hint: select the field or column with --text-field; blank lines do not count as rows\n"
    )


@pytest.mark.full
def test_takes_part_under_torchrun(whole: tuple[Path, str], inputs: Path, tmp_path: Path) -> None:
    """Under a launcher the command starts no processes of its own, and the run is the same."""
    script = tmp_path / "entry.py"
    script.write_text("from fullshard.cli.main import main\nmain()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, *_without_count(_command(inputs, tmp_path))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=_environ(),
    )
    assert done.returncode == 0, done.stderr
    assert _trajectory(tmp_path) == _trajectory(whole[0])
