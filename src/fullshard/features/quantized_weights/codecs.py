"""Encode values as codes and scales, and decode them, with bitsandbytes and torchao where possible.

Blocks of a weight are independent, so a codec can process any interval that begins at an atom boundary. It works in
pieces because bitsandbytes on a CPU needs seven times the memory of its argument.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from fullshard.core.forms import CPU_PIECE_NUMEL, DEVICE_PIECE_NUMEL, StoredForm, form_of
from fullshard.core.imports import import_extra

_PIECE_NUMEL = CPU_PIECE_NUMEL
_ROW_NUMEL = 4096
"""Row length for decoding with bitsandbytes on a CPU; a single long row is fifteen times slower."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_MAX = 448.0


class Codec:
    """Base class of codecs for one form. Parts are flat tensors in the order of `StoredForm.parts`."""

    def __init__(self, form: StoredForm) -> None:
        self.form = form

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the encoded parts of floating-point `values` of shape (n,), on the same device as the values."""
        if values.dtype is torch.float64:  # not supported by the libraries
            values = values.float()
        done = [self._encode(piece) for piece in values.split(_piece_numel(values))] or [self._encode(values)]
        return tuple(map(torch.cat, zip(*done, strict=True)))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode `parts` into `out`, which has shape (n,) and any floating-point dtype."""
        step = _piece_numel(out)
        for start in range(0, out.numel(), step):
            piece = out[start : start + step]
            self._decode(tuple(self._cut(parts, start, start + piece.numel())), piece)

    def _cut(self, parts: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
        for part, of_form in zip(parts, self.form.parts, strict=True):
            yield part[start // of_form.elements : of_form.numel(stop)]

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        raise NotImplementedError


class FourBits(Codec):
    """The NF4 and FP4 codecs, compatible with `bitsandbytes.functional.quantize_4bit`."""

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, state = bitsandbytes().quantize_4bit(values, blocksize=self.form.block, quant_type=self._type)
        return codes.view(-1), state.absmax

    @property
    def _type(self) -> str:
        return self.form.name.partition("-")[0]

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales, *_ = parts
        if len(out) % 2:  # bitsandbytes would compile a kernel for odd lengths
            FourBits._decode(self, (codes, scales), whole := out.new_empty(len(out) + 1))
            out.copy_(whole[:-1])
            return
        out = out.view(-1, _ROW_NUMEL) if len(out) % _ROW_NUMEL == 0 else out
        kind = {"shape": out.shape, "blocksize": self.form.block, "quant_type": self._type}
        _into(out, bitsandbytes().dequantize_4bit, codes.view(-1, 1), scales, kind)


class DoubleFourBits(FourBits):
    """The 4-bit codecs with 8-bit scales, compatible with bitsandbytes' `compress_statistics`.

    The mean of all scales of the weight is subtracted before they are encoded. To encode only an interval of the
    weight, get its scales from the codec `plain`, and pass them to `compress` together with that mean.
    """

    @property
    def plain(self) -> Codec:
        """Return the codec that makes the same codes but does not compress the scales."""
        return codec(self._type)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the encoded parts of a complete weight."""
        codes, scales = self.plain.encode(values)
        return codes, *self.compress(scales, scales.mean())

    def compress(self, scales: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the encoded parts of scales from `plain`; `offset` is the mean of all scales of the weight."""
        per_group = self.form.parts[-1].elements // self.form.block
        codes, state = bitsandbytes().quantize_blockwise(scales - offset, blocksize=per_group)
        return codes, state.absmax, offset.expand_as(state.absmax)

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales, of_scales, offsets = parts
        per_group = self.form.parts[-1].elements // self.form.block
        plain = bitsandbytes().dequantize_blockwise(scales, absmax=of_scales, blocksize=per_group)
        plain += offsets.repeat_interleave(per_group)[: len(plain)]
        super()._decode((codes, plain), out)


class EightBits(Codec):
    """The 8-bit codec with one scale per block, compatible with `bitsandbytes.functional.quantize_blockwise`."""

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, state = bitsandbytes().quantize_blockwise(values, blocksize=self.form.block)
        return codes, state.absmax

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales = parts
        kind = {"code": _table(codes.device), "blocksize": self.form.block}
        _into(out, bitsandbytes().dequantize_blockwise, codes, scales, kind)


class Mxfp4(Codec):
    """The codec of 4-bit floats with a power-of-two scale per block. The lower half of a byte holds the first value.

    torchao encodes the values. This class decodes them itself, because torchao's decoder needs a GPU, and the decoder
    in Transformers needs a complete layer of gpt-oss. The decoded values are equal to theirs.
    """

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        purpose = "encoding weights as mxfp4"
        mx: Any = import_extra("torchao.prototype.mx_formats.mx_tensor", extra="quant", purpose=purpose)
        padded = torch.nn.functional.pad(values, (0, -len(values) % self.form.block))
        scales, codes = mx.to_mx(padded.float(), torch.float4_e2m1fn_x2, self.form.block)
        codes = codes.view(torch.uint8).view(-1)
        return codes[: self.form.parts[0].numel(len(values))], scales.view(torch.uint8).view(-1)

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales = parts
        values = _fp4_pairs(out.dtype, out.device).index_select(0, codes.int()).view(-1)
        powers = scales.view(torch.float8_e8m0fnu).float()
        if out.dtype is torch.bfloat16:  # which can represent all of them
            powers = powers.bfloat16()
        _scaled(values, powers, out, self.form.block)


class Fp8(Codec):
    """The codec of 8-bit floats with one scale per block, as in Transformers' `Fp8Quantize` with blocks of one row."""

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % self.form.block)).view(-1, self.form.block)
        largest = blocks.abs().amax(dim=1)
        factors = torch.where(largest > 0, _FP8_MAX / largest, 1.0)
        codes = (blocks * factors[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return codes.view(-1)[: len(values)], 1 / factors

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales = parts
        _scaled(codes.float(), scales, out, self.form.block)


_CODECS: dict[str, type[Codec]] = {
    "nf4": FourBits,
    "fp4": FourBits,
    "nf4-double": DoubleFourBits,
    "fp4-double": DoubleFourBits,
    "int8": EightBits,
    "mxfp4": Mxfp4,
    "fp8": Fp8,
}


@cache
def codec(name: str) -> Codec:
    """Return the codec of the form with this name, or raise `ConfigError` if the form does not exist."""
    return codec_of(form_of(name))


def codec_of(form: StoredForm) -> Codec:
    """Return the codec of a form. Its name is one of `FORMS`, but its block size may be different."""
    return _CODECS[form.name](form)


def bitsandbytes() -> Any:
    """Return the module `bitsandbytes.functional`, or raise `MissingExtraError` if it is not installed."""
    return import_extra("bitsandbytes.functional", extra="quant", purpose="quantized weights")


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the table of values, before scaling, that the 8-bit codes stand for."""
    table: torch.Tensor = bitsandbytes().create_dynamic_map()
    return table.to(device)


@cache
def _fp4_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the two FP4 values in each possible byte, as a tensor of shape (256, 2)."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=dtype, device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)


def _scaled(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """Fill `out` with the values, each multiplied by the scale of its block. The last block may be shorter."""
    whole = len(out) // block * block
    blocks = values[:whole].view(-1, block), scales[: whole // block, None]
    torch.mul(*blocks, out=out[:whole].view(-1, block))
    if whole < len(out):
        torch.mul(values[whole : len(out)], scales[-1], out=out[whole:])


def _into(
    out: torch.Tensor, function: Callable[..., torch.Tensor], codes: torch.Tensor, scales: torch.Tensor, kind: Any
) -> None:
    """Decode into `out` with a bitsandbytes function, without an extra copy if the device and dtype allow this."""
    dtype = out.dtype if out.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    state = bitsandbytes().QuantState(scales, dtype=dtype, **kind)
    if dtype == out.dtype and out.device.type in ("cuda", "xpu"):
        function(codes, state, out=out)
    else:
        out.copy_(function(codes, state).view(out.shape))


def _piece_numel(values: torch.Tensor) -> int:
    return _PIECE_NUMEL if values.device.type == "cpu" else DEVICE_PIECE_NUMEL
