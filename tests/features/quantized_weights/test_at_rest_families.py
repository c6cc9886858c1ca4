"""Adapters on weights that are codes at rest, family by family, against one process that trains on the same values.

pytest tests/features/quantized_weights/test_at_rest_families.py -m "full or not full"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import Accelerator
from fullshard.checkpoint import from_pretrained
from fullshard.features import fully_shard, shard_model
from fullshard.features.quantized_weights.marks import Mark
from fullshard.features.quantized_weights.quantize import mark, quantize
from tests.differential import BFLOAT16_TOLERANCE, EPS, Record, check, compare, difference, gradients, parameters, whole
from tests.distributed import run_ranks
from tests.features.quantized_weights.test_at_rest import check_bytes_of, coded_buckets, layers, round_trip
from tests.memory import PeakGrowth
from tests.traps import rank_and_size

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")

STEPS, BATCH, LENGTH, VOCAB = 5, 2, 12, 96
TOLERANCE = 1e-6
TEXT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": None},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}
ROUTED = {**CHOSEN, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
DBRX = {
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
}
EXPERTS = ("gate_up_proj", "down_proj")
ALL_LINEAR = {"target_modules": "all-linear"}
ON_EXPERTS = {"target_modules": [], "target_parameters": [f"experts.{name}" for name in EXPERTS]}
LEFT = ("embed_tokens", "wte", "lm_head", "router", "mlp.gate.", "_bias", "classifier")
"""Parts of names of the weights that no quantization reaches, unless embeddings are asked for."""


class Family(NamedTuple):
    """A model of Transformers, whether it has experts, and modules that adapters get beside all linear layers."""

    model: str
    config: dict[str, Any]
    has_experts: bool = False
    modules: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family("LlamaForCausalLM", TEXT),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**TEXT, **CHOSEN, "num_experts": 4}, True),
    "mixtral": Family("MixtralForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}, True),
    "gpt_oss": Family("GptOssForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}, True),
    "glm4_moe": Family("Glm4MoeForCausalLM", {**TEXT, **ROUTED, "n_shared_experts": 1}, True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", {**TEXT, **ROUTED, **LATENT, "n_shared_experts": 1}, True),
    "llama4": Family(
        "Llama4ForCausalLM",
        {**TEXT, "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1},
        True,
    ),
    # Its experts are one below the other, in parameters of two dims.
    "dbrx": Family(
        "DbrxForCausalLM",
        {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **DBRX},
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        # Smooth: the last bits of what comes to a kink would decide on which side of it it is.
        {"embedding_size": 16, "hidden_sizes": [32, 48], "depths": [2, 1], "layer_type": "basic", "hidden_act": "silu"},
        modules=("convolution",),
    ),
    "embedding": Family("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}, modules=("embed_tokens",)),
}


def adapters_of(family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    # PEFT takes routers for any linear layer: that of Llama-4, whose output is a tuple, and that of DBRX.
    routers = {"Llama4ForCausalLM": "router", "DbrxForCausalLM": "layer"}
    left = {"exclude_modules": [routers[family.model]]} if family.model in routers else {}
    yield "all-linear", {**ALL_LINEAR, **left}
    if family.has_experts:
        yield "parameters", ON_EXPERTS
    if family.modules:
        yield "modules", {"target_modules": list(family.modules)}


def adapted(name: str, target: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The same frozen model with the same adapters in every process; none of them is zero, so all get gradients."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, family.model)
    model = peft.get_peft_model(
        kind(kind.config_class(**family.config)).to(dtype), peft.LoraConfig(r=4, lora_alpha=8, **target)
    )
    for at, parameter in model.named_parameters():
        if "lora_" in at:
            nn.init.normal_(parameter, std=0.02)
    # Batch norms are frozen, too. Dividing by the deviation of two images would magnify what is rounded.
    return model.train(name != "resnet")


def loss_of(name: str, model: Any, step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    if name == "resnet":
        images, labels = torch.randn(BATCH, 3, 16, 16, generator=draw), torch.randint(2, (BATCH,), generator=draw)
        loss: torch.Tensor = model(pixel_values=images, labels=labels).loss
    else:
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)
        loss = model(input_ids=tokens, labels=tokens).loss
    return loss


def check_family(name: str, form: str, dtype: torch.dtype) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, target in adapters_of(FAMILIES[name]):
        found |= {f"{kind}, {what}": value for what, value in check_training(name, form, target, dtype).items()}
    return found


def over_ranks(model: nn.Module) -> None:
    shard_model(model, unit_modules=layers(model), device=torch.device("cpu"))


def above_expert_parallelism(model: Any) -> None:
    """Transformers' own expert parallelism over two ranks, and all but the experts sharded over both."""
    experts, world = (1, 2), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", experts, mesh_dim_names=("copies", "ep"))
    alone = init_device_mesh("cpu", experts[::-1], mesh_dim_names=("dp", "tp"))["tp"]
    found = {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}
    plan = {f"{name}.{each}": "grouped_gemm" for name, module in found.items() for each in module._parameters}
    plan |= dict.fromkeys(found, "ep_dispatch_experts")  # after their parameters
    expert_parallel.apply_expert_parallelism(model, mesh["ep"], alone, plan, "all_to_all")
    for module in found.values():
        fully_shard(module, mesh=mesh["copies"])
    for module in (*layers(model), model):
        fully_shard(module, mesh=world)


