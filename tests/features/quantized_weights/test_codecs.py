"""Codes, scales and values are those of the libraries, bit for bit, however a weight is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bitsandbytes import functional
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from fullshard.comm.torch_dist import completed
from fullshard.core.errors import ConfigError
from fullshard.core.forms import FORMS, form_of, ranks_at_once
from fullshard.features.quantized_weights import at_rest, codecs
from fullshard.features.quantized_weights.at_rest import DecodedBuffer
from fullshard.features.quantized_weights.codecs import DoubleFourBits, codec
from fullshard.features.quantized_weights.coded import CodedInterval

DTYPES = (torch.float32, torch.bfloat16)


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def decoded(name: str, parts: tuple[torch.Tensor, ...], numel: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((numel,), torch.nan, dtype=dtype)
    codec(name).decode(parts, out)
    return out


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a codec work in several pieces."""
    monkeypatch.setattr(codecs, "_PIECE_NUMEL", 2**14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [64 * 1000, 40_002, 20])
@pytest.mark.parametrize("name", ["nf4", "nf4-double", "fp4", "fp4-double"])
def test_four_bits_are_those_of_bitsandbytes(name: str, numel: int, dtype: torch.dtype) -> None:
    kind, _, double = name.partition("-")
    theirs, state = functional.quantize_4bit(values(numel, dtype), quant_type=kind, compress_statistics=bool(double))
    parts = codec(name).encode(values(numel, dtype))
    assert torch.equal(parts[0], theirs.view(-1))
    assert torch.equal(parts[1], state.absmax)
    if double:
        assert torch.equal(parts[2], state.state2.absmax)
        assert torch.equal(parts[3], state.offset.expand_as(parts[2]))
    assert torch.equal(decoded(name, parts, numel, dtype), functional.dequantize_4bit(theirs, state).view(-1))


