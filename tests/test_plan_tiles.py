"""Plans of tensor parallelism and of gathers in float8: the engine's own events and bytes, and published speeds.

pytest tests/test_plan_tiles.py
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard
from fullshard.api.plan_check import PlanCheck
from fullshard.api.simulation import simulate, transformers_model
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event
from fullshard.engine import MixedPrecisionPolicy
from fullshard.engine.module import units_of
from fullshard.engine.schedule import schedule_of
from fullshard.plan.activations import layer_activations
from fullshard.plan.evaluate import Plan, evaluate, notes_of
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.distributed import run_ranks

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BY_ROWS, BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
TOKENS = 8


def build() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def split(model: Any, mesh: Any) -> None:
    """As Transformers' plan of Llama has it."""
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    for layer in model.model.layers:
        names = {name.rpartition(".")[2]: name for name, _ in layer.named_modules()}
        styles = {names[name]: ColwiseParallel() for name in BY_ROWS}
        parallelize_module(layer, mesh, {**styles, **{names[name]: RowwiseParallel() for name in BY_COLUMNS}})


def planned(**settings: Any) -> Plan:
    ranks = dist.get_world_size() if dist.is_initialized() else 4
    job = Job.of({"seq_len": TOKENS, "precision": "bf16", **settings})
    return evaluate(from_config(CONFIG, where="test")[0], job, parse_cluster(f"{ranks}xCPU"))


def compared(model: Any, plan: Plan, **options: Any) -> list[str]:
    """What differs between the engine's third step, the plan of the model's own layout, and that of shapes alone."""
    os.environ["FULLSHARD_COMM"] = "gloo"
    events: list[Event] = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fullshard.fully_shard(module, mp_policy=policy, **options)
    schedule_of(units_of(model)[-1]).event_sink = events.append
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    check = PlanCheck(model, optimizer, plan.job)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    for _ in range(3):
        events.clear()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [str(deviation) for deviation in check.report() if not deviation.is_as_planned]
    if events != list(plan.events):
        found.append(f"events differ: {len(events)} and {len(plan.events)}")
    main = sum(bucket.main.nbytes for unit in units_of(model) for bucket in unit.buckets)
    if main != (expected := sum(bucket.main_nbytes for bucket in plan.setting.layout.buckets)):
        found.append(f"main weights: {main}, planned {expected}")
    return found


def tiles_compared() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    split(model, mesh["tp"])
    return compared(model, planned(tp=2), mesh=mesh["dp"])


@pytest.mark.full
def test_tiles_are_sharded_as_planned() -> None:
    for found in run_ranks(tiles_compared, 4):
        assert found == []


def float8_compared() -> list[str]:
    torchao: Any = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = torchao.convert_to_float8_training(
        build(), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    return compared(model, planned(float8=True))


@pytest.mark.full
def test_float8_is_gathered_as_planned() -> None:
    pytest.importorskip("torchao.float8", reason="needs the extra `quant`")
    for found in run_ranks(float8_compared, 2):
        assert found == []


def test_what_tiles_change() -> None:
    """Per rank half of what is cut, whole activations between the parts, and reductions inside the group."""
    shape, _ = load_model("Llama-3.1-8B")
    settings = {"checkpointing": "full", "seq_len": 4096, "loss": "fused"}
    one, two = (evaluate(shape, Job.of({**settings, "tp": tp}), parse_cluster("16xH100")) for tp in (1, 2))
    assert one.parameters == two.parameters == 8_030_261_248 and one.trainable == two.trainable
    assert one.memory.checkpoint == pytest.approx(two.memory.checkpoint, rel=1e-6)
    assert two.setting.layout.world_size == 8 and two.time.tokens == one.time.tokens / 2
    assert two.time.model_flops == pytest.approx(one.time.model_flops / 2, rel=1e-6)
    assert one.memory.persistent < two.memory.persistent < 1.1 * one.memory.persistent  # embedding and norms are whole
    whole, part = (layer_activations(plan.setting.model.blocks[0], plan.job) for plan in (one, two))
    assert part.inputs == whole.inputs and 0.5 * whole.recomputed < part.recomputed < 0.75 * whole.recomputed
    message = 4096 * 4096 * 2
    assert two.traffic.tiles_nbytes == 32 * 6 * message + 4096 * (128256 + 2 * 4096) * 2 // 2
    assert one.traffic.tiles_nbytes == 0 and "--tp" not in str(notes_of(one))


def test_float8_halves_what_is_gathered() -> None:
    shape, _ = load_model("Llama-3.1-8B")
    plain, packed = (evaluate(shape, Job.of({"float8": on}), parse_cluster("8xH100")) for on in (False, True))
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert plain.traffic.gather_nbytes - packed.traffic.gather_nbytes == 2 * linear * 7 / 8  # forward and backward
    assert packed.traffic.reduce_nbytes == plain.traffic.reduce_nbytes
    assert packed.time.total < plain.time.total


TITAN = "torchtitan, benchmarks of 2024-12 (float8) and of 2025-06 (tensor parallelism), compiled"
_TP = {"tp": 8, "seq_len": 8192, "compile": True, "loss": "fused"}
SPEEDS = {
    "70B, 256 x H100": ("Llama-3.1-70B", "256xH100", {**_TP, "micro_batch": 16, "checkpointing": "full"}, 597.3),
    "8B, 64 x H100": ("Llama-3.1-8B", "64xH100", {**_TP, "micro_batch": 12, "checkpointing": "selective"}, 4378),
    "8B in float8, 8 x H100": ("Llama-3.1-8B", "8xH100",
        {"float8": True, "micro_batch": 2, "seq_len": 8192, "compile": True, "checkpointing": "selective"}, 8532),
}  # fmt: skip


@pytest.mark.parametrize("name", SPEEDS)
def test_published_speeds(name: str) -> None:
    """Theirs cut activations along the sequence, too, which is other memory and as many bytes."""
    model, devices, settings, published = SPEEDS[name]
    plan = evaluate(load_model(model)[0], Job.of(settings), parse_cluster(devices))
    speed = plan.time.tokens_per_second / plan.cluster.count
    print(f"{name}: predicted {speed:.0f} tokens/s, published {published:.0f}, ratio {speed / published:.2f} ({TITAN})")
    assert speed == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("Llama-3.1-8B", {"tp": 3}, "32 heads cannot be shared by 3"),
        ("Llama-3.1-8B", {"tp": 16}, "8 kv_heads"),
        ("GPT-2", {"tp": 2}, "its head is its embedding"),
        ("Llama-3.1-8B", {"tp": 2, "method": "lora"}, "tp with method lora"),
        ("Llama-3.1-8B", {"tp": 2, "optimizer": "muon"}, "tp with optimizer muon"),
        ("Llama-3.1-8B", {"tp": 2, "float8": True}, "tp with float8"),
        ("Llama-3.1-8B", {"tp": 2, "wrap_embeddings": True}, "tp with wrap_embeddings"),
        ("Llama-3.1-8B", {"float8": True, "method": "qlora"}, "float8 with method qlora"),
        ("Llama-3.1-8B", {"float8": True, "offload": True}, "float8 with offload"),
    ],
)
def test_what_is_not_planned_is_refused_by_name(model: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluate(load_model(model)[0], Job.of(settings), parse_cluster("16xH100"))


@pytest.mark.parametrize("settings", [{"tp": 2}, {"float8": True}])
def test_what_is_not_simulated_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="are not simulated"):
        simulate(transformers_model(CONFIG), Job.of(settings), world_size=4)
