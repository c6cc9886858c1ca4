"""Directories whose weights are quantized already, against Transformers' own loading of the same files.

pytest tests/checkpoint/test_coded_files.py
"""

from __future__ import annotations

import json
import logging
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.auto import AutoHfQuantizer
from typer.testing import CliRunner

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint import export_hf, full_state_dict, load_checkpoint, load_pretrained, save_checkpoint
from fullshard.checkpoint.coded_files import stored_values
from fullshard.checkpoint.offline import open_merged
from fullshard.cli.main import app
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.layout import Interval
from fullshard.core.sizes import MIB
from fullshard.engine.lookup import units_of
from fullshard.features.quantized_weights.at_rest import CodedBucket
from fullshard.features.quantized_weights.codecs import codec
from fullshard.integrations.transformers.at_load import load_sharded
from fullshard.recipes.model import build_model
from tests.checkpoint.test_pretrained import _status as memory_status
from tests.distributed import run_ranks
from tests.traps import rank_and_size

pytest.importorskip("torchao", reason="needs the extra `quant`")
peft = pytest.importorskip("peft")

VOCAB = 97
GPT_OSS = GptOssConfig(
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"max_position_embeddings": 64, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    dtype="bfloat16",
)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], said: Any) -> None:
    """Replace the tensors of a directory, and what its configuration says of quantization."""
    tensors = change(load_file(path / "model.safetensors"))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