def test_scales_of_intervals_are_compressed_as_those_of_the_whole() -> None:
    double = codec("nf4-double")
    assert isinstance(double, DoubleFourBits)
    atom, weight = double.form.atom, values(5 * 2**14 + 100)
    whole = double.encode(weight)
    intervals = [double.plain.encode(part) for part in weight.split(2 * atom)]
    mean = torch.cat([scales for _, scales in intervals]).mean()
    parts = [(codes, *double.compress(scales, mean)) for codes, scales in intervals]
    assert all(map(torch.equal, map(torch.cat, zip(*parts, strict=True)), whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [256 * 200, 40_001])
def test_eight_bits_are_those_of_bitsandbytes(numel: int, dtype: torch.dtype) -> None:
    theirs, state = functional.quantize_blockwise(values(numel, dtype), blocksize=256)
    codes, scales = codec("int8").encode(values(numel, dtype))
    assert torch.equal(codes, theirs)
    assert torch.equal(scales, state.absmax)
    assert torch.equal(decoded("int8", (codes, scales), numel, dtype), functional.dequantize_blockwise(theirs, state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_read_as_transformers_reads_gpt_oss(dtype: torch.dtype) -> None:
    experts, rows, groups = 2, 48, 5
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(90, 140, (experts, rows, groups), dtype=torch.uint8, generator=draw)
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # of (experts, columns, rows)
    ours = decoded("mxfp4", (blocks.view(-1), scales.view(-1)), blocks.numel() * 2, dtype)
    assert torch.equal(ours.view(experts, rows, groups * 32).transpose(1, 2), theirs)


@pytest.mark.parametrize("numel", [32 * 2000, 40_001])
def test_what_mxfp4_can_say_is_encoded_without_a_loss(numel: int) -> None:
    once = decoded("mxfp4", codec("mxfp4").encode(values(numel)), numel, torch.float32)
    again = codec("mxfp4").encode(once)
    assert torch.equal(decoded("mxfp4", again, numel, torch.float32), once)
    assert (once - values(numel)).abs().max() < 1  # at most half a step of 2 where the largest is above 4


def _fp8(block: tuple[int, int]) -> Any:
    config = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    return SimpleNamespace(quantization_config=config)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_that_of_transformers(dtype: torch.dtype) -> None:
    weight = values(200 * 384, dtype).view(200, 384)
    weight[3] = 0
    theirs = Fp8Quantize(_fp8((1, 128)))._quantize_one("weight", weight)
    codes, scales = codec("fp8").encode(weight.view(-1))
    assert torch.equal(codes.view(torch.uint8), theirs["weight"].view(-1).view(torch.uint8))
    assert torch.equal(scales, theirs["weight_scale_inv"].view(-1))
    read = Fp8Dequantize(_fp8((1, 128)))._dequantize_one(theirs["weight"], theirs["weight_scale_inv"], dtype)
    assert torch.equal(decoded("fp8", (codes, scales), weight.numel(), dtype), read.reshape(-1))


def test_tiles_of_128_rows_are_rows_with_the_scale_of_their_tile() -> None:
    theirs = Fp8Quantize(_fp8((128, 128)))._quantize_one("weight", values(256 * 384).view(256, 384))
    codes, scales = theirs["weight"].view(-1), theirs["weight_scale_inv"].repeat_interleave(128, dim=0).view(-1)
    read = Fp8Dequantize(_fp8((128, 128)))._dequantize_one(theirs["weight"], theirs["weight_scale_inv"], torch.float32)
    assert torch.equal(decoded("fp8", (codes, scales), codes.numel(), torch.float32), read.reshape(-1))


@pytest.mark.parametrize("name", FORMS)
def test_float64_is_encoded_as_float32(name: str) -> None:
    both = (codec(name).encode(each) for each in (values(1000), values(1000).double()))
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("numel", [0, 2**15 + 2**14, 1001])
def test_parts_are_as_long_as_the_form_says(name: str, numel: int) -> None:
    parts = codec(name).encode(values(numel))
    assert [str(part.dtype) for part in parts] == [f"torch.{part.dtype}" for part in FORMS[name].parts]
    assert [len(part) for part in parts] == [part.numel(numel) for part in FORMS[name].parts]
    assert sum(part.nbytes for part in parts) == FORMS[name].nbytes(numel)


@pytest.mark.parametrize("name", FORMS)
def test_an_interval_between_atoms_is_encoded_as_in_the_whole(name: str) -> None:
    form, weight = FORMS[name], values(3 * 2**14 + 50)
    how = codec("nf4" if name == "nf4-double" else "fp4" if name == "fp4-double" else name)
    start = max(form.atom, 2**14)
    whole, part = how.encode(weight), how.encode(weight[start:])
    for one, other, of_form in zip(whole, part, how.form.parts, strict=True):
        assert torch.equal(one[start // of_form.elements :].view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "most"), [("nf4", 0.57), ("nf4-double", 0.53), ("int8", 1.02), ("mxfp4", 0.54), ("fp8", 1.04)]
)
def test_bytes_per_element(name: str, most: float) -> None:
    assert FORMS[name].nbytes(2**20) / 2**20 <= most


def test_other_floats_are_decoded_through_float32() -> None:
    parts = codec("nf4").encode(values(640))
    assert torch.equal(decoded("nf4", parts, 640, torch.float64), decoded("nf4", parts, 640, torch.float32).double())


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"'nf5'.*\n.*did you mean 'nf4'"):
        form_of("nf5")


@pytest.mark.parametrize("name", ["nf4", "nf4-double", "fp4"])
def test_an_odd_number_of_elements(name: str) -> None:
    parts = codec(name).encode(values(642))
    assert torch.equal(decoded(name, parts, 641, torch.bfloat16), decoded(name, parts, 642, torch.bfloat16)[:641])


def test_views_of_codes_have_the_values() -> None:
    parts = dict(zip((part.name for part in FORMS["fp8"].parts), codec("fp8").encode(values(256)), strict=True))
    coded: Any = CodedInterval(FORMS["fp8"], parts, torch.empty(256, device="meta"))
    for view in (coded.view(2, 128), coded.view(2, 128).detach()):
        assert torch.equal(view.decoded(), coded.decoded().view(2, 128)) and "tensor" in repr(view)
    assert isinstance(coded.detach(), CodedInterval) and coded.detach().parts == coded.parts


@pytest.mark.parametrize("name", FORMS)
def test_small_intervals_are_decoded_together(name: str) -> None:
    """Those of several ranks at once, with the values of each alone."""
    how, ranks = codec(name), 7
    numel = max(how.form.atom, 2**12)
    weights = [values(numel) * (1 + rank) for rank in range(ranks)]
    parts = [how.encode(weight) for weight in weights]
    message = torch.cat([part.repeat(1).view(torch.uint8) for own in parts for part in own])
    arriving = SimpleNamespace(
        full=message,
        main=None,
        shared_number=None,
        nbytes=0,
        free=lambda: None,
        gather=lambda *_, **__: completed(message),
    )
    buffer: Any = DecodedBuffer(arriving, torch.zeros(ranks * numel), ranks, how)
    with patch.object(at_rest, "ranks_at_once", return_value=4), patch.object(how, "decode", wraps=how.decode) as calls:
        found = buffer.gather(message, tag=0).wait()
    assert calls.call_count == 2
    assert torch.equal(found, torch.cat([decoded(name, own, numel, torch.float32) for own in parts]))


def test_ranks_at_once() -> None:
    """As many as fit into a piece, but never less than one, and no more than there are."""
    assert [ranks_at_once(numel, 1024, is_cpu=True) for numel in (2**10, 2**13 + 64, 2**20, 4)] == [16, 1, 1, 1024]
    assert ranks_at_once(2**12, 1024, is_cpu=False) == 1024
