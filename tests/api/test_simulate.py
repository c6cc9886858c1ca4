"""One process plays a rank of many: the real engine on tensors without data.

pytest tests/api/test_simulate.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard.api.virtual.simulation import Simulation, simulate, transformers_model
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event, EventKind
from fullshard.plan.families import from_config
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.library import MODELS
from fullshard.plan.methods import apply_method

SMALL = {**MODELS["Llama-2-7B"], "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 99,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "SHARD_GRAD_OP", "accumulation": 2},
        {"strategy": "NO_SHARD"},
        {"strategy": "HYBRID_SHARD", "shard_size": 4, "checkpointing": "full"},
        {
            "strategy": "HYBRID_SHARD_ZERO2",
            "shard_size": 2,
            "precision": "fp32",
            "forward_prefetch": False,
            "checkpointing": "selective",
        },
        {"gather_as": "int8", "reduce_as": "bfloat16"},
        {"offload": True, "accumulation": 2},
        {"offload_main_weights": True, "strategy": "HYBRID_SHARD", "shard_size": 2, "accumulation": 2},
        {"offload": True, "gather_as": "int8"},
        {"offload_activations": True, "offload": True, "checkpointing": "full", "seq_len": 512},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "FULL_SHARD",
)
def test_events_and_bytes_are_the_planners(settings: dict[str, object], rank: int) -> None:
    result = simulate(transformers_model(SMALL), Job.of({"seq_len": 16, **settings}), world_size=8, rank=rank)
    assert result.differences == []
    assert len(result.events) > 30
    assert result.sharding.world_size == 8


WHISPER = {"model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 99,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
           "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 40, "decoder_start_token_id": 1,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2, "vocab_size": 99,
      "decoder_start_token_id": 0}  # fmt: skip


def test_an_encoder_and_a_decoder() -> None:
    """T5's first layers lend their position bias to all others, which hand it on: backward comes to each once."""
    for model in (WHISPER, T5):
        assert simulate(transformers_model(model), Job.of({"seq_len": 16}), world_size=4).differences == []


def test_a_heads_bias_is_in_its_unit() -> None:
    model = {"model_type": "gptj", "vocab_size": 99, "n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8,
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    job = Job.of({"seq_len": 16, "wrap_embeddings": True})
    assert simulate(transformers_model(model), job, world_size=4).differences == []


def test_families_that_make_their_own_mask() -> None:
    for model in (
        {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 4},
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ):
        build = transformers_model({"num_hidden_layers": 2, "vocab_size": 99, **model})
        assert simulate(build, Job.of({"seq_len": 16}), world_size=4).differences == []


def test_a_configuration_that_transformers_cannot_use_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"does not accept the file as a qwen2_moe.*mlp_only_layers(.|\n)*\nhint: use the model"
    ):
        transformers_model({"model_type": "qwen2_moe", "mlp_only_layers": 3})()
    with pytest.raises(
        ConfigError,
        match=r"does not accept the file as a llama configuration: Trying to create tensor with negative dimension",
    ):
        transformers_model({"model_type": "llama", "hidden_size": -64})()
    if importlib.util.find_spec("flash_attn") is None:  # what is missing is not the file's fault
        with pytest.raises(ImportError, match="FlashAttention2"):
            transformers_model({**SMALL, "model_type": "llama"}, attention="flash_attention_2")()


def test_models_without_sdpa_and_models_nobody_builds() -> None:
    """Gemma 2 caps its scores, which only its own attention does; Kimi-K2 has the class of DeepSeek-V3."""
    gemma = {**SMALL, "model_type": "gemma2", "head_dim": 16}
    assert simulate(transformers_model(gemma), Job.of({"seq_len": 16}), world_size=4).differences == []
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 99}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 8}
    sizes |= {"n_group": 1, "topk_group": 1}
    sizes |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    kimi = {**MODELS["Kimi-K2"], **sizes}
    assert simulate(transformers_model(kimi), Job.of({"seq_len": 16}), world_size=4).differences == []
    with pytest.raises(ConfigError, match=r"does not support model_type 'kimi_k9'\nhint: update"):
        transformers_model({**kimi, "model_type": "kimi_k9", "architectures": None})
    with pytest.raises(ConfigError, match=r"does not support model_type \['llama'\]"):
        transformers_model({"model_type": ["llama"]})


@pytest.mark.parametrize(
    ("strategy", "shard_size", "line"),
    [
        ("FULL_SHARD", None, "sharded over 4 ranks (FULL_SHARD, 1 x 4): "),
        ("SHARD_GRAD_OP", None, "sharded over 4 ranks (SHARD_GRAD_OP, 1 x 4): "),
        ("NO_SHARD", None, "replicated on 4 ranks (NO_SHARD, 4 x 1): "),
        ("HYBRID_SHARD", 2, "sharded over 4 ranks (HYBRID_SHARD, 2 x 2): "),
        ("HYBRID_SHARD_ZERO2", 2, "sharded over 4 ranks (HYBRID_SHARD_ZERO2, 2 x 2): "),
        ("HYBRID_SHARD", 4, "sharded over 4 ranks (FULL_SHARD, 1 x 4): "),
        ("HYBRID_SHARD_ZERO2", 1, "replicated on 4 ranks (NO_SHARD, 4 x 1): "),
    ],
)
def test_the_line_says_what_the_mesh_and_the_units_are(strategy: str, shard_size: int | None, line: str) -> None:
    job = Job.of({"seq_len": 16, "strategy": strategy, "shard_size": shard_size})
    assert str(simulate(transformers_model(SMALL), job, world_size=4).sharding).startswith(line)


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"])
def test_activations_leave_and_return_when_the_planner_says(prefetch: str) -> None:
    """Between the same events of the same units; how many bytes is in test_activation_offload.py."""
    job = {"offload_activations": True, "seq_len": 512, "accumulation": 2, "backward_prefetch": prefetch}
    result = simulate(transformers_model(SMALL), Job.of(job), world_size=4)
    found, planned = ([(e.kind, e.unit, e.what) for e in events] for events in (result.events, result.predicted))
    assert found == planned
    assert sum(what == "activations" for _, _, what in found) == 2 * 2 * 2