def check_training(
    name: str,
    form: str,
    target: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    shard: Callable[[nn.Module], None] = over_ranks,
    is_transposed: bool = False,
) -> dict[str, float]:
    rank, size = rank_and_size()
    reference, model = adapted(name, target, dtype), adapted(name, target, dtype)
    left = tuple(part for part in LEFT if name != "embedding" or part != "embed_tokens")
    weights = {at: p for at, p in reference.named_parameters() if p.dim() > 1 and "lora_" not in at}
    coded = {at for at in weights if not any(part in at for part in left)}
    assert not FAMILIES[name].has_experts or {at.rpartition(".")[2] for at in coded if "experts." in at} >= {*EXPERTS}
    turned = {at for at in coded if is_transposed and "experts." in at}
    for at in coded:
        weight = reference.get_parameter(at)
        in_blocks = weight.data.mT.contiguous() if at in turned else weight.data
        round_trip(in_blocks, form)
        weight.data.copy_(in_blocks.mT if at in turned else in_blocks)
    for at in turned:
        path, _, attribute = at.rpartition(".")
        mark(model.get_submodule(path), attribute, Mark(form, is_transposed=True))
    quantize(model, form, embeddings=name == "embedding")
    shard(model)
    held = {p.name.partition("=")[0] for bucket in coded_buckets(model) for p in bucket.sharded_parameters}
    assert held == coded, sorted(held ^ coded)
    if form == "nf4":
        check_bytes_of(model, 0.57)
    before = parameters(model)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, eps=EPS) for m in (reference, model)
    ]
    differences: dict[str, float] = {}
    for step in range(STEPS):
        expected = torch.stack([loss_of(name, reference, step, other) for other in range(size)]).mean()
        expected.backward()
        loss_of(name, model, step, rank).backward()
        mean = torch.stack([loss_of(name, model, step, other).detach() for other in range(size)]).mean()
        ours: Record = {"loss": {step: mean}, "gradient": gradients(model)}
        theirs: Record = {"loss": {step: expected.detach()}, "gradient": gradients(reference)}
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        ours["norm"], theirs["norm"] = ({step: whole(norm, norm)} for norm in norms)
        differences |= {f"{step}: {what}": value for what, value in compare(ours, theirs).items()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = parameters(model)
    differences |= compare({"weight": after}, {"weight": parameters(reference)})
    moved = {at for at, value in after.items() if difference(value, before[at])}
    assert moved == {at for at, parameter in reference.named_parameters() if parameter.requires_grad}
    assert all("lora_" in at for at in moved)
    if "target_parameters" in target:
        assert all("experts" in at for at in moved)
    return differences


CASES = (
    *(("qwen3_moe", form) for form in ("nf4", "nf4-double", "int8")),
    *(("gpt_oss", form) for form in ("mxfp4", "nf4")),
    *(("deepseek_v3", form) for form in ("fp8", "nf4")),
    *((name, "nf4") for name in FAMILIES if name not in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.full) for case in CASES]
)
def test_adapters_train_as_on_the_same_values_in_one_process(name: str, form: str, size: int) -> None:
    check(run_ranks(check_family, size, name, form, torch.float32), exact=size == 1, tolerance=TOLERANCE)


