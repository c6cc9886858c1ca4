"""Transformers' `from_pretrained(distributed_config=...)` in a script that knows nothing of fullshard.

pytest tests/integrations/test_sharded_at_load.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from fullshard.api import Accelerator
from fullshard.core.errors import ConfigError
from fullshard.integrations.transformers.at_load import load_sharded, replace_from_pretrained
from tests.differential import CLOSE, TOLERANCE
from tests.distributed import end_workers, run_ranks
from tests.launching import launch

SCRIPT = Path(__file__).parents[1] / "scripts" / "distributed_config.py"


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("mixtral", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms whose gradients are a part on each rank; experts that pack two matrices into one."""
    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain Transformers makes of it in one process."""
    output = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(SCRIPT), str(model), str(output), "{}", "4", "anew"]
    subprocess.run(command, check=True, timeout=200)
    return {
        **json.loads((output / "history.json").read_text()),
        "weights": load_file(output / "final/model.safetensors"),
    }


def run(
    model: Path,
    output: Path,
    ranks: int,
    sizes: dict[str, int],
    steps: int,
    resume: str = "anew",
    script: Path = SCRIPT,
) -> list[Any]:
    arguments = [str(model), str(output), json.dumps(sizes), str(steps), resume]
    done = launch(
        "--num_processes",
        str(ranks),
        "--mixed_precision",
        "no",
        str(script),
        *arguments,
        cwd=output.parent,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history: list[Any] = json.loads((output / "history.json").read_text())["history"]
    return history


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(2, {"fsdp_size": 2}, marks=pytest.mark.full),
        pytest.param(4, {"fsdp_size": 2, "tp_size": 2}, marks=pytest.mark.full),
        pytest.param(4, {"fsdp_size": 2, "dp_replicate_size": 2}, marks=pytest.mark.full),
    ],
)
def test_it_trains_saves_and_resumes_on_other_ranks(
    model: Path, alone: dict[str, Any], tmp_path: Path, ranks: int, sizes: dict[str, int]
) -> None:
    output = tmp_path / "out"
    history = run(model, output, ranks, sizes, 2)
    assert [step for step, *_ in history] == [1, 2]
    # Trainer makes other groups of parameters where tensor parallelism has split some of a group and others not.
    is_mixed = "tp_size" in sizes and model.name.startswith("mixtral")
    history = run(model, output, *((ranks, sizes) if is_mixed else (1, {"fsdp_size": 1})), 4, "resume")
    assert len(history) == 4
    for got, expected in zip(history, alone["history"], strict=True):
        assert got == pytest.approx(expected, rel=TOLERANCE)
    weights = load_file(output / "final/model.safetensors")
    assert weights.keys() == alone["weights"].keys()
    for name, value in alone["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def check_gradients(path: str, sizes: dict[str, int]) -> None:
    """Logits and gradients of a model that is split are those of the whole one, on one batch for both ranks."""
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model: Any = load_sharded(type(plain), path, sizes, dtype=torch.float32)
    assert model.config.name_or_path == path
    if sizes.get("tp_size", 1) > 1:
        with pytest.raises(ConfigError, match=r"2 ranks share each layer of .*, but would get different batches"):
            Accelerator(cpu=True).prepare(model)
    for one in (plain, model):
        one(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in plain.named_parameters():
        sharded = model.get_parameter(name)
        torch.testing.assert_close(sharded.full_tensor(), parameter.detach(), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad, **CLOSE, msg=name)


def test_split_over_two_ranks(model: Path) -> None:
    end_workers()
    run_ranks(check_gradients, 2, str(model), {"tp_size": 2})


def test_experts_over_two_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["mixtral"]()).save_pretrained(tmp_path)
    run_ranks(check_gradients, 2, str(tmp_path), {"fsdp_size": 2, "ep_size": 2})


def test_what_is_refused(model: Path) -> None:
    for sizes, options, message in (
        ({"pp_size": 2}, {}, "pipeline parallelism"),
        ({"fsdp_size": 3, "ep_size": 2}, {}, "DistributedConfig: `ep_size` must divide"),
        ({"fsdp_size": 2}, {}, "dp_replicate 1 x fsdp 2 x tp 1, but the job has 1 rank"),
        ({"fsdp_size": 1}, {"device_map": "cpu"}, "device_map"),
        ({"fsdp_size": 1}, {"force_download": True}, "force_download"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_sharded(AutoModelForCausalLM, model, sizes, **options)


class Theirs:
    """Stands in for Transformers' class, which would stay changed for all other tests of the process."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *args: Any, **options: Any) -> Any:
        return cls, pretrained_model_name_or_path, args, options


def test_all_other_models_are_loaded_as_before() -> None:
    class Own(Theirs):
        pass

    replace_from_pretrained(SimpleNamespace(PreTrainedModel=Theirs))
    assert Own.from_pretrained("path", 1, dtype="auto") == (Own, "path", (1,), {"dtype": "auto"})
    assert Own.from_pretrained(pretrained_model_name_or_path="path") == (Own, "path", (), {})
    with pytest.raises(ConfigError, match="1 unexpected positional arguments"):
        Own.from_pretrained("path", 1, distributed_config={"fsdp_size": 1})
