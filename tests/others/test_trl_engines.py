"""TRL's GRPO with vLLM, in the trainer's processes and as a server: the engine has every byte that an export has.

vLLM is a stand-in, `tests/fixtures/engine/vllm.py`, which generates with what it was sent.

pytest tests/others/test_trl_engines.py
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fullshard import stream_weights
from fullshard.core.errors import CheckpointError
from fullshard.features import shard_model
from fullshard.integrations.transformers.trl import _ending
from tests.checkpoint.test_checkpoint_export import _layers, _model
from tests.distributed import run_ranks
from tests.launching import free_port, launch, started
from tests.trl_runs import write_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "grpo_engine.py"
ENGINE = ROOT / "tests" / "fixtures" / "engine"
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl")
    write_model(directory)
    return directory / "model"


def environment(tmp_path: Path) -> dict[str, str]:
    path = f"{ENGINE}:{ROOT / 'src'}"
    (tmp_path / "received").mkdir(exist_ok=True)
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CI": "true", "ENGINE_RECEIVED": str(tmp_path / "received")}


def train(model: Path, tmp_path: Path, *words: str, **variables: str) -> Any:
    command = ("--num_processes", "2", "--cpu", str(SCRIPT), str(model), str(tmp_path), *words)
    return launch(*command, cwd=tmp_path, timeout=200, **environment(tmp_path), **variables)


def compare(tmp_path: Path, names: list[str], output: str) -> None:
    """What the engine was sent, against what was exported at that moment."""
    assert "sharded over 2 ranks" in output
    seen = []
    for count in range(STEPS):
        expected = load_file(tmp_path / f"expected-{count}" / "model.safetensors")
        for name in names:
            received = load_file(tmp_path / "received" / f"{name}-{count}.safetensors")
            assert received.keys() == expected.keys()
            for key, tensor in expected.items():
                assert received[key].dtype == tensor.dtype
                assert torch.equal(received[key], tensor), (count, name, key)
        seen.append(expected["model.layers.0.self_attn.q_proj.weight"])
    assert not torch.equal(seen[0], seen[-1])  # it has trained
    # TRL compares the engine's probabilities with the trainer's own.
    differences = [float(number) for number in re.findall(r"differs by (\S+)", output)]
    assert len(differences) == STEPS and max(differences) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("what", ["lora", "all"])
def test_in_the_same_processes(model: Path, tmp_path: Path, what: str) -> None:
    done = train(model, tmp_path, "colocate", what)
    assert done.returncode == 0, done.stderr[-4000:]
    compare(tmp_path, ["rank0", "rank1"], done.stdout + done.stderr)


@pytest.mark.full
@pytest.mark.parametrize("what", ["all", "lora"])
def test_a_server(model: Path, tmp_path: Path, what: str) -> None:
    port, way = str(free_port()), str(free_port())
    serve = (sys.executable, "-m", "vllm", str(model), port)
    with started(*serve, cwd=tmp_path, **environment(tmp_path)):
        done = train(model, tmp_path, "server", what, port, way)
    assert done.returncode == 0, done.stderr[-4000:]
    compare(tmp_path, ["server"], done.stdout + done.stderr)


@pytest.mark.full
def test_an_engine_that_dies_lets_nobody_wait(model: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    done = train(model, tmp_path, "colocate", "all", ENGINE_DIES_AT="rank1-1-3")
    assert done.returncode != 0
    said = r"streaming the weights: model\.layers\.0\.\S+ failed\nrank 1: RuntimeError: the engine is gone"
    assert re.search(said, done.stderr), done.stderr[-4000:]
    assert time.monotonic() - began < 100


def _gone_before_the_first() -> str:
    model = _model("llama")
    stream = stream_weights(shard_model(model, unit_modules=_layers(model)))
    try:
        with _ending(stream):
            if dist.get_rank() == 0:
                raise OSError("the server does not answer")
            list(stream)
    except (OSError, CheckpointError) as error:
        return str(error)
    return "nothing"


def test_an_engine_that_is_gone_before_the_first_tensor_lets_nobody_wait() -> None:
    said = run_ranks(_gone_before_the_first, 2)
    assert said[0] == said[1]
    assert said[0].endswith(" failed\nrank 0: OSError: the server does not answer")
