"""Sequence parallelism: models whose sequences are cut over ranks, against one process with whole sequences.

pytest tests/features/sequence_parallel/test_sequence_parallel.py
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from fullshard.comm.torch_private import default_store
from fullshard.core.errors import CommunicationError, ConfigError, DataError
from fullshard.features.sequence_parallel import cut_batch, split_sequences
from tests.distributed import run_ranks

STEPS, SEQUENCES, LENGTH, WORDS = 5, 2, 30, 128
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2}),
    "one key head": ("Qwen3Config", {"num_key_value_heads": 1}),
    "moe": (
        "Qwen3MoeConfig",
        {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "sliding": ("Gemma3TextConfig", {"num_key_value_heads": 1, "sliding_window": 5, "layer_types": LAYERS}),
    "sinks": (
        "GptOssConfig",
        {
            **{"num_key_value_heads": 2, "sliding_window": 5, "layer_types": LAYERS},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"},
        },
    ),
    "values of another size": (
        "DeepseekV3Config",
        {
            **{
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "head_dim": 8,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 12,
            },
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2},
            **{"topk_group": 1, "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        },
    ),
}


def build(name: str, **more: Any) -> Any:
    import transformers

    cls, fields = MODELS[name]
    config = getattr(transformers, cls)(**{"num_hidden_layers": 3, **SIZES, **fields, **more})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation or "sdpa"
    )


def world() -> Any:
    return dist.group.WORLD


def batches(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return batches whose first rank has no label, with padding or packed documents if asked for."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (SEQUENCES, LENGTH))
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch["labels"][:, :17] = -100
        if kind in ("left", "right"):
            rows = slice(0, 9) if kind == "left" else slice(20, None)
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, rows] = 0
            batch["labels"][0, rows] = -100
        if kind == "packed":
            positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])
            batch["position_ids"] = positions.expand(SEQUENCES, -1).contiguous()
        found.append(batch)
    return found


def train(model: Any, kind: str, cut: Any = dict, ranks: int = 1) -> list[float]:
    """Return the losses, the norms and the weights, on a rank those of all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for batch in batches(kind):
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**cut(batch), num_items_in_batch=count).loss * ranks
        if kind == "recomputed":  # the evaluation must not change what backward computes again
            with torch.no_grad():
                model.eval()(batch["input_ids"])
            model.train()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        found += [float(loss) / ranks, float(getattr(norm, "full_tensor", lambda norm=norm: norm)())]
    sums = (getattr(p, "full_tensor", lambda p=p: p)().detach().double().norm() for p in model.parameters())
    return [*found, *map(float, sums)]


def alone(name: str, kind: str, **more: Any) -> list[float]:
    return train(build(name, use_cache=False, **more).train(), kind)


def check_split(cases: list[tuple[str, str]], options: dict[str, Any]) -> list[list[float]]:
    found = []
    for name, kind in cases:
        model = build(name, use_cache=False).train()
        if kind == "recomputed":
            model.gradient_checkpointing_enable()
        split = split_sequences(model, world(), **options)
        for layer in model.model.layers:
            fully_shard(layer)
            if kind == "compiled":
                layer.compile(backend="eager")
        fully_shard(model)
        found.append(train(model, kind, lambda b, s=split: cut_batch(b, rank=s.rank, size=s.size), split.size))
    return found


def compare(cases: list[tuple[str, str]], ranks: int = 2, **options: Any) -> None:
    for found in run_ranks(check_split, ranks, cases, options):
        for (name, kind), numbers in zip(cases, found, strict=True):
            torch.testing.assert_close(numbers, alone(name, kind), **TOLERANCE, msg=f"{name}, {kind}: {numbers}")


def test_against_one_process() -> None:
    compare([("one key head", "right")])


