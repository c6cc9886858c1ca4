"""Padding of one transformer block for published models: the price of equal, aligned intervals."""

from __future__ import annotations

import math

import pytest

from fullshard.core.layout import ALIGNMENT_NBYTES, BucketLayout, ParameterSpec
from fullshard.core.sizes import round_up

LIMIT = 0.004
POWERS_OF_TWO = [2**k for k in range(11)]
ODD_WORLD_SIZES = [3, 5, 6, 7, 12, 24, 48, 96, 100, 1000]

Shapes = list[tuple[int, ...]]


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    q, kv = heads * head_dim, kv_heads * head_dim
    return [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]


def mlp(hidden: int, intermediate: int) -> Shapes:
    return [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


def qkv_biases(heads: int, kv_heads: int, head_dim: int) -> Shapes:
    return [(heads * head_dim,), (kv_heads * head_dim,), (kv_heads * head_dim,)]


def stacked_experts(experts: int, hidden: int, intermediate: int) -> Shapes:
    return [(experts, hidden, 2 * intermediate), (experts, intermediate, hidden)]


def gpt_oss_120b() -> Shapes:
    biases: Shapes = [(4096,), (512,), (512,), (2880,), (64,)]
    router: Shapes = [(128, 2880), (128,)]
    expert_biases: Shapes = [(128, 5760), (128, 2880)]
    experts = stacked_experts(128, 2880, 2880)
    return [*attention(2880, 64, 8, 64), *biases, *router, *experts, *expert_biases, (2880,), (2880,)]


def deepseek_v3_attention() -> Shapes:
    """Multi-head latent attention: low-rank query and key-value projections with a norm in between."""
    query: Shapes = [(1536, 7168), (1536,), (128 * (128 + 64), 1536)]
    key_value: Shapes = [(512 + 64, 7168), (512,), (128 * (128 + 128), 512)]
    return [*query, *key_value, (7168, 128 * 128)]


DEEPSEEK_V3_ROUTER: Shapes = [(256, 7168), (256,)]

BLOCKS: dict[str, Shapes] = {
    "Llama-3-70B": [*attention(8192, 64, 8, 128), *mlp(8192, 28672), (8192,), (8192,)],
    "Qwen2.5-0.5B": [*attention(896, 14, 2, 64), *qkv_biases(14, 2, 64), *mlp(896, 4864), (896,), (896,)],
    "Qwen2.5-7B": [*attention(3584, 28, 4, 128), *qkv_biases(28, 4, 128), *mlp(3584, 18944), (3584,), (3584,)],
    "Qwen3-4B": [*attention(2560, 32, 8, 128), (128,), (128,), *mlp(2560, 9728), (2560,), (2560,)],
    "Qwen3-30B-A3B, stacked experts": [
        *attention(2048, 32, 4, 128),
        *[(128,), (128,), (128, 2048)],
        *stacked_experts(128, 2048, 768),
        *[(2048,), (2048,)],
    ],
    "gpt-oss-120b": gpt_oss_120b(),
    "DeepSeek-V3 MoE layer": [
        *deepseek_v3_attention(),
        *DEEPSEEK_V3_ROUTER,
        *mlp(7168, 2048) * 257,
        *[(7168,), (7168,)],
    ],
}


def build(name: str, world_size: int, *, itemsize: int) -> BucketLayout:
    specs = [ParameterSpec(str(i), shape) for i, shape in enumerate(BLOCKS[name])]
    return BucketLayout.build(specs, itemsize=itemsize, world_size=world_size)


@pytest.mark.parametrize("itemsize", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_padding_is_small_at_every_world_size(name: str, itemsize: int) -> None:
    for world_size in POWERS_OF_TWO + ODD_WORLD_SIZES:
        layout = build(name, world_size, itemsize=itemsize)
        padding = 1 - layout.numel / layout.full_numel
        assert padding <= LIMIT, f"{name} over {world_size} ranks: {padding:.3%}"


@pytest.mark.parametrize("name", BLOCKS)
def test_no_layout_of_equal_aligned_intervals_is_smaller(name: str) -> None:
    """At most the few elements that align each parameter's start are above the least possible."""
    numel = sum(math.prod(shape) for shape in BLOCKS[name])
    for world_size in POWERS_OF_TWO + ODD_WORLD_SIZES:
        layout = build(name, world_size, itemsize=2)
        alignment = ALIGNMENT_NBYTES // 2
        least = round_up(-(-numel // world_size), alignment)
        between = len(BLOCKS[name]) * alignment
        assert least <= layout.shard_numel <= round_up(-(-(numel + between) // world_size), alignment)


def test_the_dimensions_are_those_of_the_published_models() -> None:
    """A block's share of the model's published size, which a mistyped dimension would miss."""
    expected = {
        "Llama-3-70B": 855_654_400,
        "Qwen3-4B": 100_930_816,
        "Qwen2.5-0.5B": 14_912_384,
    }
    for name, numel in expected.items():
        assert sum(math.prod(shape) for shape in BLOCKS[name]) == numel
