"""Plans of tensor parallelism: the engine's own events and bytes, and published speeds.

pytest tests/plan/test_plan_tiles.py
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard
from fullshard.api.virtual.simulation import simulate, transformers_model
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event
from fullshard.engine.lookup import units_of
from fullshard.features import MixedPrecisionPolicy
from fullshard.plan.activations import layer_activations
from fullshard.plan.evaluate import evaluate, notes_of
from fullshard.plan.families import from_config
from fullshard.plan.hardware import DEVICES, parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.methods import apply_method
from fullshard.plan.tiles import tiled
from tests.distributed import run_ranks
from tests.plan_check import PlanCheck

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BY_ROWS, BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
TOKENS, RANK = 8, 8


def split(model: Any, mesh: Any) -> None:
    """As Transformers' plan of Llama has it."""
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    for layer in model.model.layers:
        names = {name.rpartition(".")[2]: name for name, _ in layer.named_modules()}
        styles = {names[name]: ColwiseParallel() for name in BY_ROWS}
        parallelize_module(layer, mesh, {**styles, **{names[name]: RowwiseParallel() for name in BY_COLUMNS}})


def adapted(model: Any, mesh: Any, **options: Any) -> Any:
    """The model with LoRA on all linear layers, which PEFT splits as it does those that Transformers has split."""
    for name, layer in model.named_modules():
        if (leaf := name.rpartition(".")[2]) in (*BY_ROWS, *BY_COLUMNS):
            layer._hf_tp_plan, layer._hf_device_mesh = "colwise" if leaf in BY_ROWS else "rowwise", mesh
    peft_model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"), **options)
    for name, factor in peft_model.named_modules():
        if ".lora_" in name and isinstance(factor, nn.Linear):  # PEFT notes the sizes of this rank's part
            factor.out_features, factor.in_features = factor.weight.shape
    return peft_model


def tiles_compared(method: Literal["full", "lora"]) -> list[str]:
    """What differs between the engine's third step, the plan of the model's own layout, and that of shapes alone."""
    os.environ["FULLSHARD_COMM"] = "gloo"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    job = Job.of({"seq_len": TOKENS, "precision": "bf16", "tp": 2, "method": method})
    dtype = getattr(torch, job.stored_dtype)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG, use_cache=False), dtype=dtype)
    layers = model.model.layers
    split(model, mesh["tp"])
    if method == "lora":
        model = adapted(model, mesh["tp"])
    plan = evaluate(from_config(CONFIG, where="test")[0], job, parse_cluster("4xCPU"))
    events: list[Event] = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fullshard.fully_shard(module, mp_policy=policy, mesh=mesh["dp"])
    units_of(model)[-1].schedule.event_sink = events.append
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    check = PlanCheck(model, optimizer, job)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    for _ in range(3):
        events.clear()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [str(deviation) for deviation in check.report() if not deviation.is_as_planned]
    named = [dataclasses.replace(event, unit=event.unit.removeprefix("base_model.model.")) for event in events]
    if named != list(plan.events):
        found.append(f"events differ: {len(events)} and {len(plan.events)}")
    main = sum(bucket.main.nbytes for unit in units_of(model) for bucket in unit.buckets)
    if main != (expected := sum(bucket.main_nbytes for bucket in plan.setting.layout.buckets)):
        found.append(f"main weights: {main}, planned {expected}")
    return found


@pytest.mark.full
@pytest.mark.parametrize("method", ["full", "lora"])
def test_tiles_are_sharded_as_planned(method: str) -> None:
    for found in run_ranks(tiles_compared, 4, method):
        assert found == []


BATCH, SEQUENCE = 2, 64
LAYER: dict[str, Any] = {**CONFIG, "hidden_size": 128, "intermediate_size": 352, "num_key_value_heads": 4}


