"""Weights that are codes at rest: their values, their bytes, and what is refused.

pytest tests/features/quantized_weights/test_at_rest.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.checkpoint import from_pretrained
from fullshard.core.errors import ConfigError, LifecycleError, WrapError
from fullshard.core.forms import FORMS
from fullshard.engine.lookup import units_of
from fullshard.features import CPUOffloadPolicy, MixedPrecisionPolicy, describe, fully_shard, shard_model, unsharded
from fullshard.features.consistency.replicas import digest
from fullshard.features.meta_device.initialize import WEIGHTS
from fullshard.features.quantized_weights.at_rest import CodedBucket
from fullshard.features.quantized_weights.codecs import codec
from fullshard.features.quantized_weights.marks import Mark, mark_of, stamp
from fullshard.features.quantized_weights.quantize import mark, quantize
from tests.differential import is_same_product
from tests.distributed import run_ranks
from tests.traps import rank_and_size

bnb = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith("layers")]


def is_coded(name: str, parameter: torch.Tensor) -> bool:
    """Which weights of these models a quantization is to reach, told by their names."""
    is_large = name.endswith(("_proj.weight", "_proj.base_layer.weight", "gate_up_proj", "down_proj"))
    return is_large and "lora" not in name


@torch.no_grad()
def round_trip(parameter: torch.Tensor, form: str) -> None:
    """Give a weight the values that quantizing the whole makes of it: by bitsandbytes itself, where it has the form."""
    if form not in ("nf4", "nf4-double", "fp4"):
        decoded = torch.empty_like(parameter).view(-1)
        codec(form).decode(codec(form).encode(parameter.data.view(-1)), decoded)
        parameter.copy_(decoded.view(parameter.shape))
        return
    kind, _, double = form.partition("-")
    # Flat: of rows that are no whole number of blocks long bitsandbytes decodes others than it has encoded, on a CPU.
    flat = parameter.data.view(-1)
    coded, state = bnb.functional.quantize_4bit(flat, quant_type=kind, compress_statistics=bool(double))
    parameter.copy_(bnb.functional.dequantize_4bit(coded, state).view(parameter.shape))


def wide(form: str, **options: Any) -> Any:
    """Two layers large enough that padding does not count, coded, and a trained one; sharded."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 640), nn.Linear(640, 512), nn.Linear(512, 8)).bfloat16()
    model[:2].requires_grad_(False)
    quantize(model, form)
    return shard_model(model, unit_modules=list(model), device=torch.device("cpu"), **options)


def check_bytes_of(model: nn.Module, at_rest: float) -> None:
    """Coded weights take at most so many bytes per parameter at rest, and their messages 0.29 of bfloat16's."""
    buckets, message = coded_buckets(model), 0
    own = sum(bucket.layout.numel / bucket.mesh.shard_size for bucket in buckets)
    assert sum(tensor.nbytes for bucket in buckets for tensor in bucket.stored) <= at_rest * own
    for bucket in buckets:
        assert bucket.buffer.nbytes == 0  # nothing whole at rest
        with bucket.owner.waiting("unshard"):
            bucket.issue_unshard()
            message += bucket.buffer._message.full.nbytes
            bucket.wait_unshard()
        assert bucket.buffer.nbytes == bucket.buffer.full.nbytes  # the message is gone
        bucket.reshard()
    assert message <= 0.29 * 2 * sum(bucket.layout.numel for bucket in buckets)


def check_bytes(form: str, at_rest: float) -> None:
    _, size = rank_and_size()
    model = wide(form)
    check_bytes_of(model, at_rest)
    numel = sum(p.numel() for p in model.parameters())
    assert describe(model).rank_nbytes <= (at_rest + 0.05) * numel / size


@pytest.mark.parametrize("form", ["nf4", "nf4-double"])
@pytest.mark.parametrize("size", [1, 2])
def test_bytes_at_rest_and_in_messages(form: str, size: int) -> None:
    run_ranks(check_bytes, size, form, 0.53 if "double" in form else 0.57)


