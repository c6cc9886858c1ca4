"""Expert parallelism by Transformers' words: `from_pretrained(distributed_config=DistributedConfig(ep_size=...))`.

pytest tests/integrations/test_expert_parallelism.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from fullshard.api.late_adapters import shard_adapters
from fullshard.checkpoint import export_hf, full_state_dict
from fullshard.comm.torch_private import default_store
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.integrations.transformers.at_load import load_sharded
from tests.differential import EPS, TOLERANCE
from tests.distributed import end_workers, preload, run_ranks
from tests.integrations.test_sharded_at_load import SCRIPT, run
from tests.trl_runs import VOCABULARY, write_model

preload("fullshard.integrations.transformers.at_load", "transformers.distributed.expert_parallel")

TRL_SCRIPT = SCRIPT.with_name("trl_distributed_config.py")
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
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=EPS)


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
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size() // ranks  # a tensor-parallel group has one batch
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
@pytest.mark.parametrize("options", [{}, {"fsdp_cpu_offload": True}], ids=["", "offload"])
def test_training_equals_one_process(name: str, ranks: int, options: dict[str, bool], tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    plain = load(path, None)
    expected = train(plain, adam(plain), range(STEPS)), plain.state_dict()
    run_ranks(check_equal, ranks, path, {**EP[ranks], **options}, expected)


def check_left_out(path: str, where: str) -> None:
    """Rank 1 fails in the second forward or backward, where rank 0 waits to exchange tokens with it."""
    model = load(path, EP[2])
    train(model, adam(model), range(1), dist.get_rank(), 2)
    tokens, labels = batch(1)
    if dist.get_rank() == 1:
        layer = model.model.layers[1]
        if where == "forward":
            layer.self_attn.register_forward_pre_hook(lambda *_: 1 // 0)
        else:
            layer.mlp.register_forward_hook(lambda *seen: seen[2].register_hook(lambda _: 1 // 0) and None)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=tokens, labels=labels).loss.backward()
        default_store().wait(["told"])  # stay until the other has found out
        return
    named = r"rank 0, exchanging tokens among experts: rank 1 had an error.*ZeroDiv"
    with pytest.raises(CommunicationError, match=named):
        model(input_ids=tokens, labels=labels).loss.backward()
    default_store().set("told", "")


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_leaves_an_exchange_out_is_named(where: str, tmp_path: Path) -> None:
    run_ranks(check_left_out, 2, saved("qwen3_moe", tmp_path), where)


# -- adapters --------------------------------------------------------------------------------------------------------

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "parameters": {"target_modules": ["q_proj", "v_proj"], "target_parameters": STACKED},
    "all-linear": {"target_modules": "all-linear"},
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "biases": {"target_modules": [], "target_parameters": [*STACKED, "mlp.experts.down_proj_bias"]},
}


def adapted(model: Any, target: str) -> Any:
    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **TARGETS[target]))


def shares(sizes: dict[str, Any]) -> tuple[int, int]:
    """Return this rank's place among the ranks with different batches, and their number."""
    tiles = sizes.get("tp_size", 1)
    return dist.get_rank() // tiles, dist.get_world_size() // tiles


def check_adapters(
    path: str, sizes: dict[str, Any], target: str, options: dict[str, Any], directory: str
) -> tuple[Any, Any]:
    model = adapted(load(path, sizes, **options), target)
    shard_adapters(model)
    history = train(model, adam(model), range(STEPS), *shares(sizes))
    model.save_pretrained(directory, is_main_process=dist.get_rank() == 0)
    if not options:
        export_hf(f"{directory}-merged", model=model)
    return history, {name: value for name, value in full_state_dict(model).items() if "lora_" in name}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT sets them itself
@pytest.mark.parametrize(
    ("name", "target"),
    [("qwen3_moe", "parameters"), ("qwen3_moe", "all-linear"), ("gpt_oss", "parameters"), ("gpt_oss", "biases")],
)
def test_adapters_on_experts_equal_one_process(name: str, target: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    plain = adapted(load(path, None), target)
    assert any("experts" in name for name, parameter in plain.named_parameters() if parameter.requires_grad)
    expected = train(plain, adam(plain), range(STEPS))
    for ranks, sizes in EP.items():
        directory = str(tmp_path / f"{ranks}")
        history, weights = run_ranks(check_adapters, ranks, path, sizes, target, {}, directory)[0]
        torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=2e-6, atol=0)
        again = PeftModel.from_pretrained(load(path, None), directory).state_dict()
        for key, value in weights.items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=2e-6, msg=key)
            assert torch.equal(again[key], value), key
    merged = plain.merge_and_unload().state_dict()
    for ranks in EP:
        for key, value in load(str(tmp_path / f"{ranks}-merged"), None).state_dict().items():
            torch.testing.assert_close(value, merged[key], rtol=1e-5, atol=2e-6, msg=key)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_in_4_bits(name: str, tmp_path: Path) -> None:
    path, options = saved(name, tmp_path), {"quantize": "nf4"}
    place = str(tmp_path / "adapter")
    expected, weights = run_ranks(check_adapters, 1, path, {}, "parameters", options, place)[0]
    for ranks, sizes in EP.items():
        history, got = run_ranks(check_adapters, ranks, path, sizes, "parameters", options, place)[0]
        torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=2e-6, atol=0)
        for key, value in weights.items():
            torch.testing.assert_close(got[key], value, rtol=1e-5, atol=2e-6, msg=key)