def saved_in_layers(dtype: torch.dtype, method: str) -> list[tuple[int, int]]:
    """(bytes that autograd saves, of the layer's input) of one and of two layers on this rank, parameters left out."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for depth in (1, 2):
        config = AutoConfig.for_model(**{**LAYER, "num_hidden_layers": depth})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
        split(model, mesh)
        if method == "lora":
            adapted(model, mesh, autocast_adapter_dtype=False)
        rotary = model.model.rotary_emb(torch.zeros(1, dtype=dtype), torch.arange(SEQUENCE)[None])
        own = {_storage(tensor)._cdata for tensor in (*model.parameters(), *rotary)}
        hidden = given = torch.ones(BATCH, SEQUENCE, LAYER["hidden_size"], dtype=dtype, requires_grad=True)
        storages: dict[int, Any] = {}

        def pack(tensor: Any, storages: dict[int, Any] = storages) -> Any:
            storages[_storage(tensor)._cdata] = _storage(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for layer in model.model.layers:
                hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
        found.append((sum(s.nbytes() for key, s in storages.items() if key not in own), given.nbytes))
    return found


def _storage(tensor: Any) -> Any:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


@pytest.mark.parametrize(
    ("ranks", "dtype", "method"),
    [
        (2, torch.bfloat16, "full"),
        *(
            pytest.param(ranks, dtype, method, marks=pytest.mark.full)
            for ranks, dtype, method in (
                (4, torch.bfloat16, "full"),
                (4, torch.float32, "full"),
                (2, torch.bfloat16, "lora"),
                (4, torch.bfloat16, "lora"),
            )
        ),
    ],
)
def test_a_rank_keeps_what_the_formulas_say(ranks: int, dtype: torch.dtype, method: str) -> None:
    """A layer more, cut by torch as Transformers cuts it; within 1 %, the rest is statistics."""
    settings = {"micro_batch": BATCH, "seq_len": SEQUENCE, "attention": "sdpa", "tp": ranks, "method": method}
    settings |= {"lora_rank": RANK} if method == "lora" else {}
    job = Job.of({**settings, "precision": "bf16" if dtype is torch.bfloat16 else "no"})
    shape = tiled(apply_method(from_config(LAYER, where="test")[0], job), ranks)
    layer = layer_activations(shape.blocks[0], job, DEVICES["CPU"])
    for (one, given), (two, _) in run_ranks(saved_in_layers, ranks, dtype, method):
        print(f"{ranks} ranks, {dtype}: predicted {layer.kept}, saved {two - one}, input {given}")
        assert layer.kept == pytest.approx(two - one, rel=0.01)
        assert layer.inputs == given


def test_what_tiles_change() -> None:
    """Per rank half of what is cut, whole activations between the parts, and reductions inside the group."""
    shape, _ = load_model("Llama-3.1-8B")
    settings = {"checkpointing": "full", "seq_len": 4096, "loss": "fused"}
    one, two = (evaluate(shape, Job.of({**settings, "tp": tp}), parse_cluster("16xH100")) for tp in (1, 2))
    assert one.parameters == two.parameters == 8_030_261_248 and one.trainable == two.trainable
    assert one.memory.checkpoint == pytest.approx(two.memory.checkpoint, rel=1e-6)
    assert two.setting.layout.shard_size == 8 and two.time.tokens == one.time.tokens / 2
    assert two.time.model_flops == pytest.approx(one.time.model_flops / 2, rel=1e-6)
    assert one.memory.persistent < two.memory.persistent < 1.1 * one.memory.persistent  # embedding and norms are whole
    whole, part = (
        layer_activations(plan.setting.model.blocks[0], plan.job, plan.setting.device) for plan in (one, two)
    )
    assert part.inputs == whole.inputs and 0.5 * whole.recomputed < part.recomputed < 0.75 * whole.recomputed
    message = 4096 * 4096 * 2
    assert two.traffic.tiles_nbytes == 32 * 6 * message + 4096 * (128256 + 2 * 4096) * 2 // 2
    assert one.traffic.tiles_nbytes == 0 and "--tp" not in str(notes_of(one))


TITAN = "torchtitan, benchmarks of 2025-06, compiled"
_TP = {"tp": 8, "seq_len": 8192, "compile": True, "loss": "fused"}
SPEEDS = {
    "70B, 256 x H100": ("Llama-3.1-70B", "256xH100", {**_TP, "micro_batch": 16, "checkpointing": "full"}, 597.3),
    "8B, 64 x H100": ("Llama-3.1-8B", "64xH100", {**_TP, "micro_batch": 12, "checkpointing": "selective"}, 4378),
}  # fmt: skip


@pytest.mark.parametrize("name", SPEEDS)
def test_published_speeds(name: str) -> None:
    model, devices, settings, published = SPEEDS[name]
    plan = evaluate(load_model(model)[0], Job.of(settings), parse_cluster(devices))
    speed = plan.time.tokens_per_second / plan.cluster.count
    print(f"{name}: predicted {speed:.0f} tokens/s, published {published:.0f}, ratio {speed / published:.2f} ({TITAN})")
    assert speed == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("Llama-3.1-8B", {"tp": 3}, "32 heads cannot be divided evenly among 3"),
        ("Llama-3.1-8B", {"tp": 16}, "8 kv_heads"),
        ("GPT-2", {"tp": 2}, "its head is its embedding"),
        ("Llama-3.1-8B", {"tp": 2, "method": "qlora"}, "tp together with method qlora"),
        ("Qwen3-30B-A3B", {"tp": 2, "method": "lora"}, "splits .*experts.gate_up_proj, but its adapter cannot"),
        ("Llama-3.1-8B", {"tp": 2, "optimizer": "muon"}, "tp together with optimizer muon"),
        ("Llama-3.1-8B", {"tp": 2, "wrap_embeddings": True}, "tp together with wrap_embeddings"),
    ],
)
def test_what_is_not_planned_is_refused_by_name(model: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluate(load_model(model)[0], Job.of(settings), parse_cluster("16xH100"))


def test_it_is_not_simulated() -> None:
    with pytest.raises(ConfigError, match="does not support tp = 2"):
        simulate(transformers_model(CONFIG), Job.of({"tp": 2}), world_size=4)
