"""Context, sequence and expert parallelism on two ranks that share a GPU: torch's ring, and exchanges over NCCL.

make test-gpu ARGS=tests/integrations/test_axes_on_a_gpu.py

In the full set the same is done on a CPU, so that on a GPU only what CUDA changes is new.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from fullshard import Accelerator, ParallelismConfig
from fullshard.integrations.transformers.at_load import load_sharded
from tests.differential import EPS
from tests.distributed import run_ranks

STEPS, LENGTH = 3, 128
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
WITHIN = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""How far losses and norms may be apart, relative to their size, after a few steps of other kernels. In float32, a
kernel of torch needs parts of 64 tokens."""


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch finds no GPU: these tests are for machines that have one")
    return str(request.param)


def batch(step: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 97, (2, LENGTH), generator=generator)
    labels = ids.index_fill(1, torch.arange(8), -100)
    following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return {
        name: value.to(device) for name, value in (("input_ids", ids), ("labels", labels), ("shift_labels", following))
    }


def train(device: str, dtype: torch.dtype, heads: int, sizes: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the loss and the norm of each step of a loop as people write it for Accelerate."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if device == "cuda":  # ranks may share one
        os.environ.update(LOCAL_RANK=str(torch.cuda.current_device()), LOCAL_WORLD_SIZE="1")
    config = ParallelismConfig(**sizes) if sizes else None
    accelerator = Accelerator(cpu=device == "cpu", parallelism_config=config)
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=heads, attn_implementation="sdpa")).to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    ranks, history = accelerator.num_processes, []
    for step in range(STEPS):
        given = batch(step, str(accelerator.device))
        items = (given["labels"][:, 1:] != -100).sum()
        if sizes.get("sp_size"):  # as the loader does it
            given["position_ids"] = torch.arange(LENGTH, device=accelerator.device)[None]
            rank = accelerator.process_index
            given = {name: value.chunk(ranks, dim=1)[rank].contiguous() for name, value in given.items()}
        buffers = list(given.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            loss = model(**given, num_items_in_batch=items).loss * ranks
            accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(accelerator.reduce(loss.detach().float(), "mean")), float(norm)))
    return history


AXES: dict[str, dict[str, Any]] = {
    "ring of all-gathers": {"cp_size": 2},
    "ring of all-to-alls": {"cp_size": 2, "cp_handler": "alltoall"},
    "Ulysses": {"sp_size": 2, "sp_backend": "fullshard"},
}


def train_on(axis: str, device: str, dtype: torch.dtype, heads: int) -> list[tuple[float, float]]:
    from accelerate.utils import TorchContextParallelConfig

    sizes = dict(AXES.get(axis, {}))
    if method := sizes.pop("cp_handler", None):
        sizes["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy=method)
    return train(device, dtype, heads, sizes)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 2)], ids=str)
def test_divided_sequences_train_as_whole_ones(axis: str, dtype: torch.dtype, heads: int, device: str) -> None:
    alone = run_ranks(train_on, 1, "", device, dtype, heads, kind=device)[0]
    found = run_ranks(train_on, 2, axis, device, dtype, heads, kind=device)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=WITHIN[dtype], atol=0.0)


def train_experts(path: str, device: str, sizes: dict[str, int] | None) -> list[tuple[float, float]]:
    os.environ.pop("ACCELERATE_USE_CPU", None)
    place = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
    model: Any
    if sizes is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(place)
    else:
        model = load_sharded(AutoModelForCausalLM, path, sizes, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    ranks, history = dist.get_world_size(), []
    for step in range(STEPS):
        given = batch(step, str(place))
        items = (given["labels"][:, 1:] != -100).sum()
        mine = {name: value[dist.get_rank() :: ranks] for name, value in given.items()}
        loss = model(**mine, num_items_in_batch=items).loss * ranks
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        history.append((float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
    return history


def test_experts_on_other_ranks_train_as_on_one(device: str, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SHAPE, num_key_value_heads=2, head_dim=32, num_experts=8, moe_intermediate_size=32, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    alone = run_ranks(train_experts, 1, str(tmp_path), device, None, kind=device)[0]
    found = run_ranks(train_experts, 2, str(tmp_path), device, {"fsdp_size": 2, "ep_size": 2}, kind=device)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=WITHIN[torch.float32], atol=0.0)