# On four ranks a sum has another order. Rounded to bfloat16, that may choose other experts.
@pytest.mark.full
@pytest.mark.parametrize(("name", "size"), [("qwen3_moe", 1), ("qwen3_moe", 2), ("llama", 4)])
def test_adapters_train_as_on_the_same_values_in_bfloat16(name: str, size: int) -> None:
    results = run_ranks(check_family, size, name, "nf4", torch.bfloat16)
    check(results, exact=size == 1, tolerance=BFLOAT16_TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_in_the_order_of_gpt_oss(size: int) -> None:
    results = run_ranks(check_training, size, "gpt_oss", "mxfp4", ON_EXPERTS, torch.float32, over_ranks, True)
    check(results, exact=size == 1, tolerance=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "form", "is_transposed"),
    [("qwen3_moe", "nf4", False), ("gpt_oss", "nf4", False), ("gpt_oss", "mxfp4", True)],
)
def test_above_expert_parallelism_of_transformers(name: str, form: str, is_transposed: bool) -> None:
    target = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    how = (torch.float32, above_expert_parallelism, is_transposed)
    check(run_ranks(check_training, 2, name, form, target, *how), exact=False, tolerance=TOLERANCE)


def check_bytes_of_experts(form: str, at_rest: float) -> None:
    """Of two layers large enough that atoms do not count."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    config = transformers.Qwen3MoeConfig(**{**TEXT, **CHOSEN, **wide})
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16().requires_grad_(False)
    quantize(model, form)
    check_bytes_of(shard_model(model, unit_modules=layers(model), device=torch.device("cpu")), at_rest)


@pytest.mark.full
@pytest.mark.parametrize(("form", "at_rest"), [("nf4", 0.57), ("nf4-double", 0.53)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_of_experts_at_rest_and_in_messages(size: int, form: str, at_rest: float) -> None:
    run_ranks(check_bytes_of_experts, size, form, at_rest)


def check_loading(directory: str, form: str) -> tuple[int, int, int]:
    """Peak growth of this process, bytes of its codes, and bytes of the largest interval of a weight as numbers."""
    accelerator = Accelerator(cpu=True)
    model: Any = from_pretrained(transformers.AutoModelForCausalLM, directory, quantize=form, dtype=torch.bfloat16)
    with PeakGrowth() as peak:
        model = accelerator.prepare(model)
    buckets = coded_buckets(model)
    largest = max(2 * parameter.interval.numel for parameter in model.parameters())
    return peak.nbytes, sum(tensor.nbytes for bucket in buckets for tensor in bucket.stored), largest


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory figures of Linux")
def test_loading_takes_codes_and_one_interval(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "moe_intermediate_size": 2048, "num_experts": 16, "num_hidden_layers": 4}
    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(**{**TEXT, **CHOSEN, **large})
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.save_pretrained(tmp_path)
    for peak, codes, largest in run_ranks(check_loading, 2, str(tmp_path), "nf4"):
        assert peak <= codes + largest + 2**27, (peak, codes, largest)  # all intervals would be 400 MB