def values_of(model: nn.Module, form: str) -> dict[str, torch.Tensor]:
    """What bitsandbytes makes of the weights of `wide`."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(512, 640), nn.Linear(640, 512), nn.Linear(512, 8)).bfloat16()
    for layer in plain[:2]:
        round_trip(layer.weight, form)
    return dict(plain.state_dict())


def check_values(options: dict[str, Any]) -> None:
    """All that a script may read is what bitsandbytes makes of the whole, and replicas have the same bytes."""
    model = wide("nf4", **options)
    expected = values_of(model, "nf4")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.shape == expected[name].shape
        assert torch.equal(parameter.full_tensor(), expected[name])
        own = expected[name].view(-1)[parameter.interval.start : parameter.interval.stop]
        assert torch.equal(parameter.to_local().view(-1), own) and torch.equal(
            (parameter * 2).to_local().view(-1), own * 2
        )
    with unsharded(model):
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    assert len({*digests(model)}) == 1
    assert "nf4" in str(describe(model))
    output = model(torch.ones(3, 512, dtype=torch.bfloat16))
    output.sum().backward()
    assert model[2].weight.grad is not None


def digests(model: nn.Module) -> list[int]:
    schedule = units_of(model)[0].schedule
    return [
        one
        for one, place in schedule.mesh.all_gather_object((digest(schedule), schedule.mesh.shard_rank))
        if place == 0
    ]


WAYS = {
    "alone": (1, {}),
    "sharded": (2, {}),
    "replicated": (2, {"strategy": "NO_SHARD"}),
    "kept": (2, {"strategy": "SHARD_GRAD_OP"}),
    "hybrid": (4, {"strategy": "HYBRID_SHARD", "shard_size": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_what_decoding_the_whole_gives(way: str) -> None:
    size, options = WAYS[way]
    run_ranks(check_values, size, options)


def check_mixed_precision() -> None:
    """Weights of float32 are coded as such, and decoded into what forward computes in, at rest and in forward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
    expected, seen = torch.empty(128 * 64, dtype=torch.bfloat16), list[torch.Tensor]()
    codec("nf4").decode(codec("nf4").encode(model[0].weight.detach().view(-1)), expected)
    quantize(model[0].requires_grad_(False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard_model(model, unit_modules=list(model), device=torch.device("cpu"), mp_policy=policy)
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    model(torch.ones(2, 64)).sum().backward()
    for weight in (model[0].weight.full_tensor(), *seen):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight.view(-1), expected)
    assert len(seen) == 1


def test_values_are_decoded_into_the_compute_dtype() -> None:
    run_ranks(check_mixed_precision, 2)


class Stacked(nn.Module):
    """Matrices (in, out), as those of gpt-oss, and a weight of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 96, 160))
        self.odd = nn.Parameter(torch.randn(33, 67))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.bmm(x.expand(3, -1, -1), self.up).sum(0)[:, :67] @ self.odd.t()
        return out


def check_form(form: str, is_transposed: bool) -> None:
    torch.manual_seed(0)
    model: Any = Stacked().requires_grad_(False)
    reference: Any = Stacked().requires_grad_(False)
    reference.load_state_dict(model.state_dict())
    turned = reference.up.data.mT.contiguous() if is_transposed else reference.up.data.clone()
    round_trip(turned, form)
    round_trip(reference.odd, form)
    reference.up.data = turned.mT if is_transposed else turned
    mark(model, "up", Mark(form, is_transposed))
    mark(model, "odd", Mark(form))
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    assert len(units_of(model)[0].buckets) == 1
    named: Any = model.named_parameters()
    for name, parameter in named:
        expected = reference.get_parameter(name)
        assert torch.equal(parameter.full_tensor(), expected)
        assert torch.equal(parameter[1].full_tensor(), expected[1])
        assert torch.equal(parameter.double().sum().full_tensor(), expected.double().sum())
        found = torch.full_like(expected, torch.nan)
        for box in parameter.boxes():
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            found[place] = parameter.to_local().reshape(-1).as_strided(box.sizes, box.strides, box.start)
        own = ~found.isnan()
        assert own.sum() == parameter.interval.numel and torch.equal(found[own], expected[own])
    x = torch.randn(5, 96).requires_grad_()
    given = [torch.autograd.grad(each(x).sum(), x)[0] for each in (model, reference)]
    assert is_same_product(*given)


@pytest.mark.parametrize("size", [1, 3])
def test_every_form_gives_the_values_of_the_whole(size: int) -> None:
    run_ranks(check_forms, size)


def check_forms() -> None:
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles what it has no kernels for
        for form in FORMS:
            check_form(form, is_transposed=False)
        check_form("mxfp4", is_transposed=True)
        check_form("nf4-double", is_transposed=True)


def check_memory(is_shared: bool, offload: Any) -> float:
    model = wide("nf4", offload_policy=offload)
    bucket = coded_buckets(model)[0]
    assert (bucket.buffer.main is not None) == is_shared
    assert bucket.plan.main_is_on_host == (offload is not None)
    loss: torch.Tensor = model(torch.ones(3, 512, dtype=torch.bfloat16)).sum()
    loss.backward()
    assert torch.equal(model[0].weight.full_tensor(), values_of(model, "nf4")["0.weight"])
    return loss.item()


def coded_buckets(model: nn.Module) -> list[CodedBucket]:
    return [b for unit in units_of(model) for b in unit.buckets if isinstance(b, CodedBucket)]


def test_codes_are_in_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share memory send nothing; others have messages; shards may be in host memory beside those."""
    shared = run_ranks(check_memory, 2, True, None)
    monkeypatch.setenv("FULLSHARD_COMM", "gloo")
    assert run_ranks(check_memory, 2, False, None) == shared
    monkeypatch.setenv("FULLSHARD_OFFLOAD", "rehearse")
    assert run_ranks(check_memory, 2, False, CPUOffloadPolicy()) == shared


def check_refusals() -> None:
    model = wide("nf4")
    weight = model[0].weight
    for change in (
        weight.zero_,
        lambda: weight[0].fill_(1),
        lambda: weight.data.mul_(2),
        lambda: weight.copy_(weight * 2),
    ):
        with pytest.raises(LifecycleError, match="stored as codes") as error:
            change()
        assert "adapter" in str(error.value.hint)
    for train in (weight.requires_grad_, lambda: setattr(weight, "requires_grad", True)):
        with pytest.raises(LifecycleError, match=r"0\.weight is stored as codes, which no optimizer") as error:
            train()
        assert not weight.requires_grad
    with pytest.raises(LifecycleError, match="cannot cast sharded parameters that are stored as codes"):
        model.float()
    with (
        pytest.raises(LifecycleError, match=r"0\.weight changed in place inside unsharded"),
        unsharded(model, writeback=True),
    ):
        model[0].weight.zero_()
    with unsharded(model), pytest.raises(LifecycleError, match="which no optimizer"):
        model[0].weight.requires_grad_()
        model(torch.ones(3, 512, dtype=torch.bfloat16))
    assert torch.equal(weight.full_tensor(), values_of(model, "nf4")["0.weight"])


@torch.no_grad()
def test_what_cannot_be_is_an_error() -> None:
    run_ranks(check_refusals, 2)


def test_a_weight_that_is_trained_is_an_error_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    mark(model[0], "weight", Mark("nf4"))
    with pytest.raises(WrapError, match=r"0\.weight: trainable weights are marked to be stored as codes") as error:
        shard_model(model, unit_modules=[], device=torch.device("cpu"))
    assert error.value.hint is not None and "freeze them" in error.value.hint
    with pytest.raises(WrapError, match=r"no weight of Linear can be stored as nf4.*trained"):
        quantize(nn.Linear(64, 64))
    with pytest.raises(ConfigError, match="unknown storage form 'nf5'"):
        quantize(model, "nf5")


def test_the_report_names_what_is_reached_and_what_is_left() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 64, 32))

    model = nn.ModuleDict(
        {
            **{"embedding": nn.Embedding(100, 64), "linear": nn.Linear(64, 64), "gate": nn.Linear(64, 4)},
            **{
                "convolution": nn.Conv2d(16, 16, 3),
                "depthwise": nn.Conv1d(64, 64, 4, groups=64),
                "norm": nn.LayerNorm(64),
            },
            **{"experts": Experts(), "trained": nn.Linear(64, 64)},
            **{"complex": nn.Linear(64, 32, bias=False, dtype=torch.complex64), "recurrent": nn.GRUCell(64, 32, False)},
            **{"router": nn.ModuleDict({"layer": nn.Linear(64, 32, bias=False)})},
            **{"attention": nn.MultiheadAttention(32, 4, bias=False), "coded": nn.Linear(64, 32, bias=False)},
        }
    ).requires_grad_(False)
    model["coded"].to(torch.float8_e4m3fn)
    model["trained"].requires_grad_(True)
    found = quantize(model)
    small = 64 + 64 * 4 + 4 + 16 + 64 * 4 + 64 + 128
    assert found.marked == {"linear layers": 4096 + 4 * 1024, "convolutions": 2304, "stacked weights": 8192}
    assert found.left == {
        **{"embeddings": 6400, "small ones": small, "trained": 4160, "complex numbers": 2048, "coded already": 2048},
        **{"routers": 2048, "GRUCell.weight_ih": 96 * 64, "GRUCell.weight_hh": 96 * 32},
    }
    assert str(found).startswith("nf4 at rest: linear layers 8.2 k (")
    assert quantize(model, embeddings=True).marked["embeddings"] == 6400
    copied: Any = copy.deepcopy(model)
    stamp(copied)
    assert mark_of(copied["linear"].weight) == Mark("nf4") and mark_of(copied["linear"].bias) is None