def gpt_oss(path: Path, **sizes: int) -> Path:
    """Write a small gpt-oss as it is published: the experts in MXFP4."""
    torch.manual_seed(0)
    shape = GptOssConfig(**{**GPT_OSS.to_dict(), "layer_types": None, **sizes})
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if name.endswith(tuple(EXPERTS))]:
            turned = tensors.pop(name).mT.contiguous()
            codes, scales = codec("mxfp4").encode(turned.view(-1))
            shape = (*turned.shape[:-1], turned.shape[-1] // 32)
            tensors |= {f"{name}_blocks": codes.view(*shape, 16), f"{name}_scales": scales.view(shape)}
        return tensors

    rewrite(path, change, MXFP4)
    return path


DEEPSEEK = DeepseekV3Config(
    **{"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    **{"max_position_embeddings": 64, "dtype": "bfloat16"},
)


def in_fp8(path: Path, block: list[int], scale_fmt: str = "float", shape: Any = DEEPSEEK) -> Path:
    """Write a small model whose linear layers and experts are in FP8, quantized by Transformers' own code."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    operation = Fp8Quantize(AutoHfQuantizer.from_config(config))

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
            tensors |= operation.convert({name: tensors.pop(name)})
        return tensors

    rewrite(path, change, config.to_dict())
    return path


def held(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's parts of each coded weight, by its name."""
    buckets = [bucket for unit in units_of(model) for bucket in unit.buckets if isinstance(bucket, CodedBucket)]
    return {p.name: b.weights(i).parts for b in buckets for i, p in enumerate(b.sharded_parameters)}  # type: ignore[attr-defined]


def same_values(model: Any, reference: Any, expected_held: set[str]) -> Any:
    """Shard a model; compare its values with those of Transformers', and which of them are codes."""
    sharded = Accelerator(cpu=True).prepare(model)
    assert held(sharded).keys() == expected_held
    whole = full_state_dict(sharded, rank0_only=False)
    expected = reference.state_dict()
    assert whole.keys() == expected.keys()
    assert all(whole[n].dtype == t.dtype and torch.equal(whole[n], t) for n, t in expected.items())
    return sharded


def experts_of(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.endswith(tuple(EXPERTS))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_stays_as_it_is_in_the_files(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpt_oss(tmp_path)
    widened = Mxfp4Config(dequantize=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=widened, dtype=dtype)
    with caplog.at_level(logging.WARNING):
        model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path, dtype=dtype)
    assert "parameters remain mxfp4, as in the files, and are frozen" in caplog.text
    experts = experts_of(model)
    assert len(experts) == 4 and not any(model.get_parameter(name).requires_grad for name in experts)
    assert getattr(model.config, "quantization_config", None) is None
    sharded = same_values(model, reference, experts)
    stored = load_file(tmp_path / "model.safetensors")
    for name, parts in held(sharded).items():  # the very bytes of the files
        assert torch.equal(parts["codes"], stored[f"{name}_blocks"].view(-1))
        assert torch.equal(parts["scales"], stored[f"{name}_scales"].view(-1))
    for options in ({"quantization_config": widened}, {"dequantize": True}):
        model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path, dtype=dtype, **options)
        assert all(parameter.requires_grad for parameter in model.parameters())
        same_values(model, reference, set())


def test_the_train_command_reads_values(tmp_path: Path) -> None:
    """It trains all weights, which codes cannot be."""
    tokenizer = UserDict(a=0)  # as long as its vocabulary
    tokenizer.get_vocab = tokenizer.copy  # type: ignore[attr-defined]
    model, said = build_model(str(gpt_oss(tmp_path)), tokenizer=tokenizer, seq_len=8, seed=0)
    assert said.startswith("weights from") and all(p.requires_grad for p in model.parameters())


def adapted(model: Any, **targets: Any) -> Any:
    """Put the same adapters on a model in every process."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **targets))


def fill_adapters(model: Any) -> None:
    """Give adapters values that depend on their names alone; none is zero, so all get gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                value = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.copy_(value)


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def check_training(path: Path, targets: dict[str, Any], widened: Any) -> None:
    """Train adapters on coded weights; losses are those of one process on the values, as Transformers reads them."""
    rank, size = rank_and_size()
    reference = AutoModelForCausalLM.from_pretrained(path, quantization_config=widened, dtype=torch.float32)
    # Transformers leaves what is no code in bf16 there, whatever it is asked for.
    expected = adapted(reference.float().requires_grad_(False), **targets)
    model = adapted(fullshard.from_pretrained(AutoModelForCausalLM, path, dtype=torch.float32), **targets)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    assert held(model)
    fill_adapters(expected)
    model.load_state_dict({n: v for n, v in expected.state_dict().items() if "lora_" in n}, strict=False)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (expected, model)]
    for step in range(3):
        theirs = torch.stack([loss_of(expected, step, other) for other in range(size)]).mean()
        theirs.backward()
        ours = loss_of(model, step, rank)
        accelerator.backward(ours)
        mine = torch.stack([loss_of(model, step, other).detach() for other in range(size)]).mean()
        assert float(mine) == pytest.approx(float(theirs), rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    saved, exported = path.parent / "saved", path.parent / "exported"
    save_checkpoint(saved, model=model)
    other = adapted(fullshard.from_pretrained(AutoModelForCausalLM, path, dtype=torch.float32), **targets)
    other = Accelerator(cpu=True).prepare(other)
    load_checkpoint(saved, model=other)
    assert torch.equal(loss_of(other, 9, 0), loss_of(model, 9, 0))
    export_hf(exported, model=model)
    merged = expected.merge_and_unload()
    read = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert getattr(merged.config, "quantization_config", None) is None
    assert all(torch.allclose(read[name], value, atol=1e-5) for name, value in merged.state_dict().items())


@pytest.mark.full
@pytest.mark.parametrize(
    "targets", [{"target_parameters": EXPERTS, "target_modules": []}, {"target_modules": "all-linear"}], ids=str
)
def test_adapters_train_on_mxfp4_as_on_its_values(targets: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(check_training, 2, gpt_oss(tmp_path / "base"), targets, Mxfp4Config(dequantize=True))


def test_files_in_mxfp4_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    whole = load_file(tmp_path / "model.safetensors")

    def load(**changes: Any) -> None:
        tensors = {n: changes.get(n.rpartition("_")[2], t) if n.startswith(f"{name}_") else t for n, t in whole.items()}
        rewrite(tmp_path, lambda _: {n: t for n, t in tensors.items() if t is not None}, MXFP4)
        Accelerator(cpu=True).prepare(fullshard.from_pretrained(AutoModelForCausalLM, tmp_path))

    with pytest.raises(
        CheckpointError, match=r"holds \S+layers\.1\.\S+down_proj_blocks, but no .* \S+down_proj_scales"
    ):
        load(scales=None)
    with pytest.raises(
        CheckpointError, match=r"has shape \(4, 64, 3, 16\) and \S+_scales has shape \(4, 64, 2\), expected"
    ):
        load(scales=whole[f"{name}_scales"][..., :2])
    with pytest.raises(CheckpointError, match=r"down_proj has shape \(4, 96, 64\) in the model and \(4, 64, 64\)"):
        load(blocks=whole[f"{name}_blocks"][:, :, :2], scales=whole[f"{name}_scales"][..., :2])


def test_another_quantization_of_coded_files_is_asked_for_by_its_form(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    with pytest.raises(ConfigError, match=r"is a BitsAndBytesConfig, but .* already quantized \(mxfp4\)") as error:
        fullshard.from_pretrained(
            AutoModelForCausalLM, tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        )
    assert "quantize=..." in str(error.value.hint)
    model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path, quantize="int8")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    sharded = Accelerator(cpu=True).prepare(model)
    assert held(sharded).keys() > experts_of(reference)
    for name in experts_of(reference):
        values = reference.get_parameter(name)
        expected = torch.empty_like(values).view(-1)
        codec("int8").decode(codec("int8").encode(values.data.view(-1)), expected)
        assert torch.equal(sharded.get_parameter(name).full_tensor().view(-1), expected)


def check_merge(path: Path, targets: dict[str, Any], reference: Any) -> None:
    """`fullshard merge` onto coded files gives PEFT's merge with the values, and says nothing of quantization."""
    model = adapted(reference, **targets)
    fill_adapters(model)
    model.save_pretrained(path / "adapter")
    run = CliRunner().invoke(app, ["merge", *(str(path / name) for name in ("base", "adapter", "merged"))])
    assert run.exit_code == 0, run.output
    assert "was trained on" not in run.stderr
    merged = model.merge_and_unload()
    read = AutoModelForCausalLM.from_pretrained(path / "merged")
    assert getattr(read.config, "quantization_config", None) is None
    assert all(torch.equal(read.state_dict()[name], value) for name, value in merged.state_dict().items())


def test_merging_onto_mxfp4_is_exact(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "base")
    widened = Mxfp4Config(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=widened)
    check_merge(tmp_path, {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}, reference)


def test_quantized_files_that_cannot_be_read_are_refused_by_every_reader(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "base")
    model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path / "base")
    rewrite(tmp_path / "base", lambda tensors: tensors, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\)") as error:
        fullshard.from_pretrained(AutoModelForCausalLM, tmp_path / "base")
    assert "mxfp4" in str(error.value.hint)
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\)"), open_merged(tmp_path / "base", tmp_path):
        pass
    sharded = Accelerator(cpu=True).prepare(model)
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\)"):
        load_pretrained(tmp_path / "base", sharded)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_stays_as_it_is_in_the_files(scale_fmt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_fp8(tmp_path, [64, 128], scale_fmt)
    widened = FineGrainedFP8Config(dequantize=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=widened)
    with caplog.at_level(logging.WARNING):
        model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    assert "parameters remain fp8, as in the files" in caplog.text and "blocks that no form supports" not in caplog.text
    coded = {n for n, p in model.named_parameters() if n.endswith(("_proj.weight", "_mqa.weight", *EXPERTS))}
    sharded = same_values(model, reference, coded)
    stored = load_file(tmp_path / "model.safetensors")
    own = held(sharded)["model.layers.0.mlp.down_proj.weight"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(own["codes"].view(torch.uint8), stored[name].view(torch.uint8).view(-1))
    scales = stored[f"{name}_scale_inv"].float().repeat_interleave(64, 0)
    assert torch.equal(own["scales"], scales.view(-1))
    model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path, quantization_config=widened)
    same_values(model, reference, set())


def test_fp8_in_blocks_that_no_form_has_is_read_as_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_fp8(tmp_path, [64, 32])
    reference: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    with caplog.at_level(logging.WARNING):
        model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    assert "as codes in blocks that no form supports" in caplog.text
    assert all(parameter.requires_grad for parameter in model.parameters())
    same_values(model, reference, set())


def test_rows_that_are_no_whole_number_of_blocks_have_the_scales_of_theirs(tmp_path: Path) -> None:
    """Transformers refuses such matrices, or cuts them into equal parts; what writes them has a shorter last block."""
    codes = torch.randn(3, 200, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 2)
    save_file({"x": codes, "x_scale_inv": scales}, tmp_path / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fp8}))
    source = stored_values(tmp_path)["x"]
    whole = codes.float() * scales.repeat_interleave(128, 1)[:, :200].repeat_interleave(128, 2)
    for interval in (Interval(0, 153_600), Interval(51_111, 102_555), Interval(7, 7)):
        out = torch.empty(interval.numel)
        source.read(interval, out)
        assert torch.equal(out, whole.view(-1)[interval.start : interval.stop])