OTHERS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "tp": ("llama", "all-linear", 2, {"tp_size": 2}),
    "tp x fsdp": ("llama", "all-linear", 4, {"tp_size": 2, "fsdp_size": 2}),
    "tp x ep": ("qwen3_moe", "attention", 4, {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}),
    "replicas": ("llama", "all-linear", 4, {"dp_replicate_size": 2, "fsdp_size": 2}),
    "replicas x ep": ("qwen3_moe", "parameters", 4, {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("how", list(OTHERS))
def test_adapters_on_other_meshes_equal_one_process(how: str, tmp_path: Path) -> None:
    name, target, ranks, sizes = OTHERS[how]
    path, directory = saved(name, tmp_path), str(tmp_path / "out")
    plain = adapted(load(path, None), target)
    expected = train(plain, adam(plain), range(STEPS))
    end_workers()
    history, weights = run_ranks(check_adapters, ranks, path, sizes, target, {}, directory)[0]
    assert all(loss == pytest.approx(want, rel=2e-6) for (loss, _), (want, _) in zip(history, expected, strict=True))
    # From the second step on, the gradient of attention magnifies roundings, on every mesh.
    torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=1e-4, atol=0)
    again, found = PeftModel.from_pretrained(load(path, None), directory).state_dict(), plain.state_dict()
    for key, value in weights.items():
        torch.testing.assert_close(value, found[key], rtol=1e-5, atol=2e-6, msg=key)
        assert torch.equal(again[key], value), key
    merged, exported = plain.merge_and_unload().state_dict(), load(f"{directory}-merged", None).state_dict()
    assert weights.keys() == {key for key in found if "lora_" in key} and exported.keys() == merged.keys()
    for key, value in exported.items():
        torch.testing.assert_close(value, merged[key], rtol=1e-5, atol=2e-6, msg=key)


def check_refused_adapters(dense: str, path: str) -> None:
    scaled = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    for given, sizes, config in (
        (dense, {"tp_size": 2}, scaled),
        (dense, {"tp_size": 2}, LoraConfig(target_modules=["embed_tokens"])),
        (path, {"tp_size": 2, "ep_size": 2}, LoraConfig(**TARGETS["parameters"])),
    ):
        with pytest.raises(ConfigError, match=r"tensor parallelism splits a .*, but its adapter peft\.tuners"):
            shard_adapters(get_peft_model(load(given, sizes), config))


@pytest.mark.full
def test_adapters_that_are_not_split_as_their_layers_are_refused(tmp_path: Path) -> None:
    dense, path = saved("llama", tmp_path), saved("qwen3_moe", tmp_path)
    end_workers()
    run_ranks(check_refused_adapters, 2, dense, path)


# -- Trainer and TRL ------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_trainer_script_runs_unchanged(name: str, tmp_path: Path) -> None:
    path, output = saved(name, tmp_path), tmp_path / "alone"
    output.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), path, str(output), "{}", "4", "anew"], check=True, timeout=200)
    expected = json.loads((output / "history.json").read_text())["history"]
    run(Path(path), tmp_path / "out", 4, EP[4], 2)
    history = run(Path(path), tmp_path / "out", 2, EP[2], 4, "resume")
    for got, step in zip(history, expected, strict=True):
        assert got == pytest.approx(step, rel=TOLERANCE)
    plain, final = load(str(output / "final"), None).state_dict(), load(str(tmp_path / "out/final"), None).state_dict()
    for key, value in plain.items():
        torch.testing.assert_close(final[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}], ids=str)
def test_a_trainer_script_divides_sequences(sizes: dict[str, int], tmp_path: Path) -> None:
    path, output = saved("qwen3_moe", tmp_path), tmp_path / "alone"
    output.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), path, str(output), "{}", "2", "anew"], check=True, timeout=200)
    expected = json.loads((output / "history.json").read_text())["history"]
    for ranks, with_experts in EP.items():
        history = run(Path(path), tmp_path / f"{ranks}", ranks, {**with_experts, **sizes}, 2)
        for got, step in zip(history, expected, strict=True):
            assert got == pytest.approx(step, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("how", ["full", "lora", "dpo"])
def test_a_trl_script_runs_unchanged(how: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    path, output = tmp_path / "model", tmp_path / "alone"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SHAPE, **MOE, "vocab_size": VOCABULARY}, head_dim=8, num_experts=8, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    output.mkdir()
    arguments = [str(path), str(output), "{}", "3", how]
    subprocess.run([sys.executable, str(TRL_SCRIPT), *arguments], check=True, timeout=200)
    expected = json.loads((output / "history.json").read_text())["history"]
    for ranks, sizes in EP.items():
        history = run(path, tmp_path / f"{ranks}", ranks, sizes, 3, how, script=TRL_SCRIPT)
        for got, step in zip(history, expected, strict=True):
            assert got == pytest.approx(step, rel=TOLERANCE)
        file = "adapter_model.safetensors" if how == "lora" else "model.safetensors"
        final, plain = (load_file(tmp_path / each / "final" / file) for each in (f"{ranks}", "alone"))
        assert final.keys() == plain.keys()
        for key, value in plain.items():
            torch.testing.assert_close(final[key], value, rtol=1e-3, atol=1e-4)