class CodedFiles:
    """Stands for files with the codes of one weight, and the values of the others."""

    def __init__(self, form: str, weights: dict[int, torch.Tensor]) -> None:
        self.form, self.weights, self.was_read = form, weights, 0

    def start(self, model: nn.Module) -> None: ...

    def make_whole(self, module: nn.Module, device: torch.device) -> None: ...

    def initialize(self, module: nn.Module) -> bool:
        return False

    def holds(self, slot: Any) -> bool:
        return True

    def read(self, slot: Any, interval: Any, out: torch.Tensor) -> None:
        weight = self.weights[slot.parameter.numel()]
        assert slot.parameter.dim() == 1 or slot.owners[0][1] == "odd"
        out.copy_(weight.view(-1)[interval.start : interval.stop])

    def read_parts(self, slot: Any, interval: Any, form: Any, parts: dict[str, torch.Tensor]) -> bool:
        if slot.owners[0][1] == "odd":
            return False
        whole = codec(self.form).encode(self.weights[slot.parameter.numel()].mT.reshape(-1))
        for part, stored in zip(form.parts, whole, strict=True):
            parts[part.name].copy_(stored[part.numel(interval.start) : part.numel(interval.stop)])
        self.was_read += interval.numel
        return True


def check_codes_are_read() -> None:
    torch.manual_seed(0)
    real = Stacked()
    files = CodedFiles("mxfp4", {p.numel(): p.data.bfloat16() for p in real.parameters()})
    with torch.device("meta"):
        model: Any = Stacked().requires_grad_(False).bfloat16()
    mark(model, "up", Mark("mxfp4", is_transposed=True))
    mark(model, "odd", Mark("mxfp4"))
    vars(model)[WEIGHTS] = files
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    assert files.was_read == model.up.interval.numel
    for weight, parameter in (
        (real.up.data.bfloat16().mT.contiguous(), model.up),
        (real.odd.data.bfloat16(), model.odd),
    ):
        round_trip(weight, "mxfp4")
        assert torch.equal(parameter.full_tensor(), weight.mT if parameter is model.up else weight)


