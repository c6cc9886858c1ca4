"""Plans of context, sequence and expert parallelism: bytes counted by hand, published figures, refusals and `--auto`.

pytest -s tests/plan/test_plan_axes.py        prints predicted, published and their ratio
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.api.virtual.rehearsal import time_step
from fullshard.api.virtual.simulation import simulate, transformers_model
from fullshard.cli.main import app
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.plan.activations import layer_activations
from fullshard.plan.evaluate import Plan, changes_that_fit, evaluate, notes_of
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import BALANCE, Job
from fullshard.plan.library import MODELS, load_model
from fullshard.plan.report import as_run_config
from fullshard.plan.search import search
from fullshard.plan.time import CONTENTION

GIB = 2**30
TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = 64


def tiny(devices: str = "8xH100", **settings: Any) -> Plan:
    job = Job.of({"seq_len": TOKENS, "loss": "fused", **settings})
    return evaluate(from_config(TINY, where="test")[0], job, parse_cluster(devices))


@pytest.mark.parametrize(("checkpointing", "gathers"), [("none", 2), ("selective", 2), ("full", 3)])
def test_bytes_of_a_ring(checkpointing: str, gathers: int) -> None:
    """Per layer, keys and values of 2 heads of 4 each: gathered in bfloat16, and their gradients sent on in float32."""
    plan = tiny(cp=4, checkpointing=checkpointing, accumulation=3)
    tokens, width = TOKENS // 4, 2 * 2 * 4
    gathered, ring = 3 * tokens * width * 2, 4 * tokens * width * 4
    assert plan.traffic.cp_nbytes == 3 * 2 * (gathers * gathered + ring)
    assert plan.traffic.sp_nbytes == plan.traffic.ep_nbytes == 0


@pytest.mark.parametrize(("checkpointing", "repeated"), [("none", 0), ("selective", 1), ("full", 1)])
def test_bytes_of_heads(checkpointing: str, repeated: int) -> None:
    """For 4 ranks, 2 heads of keys and values are 4; so q and o are twice as wide as k and v."""
    plan = tiny(sp=4, checkpointing=checkpointing)
    tokens, (q, k) = TOKENS // 4, (8 * 4, 4 * 4)
    once = (2 * q + 2 * k) * tokens * 2 * 3 // 4
    assert plan.traffic.sp_nbytes == 2 * (2 + repeated) * once


def test_bytes_of_tokens() -> None:
    plan = tiny(ep=4, ep_imbalance=1.5, checkpointing="full")
    there = TOKENS * 2 * 32 * 2 * 1.5 * 3 / 4
    assert plan.traffic.ep_nbytes == 2 * 6 * there


def test_experts_are_divided_and_sharded_over_the_rest() -> None:
    """Of 8 ranks, 4 hold different experts, and 2 share each of them; everything else is over all 8."""
    one, four = tiny(), tiny(ep=4)
    assert four.parameters == one.parameters and four.trainable == one.trainable
    assert four.memory.checkpoint == pytest.approx(one.memory.checkpoint, rel=1e-6)
    assert four.memory.persistent == pytest.approx(one.memory.persistent, rel=0.02)  # padding
    layer = four.setting.layout.units[0]
    dense, experts = sorted(layer.buckets, key=lambda bucket: bucket.layout.world_size, reverse=True)
    assert (dense.layout.world_size, experts.layout.world_size) == (8, 2)
    assert experts.layout.numel == 8 * 3 * 16 * 32 // 4
    # A rank sends its half of a quarter of the experts to one other rank, in place of an eighth to seven others.
    of_experts = 2 * 8 * 3 * 16 * 32 // 8
    sent = [plan.traffic.gather_nbytes for plan in (one, four)]
    assert sent[0] - sent[1] == pytest.approx(2 * 2 * of_experts * (7 - 1), rel=0.02)
    assert four.traffic.reduce_nbytes < one.traffic.reduce_nbytes
    assert layer.decoded_nbytes == 0 and Offload() == four.setting.on_host


def test_a_sequence_is_shared() -> None:
    """Tokens of a step, FLOP and activations are those of a part of the sequence, and parameters of all ranks."""
    shape, _ = load_model("Llama-3.1-8B")
    settings = {"checkpointing": "full", "seq_len": 65536, "loss": "fused"}
    one, ring, heads = (
        evaluate(shape, Job.of({**settings, **axes}), parse_cluster("8xH100")) for axes in ({}, {"cp": 4}, {"sp": 4})
    )
    for plan in (ring, heads):
        assert plan.time.tokens == one.time.tokens // 4 == 2 * 65536
        assert plan.time.model_flops == pytest.approx(one.time.model_flops / 4)
        assert plan.setting.layout == one.setting.layout
        layer, whole = (layer_activations(shape.blocks[0], p.job, p.setting.device) for p in (plan, one))
        assert layer.kept == whole.kept // 4
        # Each sequence takes a quarter of the time on four times the ranks, and what is sent.
        assert one.time.total < 4 * plan.time.total < 1.15 * one.time.total
    assert ring.memory.needed < one.memory.needed and heads.memory.needed < one.memory.needed


def test_a_ring_holds_all_keys_for_a_moment() -> None:
    """They are the most that a layer has at a time if the feed-forward part is narrow."""
    values = {**TINY, "model_type": "qwen3", "intermediate_size": 4, "num_key_value_heads": 8, "head_dim": 16}
    block = from_config(values, where="test")[0].blocks[0]
    device = parse_cluster("1xH100").device
    one, eight = (layer_activations(block, Job.of({"seq_len": TOKENS, "cp": cp}), device) for cp in (1, 8))
    keys, queries = 2 * 8 * 16, 8 * 16
    assert one.working < eight.working
    freed = 2 * 4 * 4  # what the feed-forward part has kept
    assert eight.working == TOKENS // 8 * (9 * keys * 2 + (4 + 2) * (queries + keys) + 8 * keys - freed)


def test_the_busiest_rank_sets_the_pace() -> None:
    shape, _ = load_model("Qwen3-30B-A3B")
    settings = {"checkpointing": "full", "seq_len": 4096, "loss": "fused", "ep": 8}
    even, uneven = (
        evaluate(shape, Job.of({**settings, "ep_imbalance": each}), parse_cluster("8xH100")) for each in (1.0, 2.0)
    )
    assert uneven.time.compute > 1.2 * even.time.compute
    assert uneven.traffic.ep_nbytes == 2 * even.traffic.ep_nbytes
    assert uneven.memory.peak_of("backward") > even.memory.peak_of("backward")
    assert uneven.time.model_flops == even.time.model_flops
    assert Job.of({"ep": 8}).load == BALANCE and any("2 times the average" in note for note in notes_of(uneven))


def seconds(settings: dict[str, Any], *, link: float = 1e7, flops: float = 1e18) -> float:
    """Return the time of a step of the small model on 4 devices with slow links, so that it is that of messages."""
    cluster = parse_cluster("4xH100")
    device = dataclasses.replace(cluster.device, link=link, link_efficiency=1.0, flops=flops)
    job = Job.of({"seq_len": 2**14, "loss": "fused", **settings})
    return evaluate(from_config(TINY, where="test")[0], job, dataclasses.replace(cluster, device=device)).time.total


def test_layers_wait_for_what_they_send() -> None:
    """Beside what shards send, which is the same with as many tokens per rank."""
    alone = seconds({"seq_len": 2**12})
    for axis in ("cp", "sp"):
        plan = tiny("4xH100", **{axis: 4, "seq_len": 2**14})
        sent = plan.traffic.cp_nbytes + plan.traffic.sp_nbytes
        assert seconds({axis: 4}) - alone == pytest.approx(sent / 1e7, rel=0.01)
    even, uneven = (seconds({"ep": 4, "ep_imbalance": each}) for each in (1.0, 2.0))
    more = tiny("4xH100", ep=4, ep_imbalance=1.0, seq_len=2**14).traffic.ep_nbytes
    assert uneven - even == pytest.approx(more / 1e7, rel=0.01)


def test_attention_hides_a_ring_but_not_its_last_round() -> None:
    """If attention is slow, a step waits for a quarter of the gradients' ring, and all that is sent slows attention."""
    slow: dict[str, Any] = {"flops": 1e9, "link": 1e6}
    ring, faster = (seconds({"cp": 4}, **{**slow, "link": link}) for link in (1e6, 2e6))
    gradients = 2 * 4 * 2**12 * (2 * 2 * 4) * 4
    shards = seconds({"seq_len": 2**14}, **slow) - seconds({"seq_len": 2**14}, **{**slow, "link": 2e6})
    slowed = CONTENTION * tiny("4xH100", cp=4, seq_len=2**14).traffic.cp_nbytes
    assert ring - faster - shards == pytest.approx((gradients / 4 + slowed) * (1e-6 - 0.5e-6), rel=0.05)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run: tokens per second and device, or bytes per device."""

    name: str
    model: str
    devices: str
    job: dict[str, Any]
    published: float
    is_memory: bool = False
    reason: str = ""


TITAN = (
    "torchtitan, docs/performance.md of 2024-12 (ring, gathered), linear layers in float8, which the plan has in bf16"
)
AUTOMODEL = "NeMo Automodel, summary and configurations of 2025-10, Transformer Engine, DeepEP, balanced on purpose"
ULYSSES = "Hugging Face's article on Ulysses of 2026-03 (ZeRO-3, FlashAttention 2), as others quote it"
_RING = {"compile": True, "checkpointing": "full"}
_EXPERTS = {"seq_len": 4096, "ep_imbalance": 1.0, "loss": "plain", "compile": True, "optimizer": "adamw"}
_EXPERTS |= {"experts": "kernel", "attention": "flash", "base_dtype": "bfloat16", "precision": "no"}
_UNEVEN = "each block of attention after the first takes 1.7 times as long as it (docs/planning.md)"
ROWS = [
    Row("8B, 2 x 64k", "Llama-3.1-8B", "8xH100", {**_RING, "cp": 2, "seq_len": 65536}, 2540),
    Row("8B, 4 x 128k", "Llama-3.1-8B", "8xH100", {**_RING, "cp": 4, "seq_len": 131072}, 1071, reason=_UNEVEN),
    Row("8B, 8 x 256k", "Llama-3.1-8B", "8xH100", {**_RING, "cp": 8, "seq_len": 262144}, 548, reason=_UNEVEN),
    Row("70B, cp 2", "Llama-3.1-70B", "64xH100",
        {**_RING, "cp": 2, "seq_len": 8192, "accumulation": 4, "attention": "flash3"}, 866.77),
    Row("gpt-oss-20b, ep 8", "gpt-oss-20b", "8xH100",
        {**_EXPERTS, "ep": 8, "micro_batch": 2, "accumulation": 16, "checkpointing": "full"}, 13058),
    Row("gpt-oss-120b, ep 64", "gpt-oss-120b", "64xH100",
        {**_EXPERTS, "ep": 64, "micro_batch": 2, "accumulation": 4}, 7626),
    Row("Qwen3-30B-A3B, ep 8", "Qwen3-30B-A3B", "8xH100",
        {**_EXPERTS, "ep": 8, "micro_batch": 4, "accumulation": 16, "checkpointing": "full", "attention": "flash3",
         "strategy": "SHARD_GRAD_OP"}, 12040),
    *(
        Row(f"Qwen3-4B, sp 4, {length}k", "Qwen3-4B", "4xH100",
            {"sp": 4, "seq_len": length * 1024, "checkpointing": "full"}, gb * 1e9, is_memory=True)
        for length, gb in ((8, 22.8), (64, 50.5), (96, 66.0))
    ),
]  # fmt: skip
"""Sources: `TITAN` of 8B, `ULYSSES` of Qwen3-4B, and `AUTOMODEL` of the others."""


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_published_figures(row: Row) -> None:
    plan = evaluate(load_model(row.model)[0], Job.of(row.job), parse_cluster(row.devices))
    predicted = plan.memory.needed if row.is_memory else plan.time.tokens_per_second / plan.cluster.count
    ratio = predicted / row.published
    print(f"\n{row.name}: predicted {predicted:.5g}, published {row.published:.5g}, ratio {ratio:.2f} {row.reason}")
    assert bool(row.reason) == (abs(ratio - 1) > 0.15)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (
            "Llama-3.1-8B",
            {"cp": 3, "seq_len": 6144},
            "cp 3 x sp 1 = 3 ranks share each sequence, which does not divide",
        ),
        ("Llama-3.1-8B", {"cp": 8, "tp": 4}, "does not divide the 16 ranks in tensor-parallel groups of 4"),
        ("Llama-3.1-8B", {"cp": 8, "seq_len": 1000}, "seq_len 1000 cannot be divided evenly among cp 8 x sp 1 ranks"),
        ("Llama-3.1-8B", {"cp": 8, "strategy": "NO_SHARD"}, "a multiple of 8 ranks, but NO_SHARD has 1"),
        ("Llama-3.1-8B", {"cp": 2, "attention": "eager"}, "attention eager cannot be combined with cp 2"),
        ("Llama-3.1-8B", {"cp": 2, "precision": "fp32"}, "requires a fused kernel"),
        ("Mistral-7B", {"cp": 2}, "no sliding window, but layers of Mistral-7B have one of 4096"),
        ("gpt-oss-20b", {"cp": 2}, "no sliding window"),
        ("Qwen3-Next-80B-A3B", {"sp": 2}, "carry a state through the sequence"),
        ("Qwen2.5-7B", {"sp": 8}, "28 query heads and 4 key and value heads"),
        ("Llama-3.1-8B", {"ep": 2}, "Llama-3.1-8B has none"),
        ("Llama-3.1-8B", {"experts": "kernel"}, "experts kernel says how experts compute, but Llama-3.1-8B has none"),
        ("Mixtral-8x7B", {"ep": 16}, "the 8 experts of Mixtral-8x7B cannot be divided evenly among 16 ranks"),
        ("Qwen3-30B-A3B", {"ep": 8, "strategy": "HYBRID_SHARD", "shard_size": 4}, "ep 8 requires a shard group"),
        ("Qwen3-30B-A3B", {"ep": 2, "tp": 2}, "ep together with tp"),
        ("Qwen3-30B-A3B", {"ep": 2, "optimizer": "muon"}, "ep together with optimizer muon"),
        ("Qwen3-30B-A3B", {"ep_imbalance": 2.0}, "ep_imbalance requires ep"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        evaluate(load_model(model)[0], Job.of(settings), parse_cluster("16xH100"))
    assert refused.value.hint


def test_an_encoder_is_refused() -> None:
    model = dataclasses.replace(load_model("Llama-3.1-8B")[0], encoder_decoder=True)
    with pytest.raises(ConfigError, match="has an encoder"):
        evaluate(model, Job.of({"sp": 2}), parse_cluster("8xH100"))


def test_heads_of_keys_may_be_repeated() -> None:
    """8 ranks of which two each hold the same head: twice the bytes of keys and values."""
    four, eight = (
        evaluate(load_model("Qwen2.5-3B")[0], Job.of({"sp": sp, "seq_len": 8192}), parse_cluster("8xH100"))
        for sp in (2, 4)
    )
    sizes = [(2 * 16 + 2 * kv) * 128 * 2 * 8192 // sp * (sp - 1) // sp for kv, sp in ((2, 2), (4, 4))]
    assert [plan.traffic.sp_nbytes for plan in (four, eight)] == [36 * 2 * size for size in sizes]


def test_adapters_of_experts_are_divided_with_them() -> None:
    settings = {"method": "lora", "base_dtype": "bfloat16"}
    one, four = tiny(**settings), tiny(ep=4, **settings)
    assert four.parameters == one.parameters and four.trainable == one.trainable
    adapters = [plan.setting.model.blocks[0].adapters for plan in (one, four)]
    assert adapters[0] and adapters[1] and adapters[1].folded == adapters[0].folded // 4


AUTO = {"checkpointing": "selective", "loss": "fused", "offload_activations": True, "step_in_backward": False}
"""Settings that the search must not change, so that it ends sooner."""


def test_auto_divides_what_is_long() -> None:
    job = Job.of({"seq_len": 131072, **AUTO})
    cluster, (model, _) = parse_cluster("8xH100"), load_model("Llama-3.1-8B")
    fixed = {*AUTO, "strategy", "optimizer", "offload", "offload_main_weights", "offload_optimizer_state"}
    best = search(model, job, cluster, fixed=fixed)[0]
    assert best.job.shared_by == 8
    assert best.job.accumulation * best.job.micro_batch == 8  # as many sequences per step
    assert search(model, job, cluster, fixed={*fixed, "cp", "sp"}) == []


def test_auto_divides_experts() -> None:
    job = Job.of({"seq_len": 4096, **AUTO, "checkpointing": "full"})
    cluster, (model, _) = parse_cluster("64xH100"), load_model("gpt-oss-120b")
    fixed = {*AUTO, "strategy", "optimizer", "offload", "offload_main_weights", "offload_optimizer_state"}
    best = search(model, job, cluster, fixed=fixed)[0]
    assert best.job.ep > 1 == best.job.shared_by
    assert search(model, job, cluster, fixed={*fixed, "ep"}) == []


def test_alternatives_are_commands() -> None:
    plan = evaluate(load_model("Llama-3.1-8B")[0], Job.of({"seq_len": 131072}), parse_cluster("8xH100"))
    assert any("--sp 8" in change.words for change in changes_that_fit(plan))
    asked = ["plan", "-m", "Qwen3-30B-A3B", "-d", "8xH200", "--ep", "8", "--details"]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "in its expert-parallel group" in done.output and "--ep-imbalance" in done.output


def test_a_configuration_sets_them() -> None:
    config = RunConfig.of_paths({"parallelism.cp_size": 4, "launch.num_processes": 8, "precision.mode": "bf16"})
    job = Job.from_run(config, seq_len=4096, micro_batch=2)
    assert (job.cp, job.sp, job.tokens) == (4, 1, 2 * 1024)
    plan = evaluate(load_model("Llama-3.1-8B")[0], job, parse_cluster("8xH100"))
    assert as_run_config(plan).parallelism.cp_size == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"cp": 4, "accumulation": 2},
        {"sp": 4, "checkpointing": "selective"},
        *(
            pytest.param({axis: size, "checkpointing": each, **more}, marks=pytest.mark.full)
            for axis, size in (("cp", 8), ("cp", 2), ("sp", 2), ("sp", 8))
            for each in ("none", "selective", "full")
            for more in ({}, {"strategy": "HYBRID_SHARD", "shard_size": 8, "wrap_embeddings": True})
        ),
    ],
)
def test_a_simulated_rank_sends_what_is_planned(settings: dict[str, Any]) -> None:
    """Torch's ring and the all-to-alls around attention run as one rank of 16, beside the engine's own events."""
    job = Job.of({**settings, "seq_len": TOKENS})
    result = simulate(transformers_model(TINY), job, world_size=16, rank=13)
    assert result.differences == []
    assert sum(result.counted[3:]) == result.traffic.cp_nbytes + result.traffic.sp_nbytes > 0
    assert len(result.events) == len(result.predicted)


@pytest.mark.full
def test_values_of_another_size_go_around_a_ring() -> None:
    """In DeepSeek's latent attention, they are smaller than keys, so that another kernel runs."""
    values = {**MODELS["DeepSeek-V3"], "hidden_size": 32, "num_hidden_layers": 1, "first_k_dense_replace": 1,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96}  # fmt: skip
    result = simulate(transformers_model(values), Job.of({"cp": 4, "seq_len": 512}), world_size=4)
    assert result.differences == [] and result.traffic.cp_nbytes > 0