def check_whole(cases: list[tuple[str, str]], heads: int) -> list[list[float]]:
    """Train on whole batches with a loss outside the model, which gets the logits of whole sequences."""
    found = []
    for name, kind in cases:
        model = build(name, use_cache=False, output_router_logits="moe" in name).train()
        if kind == "recomputed":
            model.gradient_checkpointing_enable()
        if dist.get_world_size() > 1:
            split_sequences(model, world())
            for layer in model.model.layers:
                fully_shard(layer)
                if kind == "compiled":
                    layer.compile(backend="eager")
            fully_shard(model)
        found.append(train(model, kind))
        batch = {name: value for name, value in batches(kind)[0].items() if name != "labels"}
        seen: list[torch.Size] = []
        model.model.norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape))
        output = model(**batch, output_hidden_states=True, logits_to_keep=heads)
        assert seen == [(SEQUENCES, -(-LENGTH // dist.get_world_size()), 64)]
        assert output.logits.shape[1] == heads and output.hidden_states[-1].shape[1] == LENGTH
        found[-1] += [float(output.logits.double().norm()), *(float(h.double().norm()) for h in output.hidden_states)]
    return found


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_batches_are_cut_in_the_model(ranks: int) -> None:
    cases = [("llama", "right"), ("moe", "whole"), ("sliding", "left"), ("llama", "recomputed"), ("qwen3", "packed")]
    cases += [("llama", "compiled")]
    alone = run_ranks(check_whole, 1, cases, 3)[0]
    for found in run_ranks(check_whole, ranks, cases, 3):
        torch.testing.assert_close(found, alone, **TOLERANCE)


@pytest.mark.full
def test_models_against_one_process() -> None:
    compare([(name, "whole") for name in MODELS])


@pytest.mark.full
def test_kinds_of_batches() -> None:
    kinds = ("left", "packed", "recomputed", "compiled")
    compare([(name, kind) for name in ("llama", "sliding") for kind in kinds])


@pytest.mark.full
def test_four_ranks_with_fewer_key_heads() -> None:
    compare([("llama", "right"), ("one key head", "packed"), ("sinks", "whole")], ranks=4)


@pytest.mark.full
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_deepspeeds_attention() -> None:
    cases = [("llama", "packed"), ("one key head", "right"), ("sliding", "left"), ("moe", "recomputed")]
    compare(cases, by_deepspeed=True)
    with pytest.raises(RuntimeError, match="cannot compute the attention of GptOssForCausalLM"):
        compare([("sinks", "whole")], by_deepspeed=True)


def varlen(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Attend within documents, which an implementation that is named flash finds in the positions."""
    assert mask is None
    starts = kwargs["position_ids"] == 0
    documents = starts.cumsum(1)
    allowed = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    groups = query.shape[1] // key.shape[1]
    assert module.num_key_value_groups == groups
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=kwargs["scaling"])
    return out.transpose(1, 2), None


def check_varlen() -> list[float]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("flash_of_test", varlen)
    AttentionMaskInterface.register("flash_of_test", flash_attention_mask)
    model = build("one key head", use_cache=False).train()
    model.config._attn_implementation = "flash_of_test"
    split = split_sequences(model, world(), implementation="flash_of_test")
    fully_shard(model)
    return train(model, "packed", lambda batch: cut_batch(batch, rank=split.rank, size=2), 2)


@pytest.mark.full
def test_flash_attention_gets_whole_positions() -> None:
    for numbers in run_ranks(check_varlen, 2):
        torch.testing.assert_close(numbers, alone("one key head", "packed"), **TOLERANCE)


# -- what is refused ------------------------------------------------------------------------------------------------


def check_refusals() -> None:
    group = world()
    batch = cut_batch(batches("whole")[0], rank=dist.get_rank(), size=2)
    model = build("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    split_sequences(model, group)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has 3 attention heads and 3 key .* over sp_size = 2"):
        model(**batch)
    model = build("llama").train()
    split_sequences(model, group)
    with pytest.raises(DataError, match="got no position_ids"):
        model(batch["input_ids"])
    with pytest.raises(DataError, match="batches of different tokens"):
        model(torch.ones(2, 4 + dist.get_rank()).long())
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="causal attention, but LlamaAttention has none"):
        model(**batch)
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    split_sequences(model, group)
    with pytest.raises(ConfigError, match="never called its attention"):
        model(**batch)
    with pytest.raises(ConfigError, match=r"sp_attn_implementation = 'eager', but .* has .* 'sdpa'"):
        split_sequences(model, group, implementation="eager")
    with pytest.raises(ConfigError, match="needs a model of Transformers, but Linear"):
        split_sequences(nn.Linear(2, 2), group)
    model.config.layer_types = ["linear_attention", "full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match="layers of type chunked_attention, linear_attention"):
        split_sequences(model, group)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=r"deepspeed.*\n.*sp_backend=.fullsh"):
        patch.setitem(sys.modules, "deepspeed", None)
        split_sequences(build("llama"), group, by_deepspeed=True)


def check_generation() -> None:
    """Generation and evaluations with the same batch on each rank have whole sequences, others have cut ones."""
    plain, model = build("llama").eval(), build("llama").eval()
    split = split_sequences(model, world())
    prompt = torch.arange(3)[None]
    expected = plain.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    batch = batches("whole")[0]
    whole = plain(**batch).logits.chunk(2, dim=1)[split.rank]
    torch.testing.assert_close(model(**cut_batch(batch, rank=split.rank, size=2)).logits, whole, **TOLERANCE)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    ids, positions = batch["input_ids"], torch.arange(LENGTH).expand(SEQUENCES, -1)
    for more in ({}, {"position_ids": positions}):
        assert torch.equal(model(ids, **more).logits, plain(ids).logits)
        assert not split.is_split


@pytest.mark.full
def test_refusals_and_generation() -> None:
    run_ranks(check_refusals, 2)
    run_ranks(check_generation, 2)


def check_left_out() -> None:
    """Rank 1 fails in the second forward, where rank 0 waits to exchange heads with it."""
    model = build("llama", use_cache=False)
    split = split_sequences(model, dist.new_group())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    cut = [cut_batch(batch, rank=split.rank, size=2) for batch in batches("whole")]
    model(**cut[0]).loss.backward()
    if split.rank == 1:
        model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(**cut[1])
        default_store().wait(["told"])  # stay until the other has found out
        return
    with pytest.raises(
        CommunicationError, match=r"rank 0, exchanging attention heads .*: rank 1 had an error.*ZeroDiv"
    ):
        model(**cut[1])
    default_store().set("told", "")


@pytest.mark.full
def test_a_rank_that_leaves_an_exchange_out_is_named() -> None:
    run_ranks(check_left_out, 2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_cut_batches(rank: int) -> None:
    ids = torch.arange(1, 15).view(2, 7)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "n": torch.tensor(3), "x": "y"}
    part = cut_batch(batch, rank=rank, size=3)
    expected = {
        "input_ids": [[1, 2, 3], [4, 5, 6], [7, 0, 0]],
        "labels": [[1, 2, 3], [4, 5, 6], [7, -100, -100]],
        "shift_labels": [[2, 3, 4], [5, 6, 7], [-100, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 1, 1], [1, 0, 0]],
        "position_ids": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
    }
    assert {name: part[name][0].tolist() for name in expected} == {n: v[rank] for n, v in expected.items()}
    assert part["n"] is batch["n"] and part["x"] == "y" and "shift_labels" not in batch


def test_batches_that_cannot_be_cut() -> None:
    ids = torch.ones(2, 6).long()
    assert cut_batch({"input_ids": ids, "cu_seq_lens_q": torch.arange(4)}, rank=0, size=2)["cu_seq_lens_q"].numel() == 4
    for batch, match in (
        (
            {"input_ids": ids, "pixel_values": torch.ones(2, 3, 4, 4)},
            r"cannot cut pixel_values of shape \(2, 3, 4, 4\)",
        ),
        ({"input_ids": ids, "labels": torch.ones(2).long()}, r"cannot cut labels of shape"),
        ({"input_ids": ids[:, :5], "cu_seq_lens_q": torch.arange(4)}, "not a multiple of sp_size = 2, and packed"),
        ({"x": ids}, "got dict"),
        ([ids], "got list"),
    ):
        with pytest.raises(DataError, match=match):
            cut_batch(batch, rank=0, size=2)
    with pytest.raises(DataError, match="6 tokens per sequence, but sp_seq_length is 8"):
        cut_batch({"input_ids": ids}, rank=0, size=2, length=8)