def test_codes_are_read_as_codes() -> None:
    run_ranks(check_codes_are_read, 2)


def check_read(directory: str) -> None:
    """From files, each rank its intervals; and from a state dict, once the modules hold values."""
    model: Any = from_pretrained(transformers.Qwen3MoeForCausalLM, directory)
    quantize(model.requires_grad_(False))
    shard_model(model, unit_modules=layers(model), device=torch.device("cpu"))
    reference = transformers.Qwen3MoeForCausalLM.from_pretrained(directory)
    for name, parameter in reference.named_parameters():
        if is_coded(name, parameter):
            round_trip(parameter, "nf4")
    expected = dict(reference.named_parameters())
    assert all(torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters())
    values = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).state_dict()
    for give in (lambda model: model.load_state_dict(values), lambda model: model.to_empty(device="cpu")):
        with pytest.raises(
            WrapError, match=r"Linear\.weight \(64, 64\) cannot be stored as codes: its values are missing"
        ) as error:
            give(on_meta())
        assert "assign=True" in str(error.value.hint)
    late = on_meta()
    late.load_state_dict(values, assign=True)
    round_trip(values["0.weight"], "nf4")
    assert torch.equal(late[0].weight.full_tensor(), values["0.weight"])


def on_meta() -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    quantize(model)
    return fully_shard(model)


def test_values_come_from_files_and_state_dicts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**COMMON, **MIXTURE)).save_pretrained(tmp_path)
    run_ranks(check_read, 2, str(tmp_path))