@pytest.mark.full
@pytest.mark.parametrize("targets", [{"target_parameters": EXPERTS}, {"target_modules": "all-linear"}], ids=str)
def test_adapters_train_on_fp8_as_on_its_values(targets: dict[str, Any], tmp_path: Path) -> None:
    path = in_fp8(tmp_path / "base", [64, 128])
    run_ranks(check_training, 2, path, {"target_modules": []} | targets, FineGrainedFP8Config(dequantize=True))


def test_merging_onto_fp8_is_exact(tmp_path: Path) -> None:
    in_fp8(tmp_path / "base", [64, 128])
    widened = FineGrainedFP8Config(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=widened)
    check_merge(tmp_path, {"target_parameters": EXPERTS, "target_modules": ["o_proj", "kv_b_proj"]}, reference)


def test_files_in_fp8_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    in_fp8(tmp_path, [64, 128])
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(tmp_path / "model.safetensors")

    def load(**changes: Any) -> None:
        tensors = whole | {name if key == "codes" else f"{name}_scale_inv": value for key, value in changes.items()}
        config = {"quant_method": "fp8", "weight_block_size": [64, 128]}
        rewrite(tmp_path, lambda _: {n: t for n, t in tensors.items() if t is not None}, config)
        fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)

    with pytest.raises(CheckpointError, match=r"holds \S+up_proj\.weight, but no .* \S+up_proj\.weight_scale_inv"):
        load(scales=None)
    with pytest.raises(CheckpointError, match=r"holds \S+weight_scale_inv, but no .* \S+up_proj\.weight$"):
        load(codes=None)
    with pytest.raises(
        CheckpointError, match=r"shape \(256, 128\) .*_scale_inv has shape \(3, 1\), expected \(4, 1\) for blocks"
    ):
        load(scales=torch.ones(3, 1))
    with pytest.raises(CheckpointError, match=r"has dtype torch\.int8, but .* so torch\.float8_e4m3fn was"):
        load(codes=torch.ones(256, 64, dtype=torch.int8))


