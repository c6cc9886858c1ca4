"""Directories that hold layers of bitsandbytes in 4 bits, against Transformers' own loading of the same files.

pytest tests/checkpoint/test_bitsandbytes_files.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen3MoeConfig

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint import export_hf, full_state_dict
from fullshard.core.errors import CheckpointError, ConfigError
from tests.checkpoint.test_coded_files import adapted, check_merge, fill_adapters, held, loss_of, rewrite
from tests.distributed import run_ranks
from tests.trainers import keep_layout
from tests.traps import rank_and_size

bnb: Any = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")

LLAMA = LlamaConfig(
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": "float32"},
)
TARGETS = {"target_modules": "all-linear"}


def four_bits(path: Path, *, double: bool, storage: str = "uint8", kind: str = "nf4") -> Path:
    """Write a small Llama whose linear layers are in 4 bits, as Transformers loads and saves it."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path / "plain")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage, bnb_4bit_compute_dtype="float32",
    )  # fmt: skip
    AutoModelForCausalLM.from_pretrained(path / "plain", quantization_config=config).save_pretrained(path / "base")
    return path / "base"


@torch.no_grad()
def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the state of a model of bitsandbytes' layers, their weights as it decodes them."""
    return {
        name: bnb.functional.dequantize_4bit(p.data, p.quant_state) if hasattr(p, "quant_state") else p
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
@pytest.mark.parametrize("double", [False, True])
def test_layers_are_those_of_transformers(
    double: bool, storage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = four_bits(tmp_path, double=double, storage=storage)
    reference: Any = AutoModelForCausalLM.from_pretrained(path)
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, path)
    assert model.is_loaded_in_4bit and type(model.model.layers[1].mlp.up_proj) is bnb.nn.Linear4bit
    assert "remain nf4" not in caplog.text
    sharded: Any = Accelerator(cpu=True).prepare(model)
    assert not held(sharded)
    whole, stored = full_state_dict(sharded, rank0_only=False), load_file(path / "model.safetensors")
    for name in whole.keys() & stored.keys():  # bytes: as numbers some codes are NaN
        assert torch.equal(whole[name].view(-1).view(torch.uint8), stored[name].view(-1).view(torch.uint8))
    assert {name for name in stored if "absmax" in name} <= whole.keys()
    assert torch.equal(loss_of(sharded, 0, 0), loss_of(keep_layout(reference), 0, 0))


@pytest.mark.parametrize(("form", "double"), [("nf4", False), ("nf4", True), ("nf4-double", True), ("fp4", True)])
def test_codes_of_layers_stay_codes_at_rest(form: str, double: bool, tmp_path: Path) -> None:
    path = four_bits(tmp_path, double=double, kind=form[:3])
    reference: Any = AutoModelForCausalLM.from_pretrained(path)
    sharded: Any = Accelerator(cpu=True).prepare(fullshard.from_pretrained(AutoModelForCausalLM, path, quantize=form))
    expected, stored = values_of(reference), load_file(path / "model.safetensors")
    coded = held(sharded)
    assert coded.keys() == {name for name in expected if name.endswith("_proj.weight")}
    for name, parts in coded.items():
        assert torch.equal(parts["codes"], stored[name].view(-1))
        if double == ("double" in form):
            assert torch.equal(parts["scales"], stored[f"{name}.absmax"])
    for model in (sharded, fullshard.from_pretrained(AutoModelForCausalLM, path, dequantize=True)):
        ready = model if model is sharded else Accelerator(cpu=True).prepare(model)
        whole = full_state_dict(ready, rank0_only=False)
        assert all(torch.equal(whole[name].view(value.shape), value) for name, value in expected.items())


def test_experts_that_were_layers_keep_their_codes(tmp_path: Path) -> None:
    """Earlier versions of Transformers had a layer for each expert, of which today's makes stacks."""
    shape = Qwen3MoeConfig(
        **{"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16},
        **{"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    values = {}
    for name in [name for name in stored if ".experts." in name]:
        packed, state = bnb.functional.quantize_4bit(stored.pop(name), quant_type="nf4", compress_statistics=True)
        stored |= {name: packed, **{f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}}
        values[name.partition(".experts.")[2]] = bnb.functional.dequantize_4bit(packed, state)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    rewrite(tmp_path, lambda _: stored, config.to_dict())
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    sharded: Any = Accelerator(cpu=True).prepare(model)
    experts = "model.layers.0.mlp.experts"
    assert held(sharded).keys() == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    whole = full_state_dict(sharded, rank0_only=False)
    for number in range(4):
        gate, up, down = (values[f"{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(whole[f"{experts}.gate_up_proj"][number], torch.cat([gate, up]))
        assert torch.equal(whole[f"{experts}.down_proj"][number], down)


def check_training(path: Path, form: str | None) -> None:
    """Train adapters on 4-bit files; losses are those of one process on what bitsandbytes decodes."""
    rank, size = rank_and_size()
    expected: Any = AutoModelForCausalLM.from_config(LLAMA)
    expected.load_state_dict(values_of(AutoModelForCausalLM.from_pretrained(path)))
    expected = adapted(expected.requires_grad_(False), **TARGETS)
    accelerator = Accelerator(cpu=True)
    model = adapted(fullshard.from_pretrained(AutoModelForCausalLM, path, quantize=form), **TARGETS)
    model = accelerator.prepare(model)
    assert bool(held(model)) == (form is not None)
    fill_adapters(expected)
    model.load_state_dict({n: v for n, v in expected.state_dict().items() if "lora_" in n}, strict=False)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (expected, model)]
    for step in range(3):
        theirs = torch.stack([loss_of(expected, step, other) for other in range(size)]).mean()
        theirs.backward()
        accelerator.backward(loss_of(model, step, rank))
        mine = torch.stack([loss_of(model, step, other).detach() for other in range(size)]).mean()
        assert float(mine) == pytest.approx(float(theirs), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if form is None:
        with pytest.raises(CheckpointError, match="quantized, so merging would round its adapter"):
            export_hf(path.parent / "exported", model=model)
        return
    export_hf(path.parent / "exported", model=model)
    merged = expected.merge_and_unload().state_dict()
    read = AutoModelForCausalLM.from_pretrained(path.parent / "exported").state_dict()
    assert all(torch.allclose(read[name], value, atol=1e-5) for name, value in merged.items())


@pytest.mark.full
@pytest.mark.parametrize("form", [None, "nf4"])
def test_adapters_train_on_4_bits_as_on_their_values(form: str | None, tmp_path: Path) -> None:
    run_ranks(check_training, 2, four_bits(tmp_path, double=True), form)


def test_merging_onto_4_bits_adds_to_what_bitsandbytes_decodes(tmp_path: Path) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(four_bits(tmp_path, double=True))
    plain: Any = AutoModelForCausalLM.from_config(LLAMA)
    plain.load_state_dict(values_of(reference))
    check_merge(tmp_path, TARGETS, plain)


def test_4_bit_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = four_bits(tmp_path, double=True)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(path / "model.safetensors")
    said = json.loads((path / "config.json").read_text())["quantization_config"]
    state = f"{name}.quant_state.bitsandbytes__nf4"

    def load(ending: str, value: Any, **options: Any) -> None:
        tensors = {n: t for n, t in (whole | {f"{name}{ending}": value}).items() if t is not None}
        rewrite(path, lambda _: tensors, said)
        Accelerator(cpu=True).prepare(fullshard.from_pretrained(AutoModelForCausalLM, path, **options))

    with pytest.raises(
        CheckpointError, match=r"holds \S+nf4, but no file in its directory holds \S+up_proj\.weight\.absmax"
    ):
        load(".absmax", None)
    with pytest.raises(
        CheckpointError, match=r"holds \S+up_proj\.weight\.\S+, but no .*quant_state\.bitsandbytes__nf4"
    ):
        load(state.removeprefix(name), None)
    with pytest.raises(CheckpointError, match=r"\(192, 64\) has 6144 bytes and 7 scales, expected 6144 and 192"):
        load(".absmax", torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"quant_map does not match the table that bitsandbytes"):
        load(".quant_map", torch.zeros(16))
    with pytest.raises(CheckpointError, match=r"bitsandbytes__nf4 is not in the format that bitsandbytes"):
        load(state.removeprefix(name), torch.full((20,), 65, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"double quantization False in the model and True in model"):
        load("", whole[name], quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    with pytest.raises(ConfigError, match=r"requests bitsandbytes' layers, but quantize or dequantize replaces"):
        load("", whole[name], quantization_config=BitsAndBytesConfig(load_in_4bit=True), quantize="nf4")
    said |= {"load_in_4bit": False, "load_in_8bit": True}
    with pytest.raises(ConfigError, match=r"already quantized \(bitsandbytes, 8-bit\)"):
        load("", whole[name])