def test_a_simulation_that_sends_something_else_differs_from_the_plan() -> None:
    result = simulate(transformers_model(TINY), Job.of({"sp": 4, "seq_len": TOKENS}), world_size=4)
    less = dataclasses.replace(result, counted=(*result.counted[:4], result.counted[4] - 1))
    assert result.differences == [] and "cp, sp) bytes" in less.differences[0]


def test_other_axes_are_not_simulated() -> None:
    for axis, why in (("tp", "layers are not split"), ("ep", "how many tokens each rank gets")):
        with pytest.raises(ConfigError, match=f"does not support {axis} = 2 .*{why}"):
            simulate(transformers_model(TINY), Job.of({axis: 2, "seq_len": TOKENS}), world_size=4)
        with pytest.raises(ConfigError, match=f"does not support {axis} = 2 .*{why}"):
            time_step(TINY, Job.of({axis: 2, "seq_len": TOKENS}), parse_cluster("4xH100"))
    with pytest.raises(ConfigError, match="4 ranks share each sequence, which does not divide the 6 ranks"):
        simulate(transformers_model(TINY), Job.of({"cp": 4, "seq_len": TOKENS}), world_size=6)
    with pytest.raises(ConfigError, match="4 ranks share each sequence, which does not divide the 6 ranks"):
        time_step(TINY, Job.of({"cp": 4, "seq_len": TOKENS}), parse_cluster("6xH100"))
