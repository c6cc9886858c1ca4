"""Expert parallelism by Transformers' words: `from_pretrained(distributed_config=DistributedConfig(ep_size=...))`.

pytest tests/integrations/test_expert_parallelism.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from fullshard.checkpoint import full_state_dict
from fullshard.core.errors import ConfigError
from fullshard.integrations.transformers.at_load import load_sharded
from tests.distributed import preload, run_ranks

preload("fullshard.integrations.transformers.at_load", "transformers.distributed.expert_parallel")

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE, head_dim=8, num_experts=8),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, head_dim=8, num_local_experts=8, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, **MOE, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, first_k_dense_replace=1,
    ),
    "llama": lambda: LlamaConfig(**SHAPE),
}  # fmt: skip
EP: dict[int, dict[str, Any]] = {2: {"fsdp_size": 2, "ep_size": 2}, 4: {"fsdp_size": 4, "ep_size": 2}}
ROWS, STEPS, MICRO_BATCHES = 8, 5, 2


def saved(name: str, directory: Path) -> str:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory / name)
    return str(directory / name)


def load(path: str, sizes: dict[str, Any] | None, **options: Any) -> Any:
    if sizes is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    return load_sharded(AutoModelForCausalLM, path, sizes, dtype=torch.float32, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels. The number of labels that count differs between rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, 12), generator=generator)
    kept = torch.arange(12) >= torch.randint(0, 9, (ROWS, 1), generator=generator)
    return tokens, tokens.where(kept, -100)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1
) -> list[tuple[float, float]]:
    """Return the loss and the norm of the gradients of each step, which accumulates micro-batches."""
    history = []
    for step in steps:
        tokens, labels = batch(step)
        count = int((labels[:, 1:] != -100).sum())
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            rows = slice(rank * MICRO_BATCHES + micro, None, ranks * MICRO_BATCHES)
            loss = model(input_ids=tokens[rows], labels=labels[rows], num_items_in_batch=count).loss
            (loss * ranks).backward()
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
    return history


def check_equal(path: str, sizes: dict[str, Any], expected: Any) -> None:
    """The model trains as one process does, and each rank has read only its own experts."""
    history, weights = expected
    model = load(path, sizes)
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    held = sum(parameter.to_local().numel() for parameter in experts)
    assert 0 < held <= sum(parameter.numel() for parameter in experts) // dist.get_world_size() + 64
    got = train(model, adam(model), range(STEPS), dist.get_rank(), dist.get_world_size())
    torch.testing.assert_close(torch.tensor(got), torch.tensor(history), rtol=2e-6, atol=0)
    for name, value in full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=2e-6, msg=name)


def check_step_and_refusals(path: str, dense: str, expected: list[tuple[float, float]]) -> None:
    model = load(path, EP[2])
    got = train(model, adam(model), range(1), dist.get_rank(), 2)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=2e-6, atol=0)
    for given, options, message in (
        (dense, {}, "`ep_size=2` was requested, but `LlamaForCausalLM` has no `ep_plan`"),
        (path, {"ep_implementation": "by_post"}, "'by_post'` names no registered implementation: use one of 'auto'"),
        (path, {"ep_implementation": "all_reduce"}, "needs every rank of the expert group to hold the same batch"),
        (path, {"ep_implementation": "deepgemm_megamoe"}, "its kernel has no backward"),
        (path, {"ep_plan": {"model.layers.*.mlp.experts": "grouped_gemm"}}, "matches no experts"),
        (path, {"ep_plan": {"model.layers.*.mlp.expert": "grouped_gemm"}}, "match nothing in Qwen3MoeForCausalLM"),
    ):
        with pytest.raises(ConfigError) as error:
            load(given, {**EP[2], **options})
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="Cannot evenly shard 7 experts across 2 expert-parallel ranks"):
        load(path, EP[2], num_experts=7)


@pytest.mark.full
def test_one_step_and_what_is_refused(tmp_path: Path) -> None:
    path, dense = saved("qwen3_moe", tmp_path), saved("llama", tmp_path)
    plain = load(path, None)
    run_ranks(check_step_and_refusals, 2, path, dense, train(plain, adam(plain), range(1)))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_training_equals_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    plain = load(path, None)
    expected = train(plain, adam(plain), range(STEPS)), plain.state_dict()
    run_ranks(check_equal, ranks, path, EP[ranks], expected)
