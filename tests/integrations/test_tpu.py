"""TPUs, without one: a stand-in of torch_tpu on the simulated device, and what is said where there is none.

The stand-in is what torch imports as torch_tpu; see `tests/simulated/tpu`. Ranks are processes, started as users start
them. pytest tests/integrations/test_tpu.py
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fullshard.api.data import ShardedDataLoader
from fullshard.comm import device as devices
from fullshard.config.flags import parse
from fullshard.config.load import load_file
from fullshard.config.resolve import resolve
from fullshard.core import requirements
from fullshard.core.errors import ConfigError
from fullshard.launch.environment import RankEnvironment, check_tpu_environment, rank_device
from fullshard.launch.plan import make_plan
from tests.launching import launch
from tests.simulated.build import why_not

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "simulated" / "tpu"
SCRIPT = str(STAND_IN / "script.py")


def variables(tpus: int) -> dict[str, str]:
    """The environment of a host with that many."""
    return {"PYTHONPATH": f"{STAND_IN}:{ROOT / 'src'}:{ROOT}", "SIMULATED_TPUS": str(tpus)}


def trains(path: Path, ranks: int, *cases: dict[str, Any]) -> None:
    """What `script.py` does, on so many ranks."""
    if reason := why_not():
        pytest.skip(reason)
    flags = ("--config_file", "none", "--device", "tpu")
    text = json.dumps([{"ranks": ranks, **case} for case in cases])
    done = launch(*flags, SCRIPT, str(path / "outcome"), text, cwd=path, timeout=600, **variables(ranks))
    assert done.returncode == 0, done.stderr
    assert f"starting {ranks} process" in done.stderr and "tpu (tpu_dist)" in done.stderr
    outcome = json.loads((path / "outcome").read_text())
    assert outcome == {"wrong": [[]] * ranks, "backend": "cpu:gloo,tpu:tpu_dist"}


def test_two_ranks_train_as_on_the_cpu(tmp_path: Path) -> None:
    """Bit for bit; a checkpoint moves between the TPU and the CPU; float16 and a scaler are refused."""
    trains(
        tmp_path,
        2,
        {"precision": "bf16", "loop": "accumulating"},
        {"strategy": "SHARD_GRAD_OP", "precision": "bf16 stored"},
        {"offload": "everything", "activations": "on host"},
        {"offload": "main weights"},
    )


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_train_as_on_the_cpu(tmp_path: Path, ranks: int) -> None:
    several = [
        {"strategy": "HYBRID_SHARD", "precision": "bf16"},
        {"strategy": "HYBRID_SHARD_ZERO2", "loop": "no_sync"},
        {"strategy": "NO_SHARD"},
        {"precision": "packed"},
    ]
    alone = [{"offload": "main weights"}, {"offload": "optimizer state", "precision": "bf16"}]
    zero = [
        {"strategy": "SHARD_OPTIMIZER", "loop": "accumulating"},
        {"strategy": "SHARD_GRAD_OPTIMIZER", "loop": "no_sync"},
    ]
    common = [{}, *zero, {"loop": "in backward"}]
    trains(tmp_path, ranks, *common, *(several if ranks > 1 else alone))


TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
size = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
)
rows = [{"input_ids": r, "labels": r} for r in torch.arange(32 * 16).view(32, 16) % 64]
args = TrainingArguments(
    sys.argv[1], max_steps=4, per_device_train_batch_size=4, report_to="none", save_strategy="no", logging_steps=1,
    learning_rate=1e-2, bf16=True, fsdp="full_shard",
    fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
)
trainer = Trainer(LlamaForCausalLM(size), args, train_dataset=rows)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
assert float(losses[-1]) < float(losses[0]), losses
print("trained on", args.device, next(trainer.model.parameters()).device)
"""


@pytest.mark.full
def test_a_trainer_runs_on_them(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(TRAINER)
    flags = ("--config_file", "none", "--device", "tpu")
    done = launch(*flags, "train.py", str(tmp_path / "out"), cwd=tmp_path, timeout=300, **variables(2))
    assert done.returncode == 0, done.stderr
    assert "trained on tpu:0 tpu:0" in done.stdout


@pytest.mark.full
def test_doctor_tries_them(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    code = "from fullshard.cli.main import main; main()"
    command = [sys.executable, "-c", code, "doctor", "--run", "-n", "2", "--device", "tpu", "--json"]
    environ = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(Path.home()), **variables(2)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=False, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["report"]["torch"]["accelerator"] == "tpu, 2 here", done.stderr
    assert found["trial"]["exit_code"] == 0 and found["trial"]["facts"]["device"] == "tpu", done.stderr
    assert not [text for text in found["trial"]["checks"].values() if text.startswith("wrong")]


# -- where there is none ------------------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """That these are installed."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or version(name))


def planned(*flags: str) -> Any:
    line = parse([*flags, "train.py"])
    return make_plan(line, line.readings(), {})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"device = tpu, and torch_tpu is not installed\nhint: pip install torch_tpu"):
        planned("--device", "tpu")
    pretend(monkeypatch, torch_tpu="0.2.0")
    monkeypatch.setattr(requirements, "tpu_nodes", list)
    with pytest.raises(ConfigError, match=r"torch_tpu 0\.2\.0 finds no TPU: this host has neither /dev/accel\*"):
        rank_device(RankEnvironment(), "tpu")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ConfigError, match="keeps torch from importing torch_tpu"):
        rank_device(RankEnvironment(), "tpu")


def test_doctor_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.launch import doctor

    report: Any = {"torch": {"accelerator": "none"}}
    monkeypatch.setattr(doctor, "tpu_nodes", list)
    assert list(doctor._tpu(report, "auto")) == []
    assert [f.text for f in doctor._tpu(report, "tpu")] == ["device = tpu, and torch_tpu is not installed"]
    monkeypatch.setattr(doctor, "tpu_nodes", lambda: ["/dev/accel0", "/dev/accel1"])
    (finding,) = doctor._tpu(report, "auto")
    assert finding.text == "this host shows a TPU (/dev/accel0), and torch_tpu is not installed" and finding.is_wrong
    assert list(doctor._tpu({"torch": {"accelerator": "tpu, 4 here"}}, "tpu")) == []


@pytest.mark.parametrize("text", ["distributed_type: XLA", "xla: true", "xla_fsdp_v2: true"])
def test_keys_of_xla_ask_for_tpus_where_torch_tpu_is(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\n")
    pretend(monkeypatch, torch_tpu="0.2.0")
    found = resolve([load_file(path)])
    assert found.config.launch.device == "tpu"
    assert any("is translated to launch.device = tpu" in str(note) for note in found.notes)


def test_ranks_without_their_addresses_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", raising=False)
    check_tpu_environment(1)
    with pytest.raises(ConfigError, match=r"has 0 addresses for 4 ranks\nhint: start with `fullshard launch`"):
        check_tpu_environment(4)


def test_workers_of_a_loader_are_not_forked() -> None:
    tpu = devices.Traits(may_fork=False)
    with pytest.MonkeyPatch.context() as within:
        within.setitem(devices._TRAITS, "cpu", tpu)
        data: Any = torch.arange(8)
        loader: Any = DataLoader(data, num_workers=2)
        sharded = ShardedDataLoader(loader, device=torch.device("cpu"))
        assert sharded.multiprocessing_context.get_start_method() == "spawn"
        forking: Any = DataLoader(data, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(ConfigError, match="not to be forked"):
            ShardedDataLoader(forking, device=torch.device("cpu"))
