"""Selective activation checkpointing: the numbers of plain training, bit for bit, and what is computed again.

pytest tests/engine/test_selective_checkpointing.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.core.errors import ConfigError, WrapError
from fullshard.features import shard_model
from fullshard.features.recompute import checkpoint_modules, compile_modules
from fullshard.features.unit_selection import unit_modules
from tests.distributed import run_ranks
from tests.traps import sharded_parameters

LAYERS, PRODUCTS = 2, 7
"""Layers of the model, and its products per layer: q, k, v, o, gate, up, down."""


class Executed(TorchDispatchMode):
    """Counts the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def make(mode: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    units = unit_modules(model)
    for unit in units:  # random numbers, which must come again
        unit.mlp = nn.Sequential(unit.get_submodule("mlp"), nn.Dropout(0.2))
    if mode != "plain":
        checkpoint_modules(model, units, selective=mode == "selective")
    sharded: nn.Module = shard_model(model, unit_modules=units, **options)
    return sharded


def train(mode: str, options: dict[str, Any], steps: int = 2) -> tuple[list[torch.Tensor], Counter[str]]:
    """Losses, gradients and weights on the way, and what the last backward executed."""
    model = make(mode, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    executed = Executed()
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(61, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        with executed:
            executed.counts.clear()
            loss.backward()
        seen.append(loss.detach())
        seen += [p.grad.full_tensor() for p in sharded_parameters(model).values() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.full_tensor() for p in sharded_parameters(model).values())], executed.counts


def check_numbers(options: dict[str, Any]) -> None:
    expected, plain = train("plain", options)
    counts = {"full": train("full", options)[1]}
    found, counts["selective"] = train("selective", options)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = {mode: {op: counts[mode][op] - plain[op] for op in ("mm", "silu")} for mode in counts}
    # Of the seven products q, v, gate and down are kept; activations and norms are made again.
    assert again["full"] == {"mm": PRODUCTS * LAYERS, "silu": LAYERS}
    assert again["selective"] == {"mm": 3 * LAYERS, "silu": LAYERS}
    attention = [op for op in counts["full"] if "attention" in op and "backward" not in op]
    assert len(attention) == 1
    assert counts["full"][attention[0]] == LAYERS
    assert counts["selective"][attention[0]] == 0


def test_numbers_are_those_of_plain_training() -> None:
    check_numbers({})


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies(world_size: int, strategy: str) -> None:
    run_ranks(check_numbers, world_size, {"strategy": strategy})


def test_what_cannot_be_selective_is_refused() -> None:
    from fullshard.config.schema import ShardingConfig
    from fullshard.recipes.arguments import TrainArguments

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(WrapError, match="cannot be selective"):
        checkpoint_modules(model, model, reentrant=True, selective=True)
    checkpoint_modules(model, model, selective=True)
    with pytest.raises(WrapError, match="individual operations"):
        compile_modules(model)
    compiled = nn.Sequential(nn.Linear(3, 3))
    compile_modules(compiled, backend="eager")
    with pytest.raises(WrapError, match="individual operations"):
        checkpoint_modules(compiled, compiled, selective=True)
    selective: dict[str, Any] = {"activation_checkpointing": True, "activation_checkpointing_mode": "selective"}
    for other in ("compile", "activation_checkpointing_reentrant"):
        with pytest.raises(ConfigError, match=f"which {other} hides"):
            ShardingConfig.of({**selective, other: True})
    with pytest.raises(ConfigError, match="activation_checkpointing is not"):
        ShardingConfig(activation_checkpointing_mode="selective")
    with pytest.raises(ConfigError, match="activation_checkpointing is not"):
        TrainArguments.of({"activation_checkpointing_mode": "selective"})
    with pytest.raises(ConfigError, match="which compile hides"):
        TrainArguments.of({**selective, "compile": True})