@pytest.mark.full
def test_a_seventy_billion_model_on_a_thousand_ranks() -> None:
    start = time.monotonic()
    job = Job.of({"seq_len": 128})
    result = simulate(transformers_model(MODELS["Llama-3-70B"]), job, world_size=1024, rank=1023)
    assert result.differences == []
    assert result.sharding.total_numel == 70_553_706_496
    assert result.sharding.rank_nbytes == pytest.approx(4 * 70_553_706_496 / 1024, rel=0.001)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("shard_size", [512, 8])
def test_sixteen_thousand_ranks(shard_size: int) -> None:
    job = Job.of({"strategy": "HYBRID_SHARD", "shard_size": shard_size, "seq_len": 16})
    result = simulate(transformers_model(SMALL), job, world_size=16384, rank=16383)
    assert result.differences == []


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [
        "-m Llama-3.1-8B --world-size 16384",
        "-m DeepSeek-V3 --world-size 16384",  # a constructor makes 28 GiB of experts at a time
        "-m Llama-3.1-405B -d 16384xH100 --timeline {}",
        "-m DeepSeek-V3 -d 16384xH100 --timeline {}",
    ],
)
def test_sixteen_thousand_ranks_take_seconds_and_little_memory(asked: str, tmp_path: Path) -> None:
    """20 s of processor time and 2 GiB, with the start of the interpreter."""
    program = (
        "import resource, sys\nfrom fullshard.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "simulate", *asked.format(tmp_path / "step.json").split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    seconds, kib = map(float, done.stderr.splitlines()[-1].split())
    assert "as fullshard plan predicts" in done.stdout or "a step in virtual time" in done.stdout
    assert seconds <= 20 and kib <= 2 * 1024**2


MIXTURE = {**SMALL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT's, which are wrong
@pytest.mark.parametrize(
    ("model", "form"),
    [
        (MIXTURE, "nf4-double"),
        *(pytest.param(m, f, marks=pytest.mark.full) for m in (SMALL, MIXTURE) for f in (None, "int8", "mxfp4", "fp8")),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)
def test_adapters_and_weights_quantized_at_rest(model: dict[str, Any], form: str | None) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    settings = {"method": "lora", "lora_rank": 4, "checkpointing": "full", "seq_len": 16, "strategy": "HYBRID_SHARD"}
    job = Job.of({**settings, "shard_size": 4, "quantize": form})
    result = simulate(transformers_model(model), job, world_size=8, rank=6)
    assert result.differences == []
    planned = apply_method(from_config(model, where="test")[0], job)
    layout = lay_out(planned, strategy=job.row, world_size=8, shard_size=4, dtypes=job.dtypes)
    assert result.main_nbytes == sum(bucket.main_nbytes for bucket in layout.buckets)


def test_differences_are_found() -> None:
    result = simulate(transformers_model(SMALL), Job.of({"seq_len": 16}), world_size=4)
    wrong = Event(EventKind.RESHARDED, "nowhere", 1)
    changed = {**{name: getattr(result, name) for name in Simulation.__slots__}, "events": [wrong, *result.events[1:]]}
    found = Simulation(**{**changed, "main_nbytes": 1, "counted": (0, 0, 0)}).differences
    assert [text.split(":")[0] for text in found] == [
        "event 0",
        "(gather, reduce, replicate, cp, sp) bytes",
        "main weights",
    ]


def test_parts_that_tokens_do_not_reach_are_named() -> None:
    """The eyes of a model that sees: nobody shows it a picture."""
    result = simulate(transformers_model(SMALL), Job.of({"seq_len": 16}), world_size=4)
    unseen = [event for event in result.events if event.unit != "model.layers.1"]
    seen = {name: getattr(result, name) for name in Simulation.__slots__}
    (found,) = Simulation(**{**seen, "events": unseen}).differences
    assert found == "1 planned unit did not run, the first is model.layers.1: a simulation passes only tokens"


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="a job of 4 ranks has no rank 4"):
        simulate(transformers_model(SMALL), Job.of({}), world_size=4, rank=4)
    with pytest.raises(ConfigError, match="does not support bitsandbytes layers\nhint: use --method lora --quan"):
        simulate(transformers_model(SMALL), Job.of({"method": "qlora"}), world_size=4)
    with pytest.raises(ConfigError, match="does not divide"):
        simulate(transformers_model(SMALL), Job.of({"strategy": "HYBRID_SHARD", "shard_size": 3}), world_size=4)


def test_the_embeddings_as_units() -> None:
    """The loss is taken inside the model's forward, so backward comes to the outermost unit before the head."""
    job = Job.of({"seq_len": 16, "wrap_embeddings": True, "accumulation": 2})
    result = simulate(transformers_model(SMALL), job, world_size=4)
    assert result.differences == []
    begun = [event.unit for event in result.events if event.kind is EventKind.BACKWARD_BEGIN]
    assert begun[:2] == ["", "lm_head"]