def check_tensor_parallel(path: Path) -> None:
    widened = FineGrainedFP8Config(dequantize=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(path, quantization_config=widened)
    model: Any = load_sharded(LlamaForCausalLM, path, {"tp_size": 2, "fsdp_size": 2})
    coded = held(model)
    assert len(coded) == 7
    for name in coded:
        assert torch.equal(model.get_parameter(name).full_tensor(), reference.get_parameter(name)), name
    with pytest.raises(
        CheckpointError, match=r"down_proj\.weight of shape \(256, 384\): tensor .* dim 1 in the middle of a block of"
    ):
        load_sharded(LlamaForCausalLM, path.parent / "narrow", {"tp_size": 2, "fsdp_size": 2})
    plain: Any = load_sharded(
        LlamaForCausalLM, path.parent / "narrow", {"tp_size": 2, "fsdp_size": 2}, quantization_config=widened
    )
    assert not held(plain)


@pytest.mark.full
def test_fp8_beneath_tensor_parallelism_is_cut_between_blocks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 1}
    for name, width in (("wide", 512), ("narrow", 384)):
        shape = LlamaConfig(vocab_size=VOCAB + 1, hidden_size=256, intermediate_size=width, dtype="bfloat16", **heads)
        in_fp8(tmp_path / name, [128, 128], shape=shape)
    run_ranks(check_tensor_parallel, 4, tmp_path / "wide")


def check_peak_memory(path: Path) -> list[tuple[int, int]]:
    """Peak resident bytes while loading, and bytes of this rank's shard: as codes, then as values."""
    accelerator, found = Accelerator(cpu=True), []
    for dequantize in (False, True):
        model: Any = fullshard.from_pretrained(AutoModelForCausalLM, path, dequantize=dequantize)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = memory_status("VmRSS")
        model = accelerator.prepare(model)
        own = sum(bucket.main.nbytes for unit in units_of(model) for bucket in unit.buckets)
        found.append((memory_status("VmHWM") - before, own))
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory figures of Linux")
def test_codes_are_read_a_piece_at_a_time(tmp_path: Path) -> None:
    gpt_oss(tmp_path, hidden_size=512, intermediate_size=1024, num_local_experts=64, num_hidden_layers=1)
    for coded, values in run_ranks(check_peak_memory, 2, tmp_path):
        assert coded[1] < 0.3 * values[1]
        # A piece, or a matrix of the experts, in a few forms; a weight has 128 MiB.
        assert max(peak - own for peak, own in (coded, values)) < 48 * MIB, (coded, values)
