"""Values to codes and scales, and back, by the functions of bitsandbytes and torchao where those have them.

Blocks of a weight do not depend on one another, so a codec works on any interval that begins between two atoms, piece
by piece: bitsandbytes on a CPU takes seven times the bytes of its argument at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from fullshard.core.forms import CPU_PIECE_NUMEL, DEVICE_PIECE_NUMEL, StoredForm, form_of
from fullshard.core.imports import import_extra

_PIECE_NUMEL = CPU_PIECE_NUMEL
_ROW_NUMEL = 4096
"""Elements of a row that bitsandbytes decodes on a CPU; for one long row its code is fifteen times slower."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_MAX = 448.0


class Codec:
    """A form, and how its parts are made and read. Parts are flat tensors, in the order of `StoredForm.parts`."""

    def __init__(self, form: StoredForm) -> None:
        self.form = form

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of `values`, shape (n,), floating point, on their device."""
        done = [self._encode(piece) for piece in values.split(_piece_numel(values))] or [self._encode(values)]
        return tuple(map(torch.cat, zip(*done, strict=True)))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fill `out`, shape (n,), of any floating-point dtype, with the values that the parts stand for."""
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
    """NF4 and FP4, as `bitsandbytes.functional.quantize_4bit` makes them."""

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, state = bitsandbytes().quantize_4bit(values, blocksize=self.form.block, quant_type=self._type)
        return codes.view(-1), state.absmax

    @property
    def _type(self) -> str:
        return self.form.name.partition("-")[0]

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales, *_ = parts
        if len(out) % 2:  # bitsandbytes would compile a kernel for it
            FourBits._decode(self, (codes, scales), whole := out.new_empty(len(out) + 1))
            out.copy_(whole[:-1])
            return
        out = out.view(-1, _ROW_NUMEL) if len(out) % _ROW_NUMEL == 0 else out
        kind = {"shape": out.shape, "blocksize": self.form.block, "quant_type": self._type}
        _into(out, bitsandbytes().dequantize_4bit, codes.view(-1, 1), scales, kind)


class DoubleFourBits(FourBits):
    """The same with scales that are 8-bit codes themselves, as `compress_statistics` makes them.

    What is subtracted from the scales first is their mean over the whole weight. So whoever encodes an interval takes
    the scales of `plain`, and gives `compress` that mean.
    """

    @property
    def plain(self) -> Codec:
        """Return the codec of the same codes whose scales are numbers."""
        return codec(self._type)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a whole weight."""
        codes, scales = self.plain.encode(values)
        return codes, *self.compress(scales, scales.mean())

    def compress(self, scales: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts that stand for the scales of `plain`; `offset`: a number, the mean over the whole weight."""
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
    """Bytes with a scale per block, as `bitsandbytes.functional.quantize_blockwise` makes them."""

    def _encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, state = bitsandbytes().quantize_blockwise(values, blocksize=self.form.block)
        return codes, state.absmax

    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        codes, scales = parts
        kind = {"code": _table(codes.device), "blocksize": self.form.block}
        _into(out, bitsandbytes().dequantize_blockwise, codes, scales, kind)


class Mxfp4(Codec):
    """4-bit floats with a power of two per block, the lower half of a byte first.

    torchao encodes them. Its decoder wants a GPU, and that of Transformers a whole layer of gpt-oss, of which this
    gives the same numbers.
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
        if out.dtype is torch.bfloat16:  # which has all of them
            powers = powers.bfloat16()
        _scaled(values, powers, out, self.form.block)


class Fp8(Codec):
    """8-bit floats with a scale per block, by the rule of Transformers' `Fp8Quantize` for blocks of one row."""

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
    """Return the codec of a form.

    Raises:
        ConfigError: there is no such form.
    """
    return _CODECS[form_of(name).name](form_of(name))


def bitsandbytes() -> Any:
    """Return the module of bitsandbytes' functions.

    Raises:
        MissingExtraError: it is not installed.
    """
    return import_extra("bitsandbytes.functional", extra="quant", purpose="quantised weights")


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the values that bytes stand for, before they are scaled."""
    table: torch.Tensor = bitsandbytes().create_dynamic_map()
    return table.to(device)


@cache
def _fp4_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the two values that each byte stands for, shape (256, 2)."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=dtype, device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)


def _scaled(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """Fill `out` with values times the scale of their block; the last block may be shorter."""
    whole = len(out) // block * block
    blocks = values[:whole].view(-1, block), scales[: whole // block, None]
    torch.mul(*blocks, out=out[:whole].view(-1, block))
    if whole < len(out):
        torch.mul(values[whole : len(out)], scales[-1], out=out[whole:])


def _into(
    out: torch.Tensor, function: Callable[..., torch.Tensor], codes: torch.Tensor, scales: torch.Tensor, kind: Any
) -> None:
    """Fill `out` by a function of bitsandbytes, which writes there itself where it can: in its dtypes, on a GPU."""
    dtype = out.dtype if out.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    state = bitsandbytes().QuantState(scales, dtype=dtype, **kind)
    if dtype == out.dtype and out.device.type in ("cuda", "xpu"):
        function(codes, state, out=out)
    else:
        out.copy_(function(codes, state).view(out.shape))


def _piece_numel(values: torch.Tensor) -> int:
    return _PIECE_NUMEL if values.device.type == "cpu" else DEVICE_PIECE_NUMEL
