"""Weights quantized by bitsandbytes, sharded with their scales, against one process that holds them whole.

pytest tests/features/quantized_weights/test_quantized.py
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.core.errors import WrapError
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import unit_of
from fullshard.features import MixedPrecisionPolicy, ShardedParameter, shard_model
from fullshard.features.quantized_weights.codecs import _PIECE_NUMEL
from fullshard.features.quantized_weights.scales import (
    _quantize_4bit,
    aliases,
    dequantized,
    expose_scales,
    is_exact,
)
from tests.differential import EPS, TOLERANCE, is_same_product, rounding
from tests.distributed import run_ranks
from tests.traps import rank_and_size

bnb = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")

WIDTH, HIDDEN, RANK = 128, 256, 4
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Adapted(nn.Module):
    """A frozen quantized layer with a trainable low-rank adapter beside it."""

    def __init__(self, base: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


class Block(nn.Module):
    """Two quantized layers and a norm."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one = Adapted(make(WIDTH, HIDDEN), WIDTH, HIDDEN)
        self.two = Adapted(make(HIDDEN, WIDTH), HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.two(torch.relu(self.one(self.norm(x))))
        return result


def build(make: Any, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    """The same model with the same quantized weights in every process."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(make) for _ in range(3)))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not isinstance(parameter, bnb.nn.Params4bit | bnb.nn.Int8Params):
            parameter.data = torch.randn_like(parameter) * 0.05 + ("norm.weight" in name)
            parameter.requires_grad_("down" in name or "up" in name)
            parameter.data = parameter.data.to(dtype)
    return model.to(device)  # here bitsandbytes quantizes


@dataclass(frozen=True)
class FourBits:
    """Makes 4-bit layers; can be sent to another process."""

    kind: str = "nf4"
    nested: bool = True
    storage: torch.dtype = torch.uint8
    compute: torch.dtype = torch.float32

    def __call__(self, width: int, out: int) -> nn.Module:
        """Make a layer."""
        layer: nn.Module = bnb.nn.Linear4bit(
            width,
            out,
            compute_dtype=self.compute,
            compress_statistics=self.nested,
            quant_type=self.kind,
            quant_storage=self.storage,
        )
        return layer


def eight_bits(width: int, out: int) -> nn.Module:
    layer: nn.Module = bnb.nn.Linear8bitLt(width, out, bias=True, has_fp16_weights=False, threshold=0.0)
    return layer


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, WIDTH, generator=generator).to(device, dtype)


def sharded(make: Any, *, dtype: torch.dtype = torch.float32, policy: Any = None, device: str = "cpu") -> nn.Sequential:
    model = build(make, dtype=dtype, device=device)
    return shard_model(model, unit_modules=list(model), mp_policy=policy, device=torch.device(device))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_training(make: Any, dtype: torch.dtype, exact_forward: bool = True, device: str = "cpu") -> None:
    rank, size = rank_and_size()
    reference, model = build(make, dtype=dtype, device=device), sharded(make, dtype=dtype, device=device)
    optimizers = [torch.optim.AdamW(trainable(m), lr=1e-2, eps=EPS) for m in (reference, model)]
    # The reference halves the loss first: small numbers of half precision round otherwise.
    limit = max(TOLERANCE, *(rounding(used, 4) for used in (dtype, getattr(make, "compute", dtype))))
    # As a scaler does: the gradients of these losses would be among the numbers that float16 has few bits for.
    scale = 2.0**10 if torch.float16 in (dtype, getattr(make, "compute", dtype)) else 1.0
    for step in range(3):
        outputs = [reference(batch(r, step, dtype, device)) for r in range(size)]
        output = model(batch(rank, step, dtype, device))
        if step == 0 and exact_forward:
            assert is_same_product(output, outputs[rank])
        (scale * torch.stack([o.float().square().mean() for o in outputs]).mean()).backward()
        (scale * output.float().square().mean()).backward()
        for ours, theirs in zip(trainable(model), trainable(reference), strict=True):
            assert isinstance(ours, ShardedParameter) and ours.grad is not None and theirs.grad is not None
            mine = theirs.grad.reshape(-1)[ours.interval.start : ours.interval.stop]
            torch.testing.assert_close(ours.local_grad, mine, rtol=0, atol=limit * float(theirs.grad.abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "nested", "storage"),
    [("nf4", True, torch.uint8), ("nf4", True, torch.bfloat16), ("fp4", False, torch.float32)],
    ids=str,
)
def test_four_bits_train_as_in_one_process(kind: str, nested: bool, storage: torch.dtype) -> None:
    run_ranks(check_training, 2, FourBits(kind, nested, storage), torch.float32)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "nested", "storage", "compute"),
    list(itertools.product(("nf4", "fp4"), (True, False), STORAGE, (torch.float32, torch.bfloat16, torch.float16))),
    ids=str,
)
def test_four_bits_in_every_form(kind: str, nested: bool, storage: torch.dtype, compute: torch.dtype) -> None:
    run_ranks(check_training, 2, FourBits(kind, nested, storage, compute), torch.float32)


def test_eight_bits_train_as_in_one_process() -> None:
    run_ranks(check_training, 2, eight_bits, torch.float32)


def check_bytes(make: Any) -> tuple[int, int]:
    """Bytes at rest of quantized weights and scales: all of them, and this rank's."""
    reference, model = build(make), sharded(make)
    expose_scales(reference)
    whole = sum(p.nbytes for p in reference.parameters() if is_exact(p))
    mine = 0
    for name, parameter in model.named_parameters():
        if "base" in name and not name.endswith("bias"):
            assert isinstance(parameter, ShardedParameter)
            mine += parameter.local.nbytes
    # The objects that the kernels read are in the bucket's memory, which is freed at rest.
    for inner in model.modules():
        for bucket in _buckets(inner):
            assert bucket.buffer.nbytes == 0
            memory = bucket.full.untyped_storage().data_ptr()
            for slot in [slot for slot in bucket.slots if is_exact(slot.parameter)]:
                held = (slot.parameter, *aliases(slot.parameter))
                assert all(t.untyped_storage().data_ptr() == memory for t in held)
    return whole, mine


def _buckets(module: nn.Module) -> list[Bucket]:
    unit = unit_of(module)
    return [] if unit is None else unit.buckets


@pytest.mark.parametrize("kind", ["four", "eight"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_holds_its_part_of_weights_and_scales(kind: str, size: int) -> None:
    make = FourBits() if kind == "four" else eight_bits
    results = run_ranks(check_bytes, size, make)
    whole = results[0][0]
    assert sum(mine for _, mine in results) == whole
    assert max(mine for _, mine in results) <= whole / size * 1.02 + 64


def check_mixed_precision() -> None:
    """A compute dtype of parameters leaves packed values and scales alone."""
    make = FourBits(nested=False, storage=torch.float32, compute=torch.bfloat16)
    rank, _ = rank_and_size()
    reference = build(make)
    for parameter in reference.parameters():
        if not isinstance(parameter, bnb.nn.Params4bit):
            parameter.data = parameter.data.to(torch.bfloat16)
    model = sharded(make, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert is_same_product(model(batch(rank, 0)), reference(batch(rank, 0, torch.bfloat16)))


def test_mixed_precision_never_casts_quantized_bytes() -> None:
    run_ranks(check_mixed_precision, 2)


def check_save(path: Path, make: Any) -> list[float]:
    model = sharded(make)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    steps(model, optimizer, range(2))
    save_checkpoint(path, model=model, optimizer=optimizer)
    return steps(model, optimizer, range(2, 4))


def check_load(path: Path, make: Any) -> list[float]:
    model = sharded(make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    load_checkpoint(path, model=model, optimizer=optimizer)
    return steps(model, optimizer, range(2, 4))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = model(batch(0, step)).square().mean()  # the same on every rank, so the world size does not matter
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["four", "eight"])
def test_checkpoints_hold_scales_and_load_at_another_world_size(kind: str, tmp_path: Path) -> None:
    make = FourBits(storage=torch.bfloat16) if kind == "four" else eight_bits
    expected = run_ranks(check_save, 2, tmp_path / "saved", make)[0]
    assert verify_checkpoint(tmp_path / "saved").is_valid
    assert run_ranks(check_load, 2, tmp_path / "saved", make)[0] == expected
    assert run_ranks(check_load, 3, tmp_path / "saved", make)[0] == pytest.approx(expected, rel=TOLERANCE)


def test_a_layer_that_is_not_quantized_yet_is_refused() -> None:
    model = nn.Sequential(bnb.nn.Linear4bit(WIDTH, WIDTH))
    with pytest.raises(WrapError, match="not quantized yet") as error:
        shard_model(model, unit_modules=[], device=torch.device("cpu"))
    assert error.value.hint is not None and "move the model" in error.value.hint


@pytest.mark.parametrize("nested", [True, False])
def test_tables_are_where_the_weight_is(nested: bool) -> None:
    """Kernels take them by address. The meta device stands for any other than the one that has quantized."""
    model = build(FourBits(nested=nested))
    weights: list[Any] = [module.weight for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    shard_model(model, unit_modules=list(model), device=torch.device("meta"))
    for weight in weights:
        state = weight.quant_state
        tables = [state.code, state.offset, state.state2.code] if nested else [state.code]
        assert all(table.is_meta for table in tables)
        assert weight.module._buffers.get("weight.nested_offset") is state.offset


def check_replaced_bias() -> None:
    rank, _ = rank_and_size()
    model = build(FourBits(compute=torch.bfloat16))
    for name, parameter in model.named_parameters():
        if name.endswith("base.bias"):
            parameter.requires_grad_(True)
    shard_model(model, unit_modules=list(model), device=torch.device("cpu"))
    model(batch(rank, 0)).square().mean().backward()


def test_a_bias_that_the_layer_casts_in_forward_is_refused_not_lost() -> None:
    with pytest.raises(RuntimeError, match=r"parameter 2\.one\.base\.bias: forward assigned other data"):
        run_ranks(check_replaced_bias, 2)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_a_weight_quantized_piece_by_piece_is_bitsandbytes(quant_type: str, double: bool, storage: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(1500, 1024).bfloat16()
    assert values.numel() > _PIECE_NUMEL and values.numel() % _PIECE_NUMEL
    settings = {"quant_type": quant_type, "compress_statistics": double, "quant_storage": storage}
    packed, state = _quantize_4bit(values, bnb.nn.Params4bit(values, **settings))
    expected, its_state = bnb.functional.quantize_4bit(values, **settings)
    assert packed.shape == expected.shape and torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))
    ours, theirs = state.as_dict(packed=True), its_state.as_dict(packed=True)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(
        bnb.functional.dequantize_4bit(packed, state),
        bnb.functional.dequantize_4bit(expected, its_state),
    )


@pytest.mark.parametrize("make", [FourBits(), eight_bits], ids=["4 bits", "8 bits"])
def test_a_quantized_weight_gives_back_its_values(make: Any) -> None:
    layer = make(WIDTH, HIDDEN)
    values = layer.weight.detach().clone()
    expose_scales(layer.to("cpu"))
    torch.testing.assert_close(dequantized(layer), values, rtol=0, atol=0.02)
    assert layer.weight.to("cpu") is layer.weight  # as PEFT's DoRA moves it in every forward
