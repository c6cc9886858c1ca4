"""Read weights that bitsandbytes has quantized to 4 bits, from files that contain the state of its layers.

| tensor of weight `X` | content |
|---|---|
| `X` | two codes per byte, in any storage dtype |
| `X.absmax` | one scale per block; with double quantization, 8-bit codes of the scales |
| `X.nested_absmax` | with double quantization: one scale per 256 of those codes |
| `X.quant_map`, `X.nested_quant_map` | bitsandbytes' tables of the values that the codes represent |
| `X.quant_state.bitsandbytes__nf4` | JSON: type, block sizes, shape, dtype, mean of the scales |
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fullshard.checkpoint.coded_sources import coded_source, partner
from fullshard.checkpoint.sources import read_whole
from fullshard.checkpoint.weight_files import TensorSource
from fullshard.core.errors import CheckpointError
from fullshard.core.forms import FORMS, StoredForm
from fullshard.core.layout import Interval
from fullshard.features.quantized_weights.codecs import bitsandbytes
from fullshard.features.quantized_weights.scales import expose_scales

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_NBYTES = 2**16


class _State(BaseModel):
    """The JSON object that bitsandbytes stores with each quantized weight."""

    model_config = ConfigDict(strict=True, frozen=True)

    quant_type: str = Field(pattern="^(nf4|fp4)$")
    blocksize: int = Field(ge=2, le=2**16, multiple_of=2)
    shape: list[int]
    dtype: str = Field(pattern="^(bfloat16|float16|float32)$")
    nested_blocksize: int = 256
    nested_offset: float = 0.0


def four_bit_sources(stored: Mapping[str, TensorSource], form: str | None) -> dict[str, TensorSource]:
    """Return a directory's tensors, with one source per quantized weight. Only a `-double` form keeps scales coded."""
    states = {key.partition(_STATE)[0]: key for key in stored if _STATE in key}
    found: dict[str, TensorSource] = {}
    for name, key in states.items():
        partner(stored, name, key)
    for key, source in stored.items():
        name, _, ending = key.rpartition(".")
        if key in states:
            found[key] = _source(key, stored, states[key], form)
        elif ending in _PARTS and name in stored and name not in states:
            raise CheckpointError(f"{source.where} holds {key}, but no file in its directory holds {name}{_STATE}nf4")
        elif _STATE not in key and not (ending in _PARTS and name in states):
            found[key] = source
    return found


def _source(name: str, stored: Mapping[str, TensorSource], key: str, form: str | None) -> TensorSource:
    state = _state(stored[key], key)
    packed, absmax, table = (partner(stored, f"{name}{ending}", key) for ending in ("", ".absmax", ".quant_map"))
    tensors = {"weight": packed, "absmax": absmax, "quant_map": table, key.removeprefix(f"{name}."): stored[key]}
    shape, numel = tuple(state.shape), math.prod(state.shape)
    scales = -(-numel // state.blocksize)
    if packed.numel * packed.dtype.itemsize != -(-numel // 2) or absmax.numel != scales:
        raise CheckpointError(
            f"{packed.where}: {name} of shape {shape} has {packed.numel * packed.dtype.itemsize} bytes and "
            f"{absmax.numel} scales, expected {-(-numel // 2)} and {scales}"
        )
    _check_table(table, bitsandbytes().get_4bit_type(state.quant_type, device="cpu"), f"{name}.quant_map")
    plain = _form(state.quant_type, state.blocksize)
    codes = TensorSource(_by_rows(shape, 2), torch.uint8, packed.where, functools.partial(_read_bytes, packed))
    parts = [codes, replace(absmax, shape=_by_rows(shape, state.blocksize))]
    if absmax.dtype is torch.uint8:
        nested, second = (partner(stored, f"{name}.{part}", key) for part in ("nested_absmax", "nested_quant_map"))
        tensors |= {"nested_absmax": nested, "nested_quant_map": second}
        if nested.numel != -(-scales // state.nested_blocksize) or state.nested_blocksize != FORMS["int8"].block:
            raise CheckpointError(
                f"{nested.where}: {name}.nested_absmax has {nested.numel} scales for blocks of "
                f"{state.nested_blocksize}, expected {-(-scales // FORMS['int8'].block)} for blocks of "
                f"{FORMS['int8'].block}"
            )
        _check_table(second, bitsandbytes().create_dynamic_map(), f"{name}.nested_quant_map")
        double = FORMS[f"{state.quant_type}-double"]
        offset = torch.tensor(state.nested_offset)
        if form == double.name and plain == FORMS[state.quant_type]:
            plain, fill = double, functools.partial(_fill, offset)
            parts += [nested, TensorSource(nested.shape, torch.float32, nested.where, fill)]
        else:
            values = coded_source((scales,), FORMS["int8"], [absmax, nested])
            add = functools.partial(_read_added, values.read, offset)
            parts[1] = TensorSource(parts[1].shape, torch.float32, absmax.where, add)
    source = coded_source(shape, plain, parts)
    assert source.coded is not None  # noqa: S101 -- it has just been made
    return replace(source, dtype=getattr(torch, state.dtype), coded=replace(source.coded, tensors=tensors))


def _state(source: TensorSource, key: str) -> _State:
    if source.numel > _MAX_STATE_NBYTES or source.dtype is not torch.uint8:
        raise CheckpointError(
            f"{source.where}: {key} has {source.numel} elements of {source.dtype}, expected JSON in torch.uint8"
        )
    try:
        return _State.model_validate_json(bytes(read_whole(source, source.shape, torch.uint8).tolist()))
    except ValidationError as error:
        raise CheckpointError(f"{source.where}: {key} is not in the format that bitsandbytes writes: {error}") from None


def _form(kind: str, block: int) -> StoredForm:
    known = FORMS[kind]
    codes, scales = known.parts
    return known if known.block == block else StoredForm(kind, (codes, scales._replace(elements=block)))


def _by_rows(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Return the shape of codes or scales, each of which belongs to `elements` consecutive elements of a row."""
    if shape[-1] % elements:
        return (-(-math.prod(shape) // elements),)
    return (*shape[:-1], shape[-1] // elements)


def _check_table(source: TensorSource, expected: torch.Tensor, name: str) -> None:
    if not torch.equal(read_whole(source, source.shape, torch.float32), expected):
        raise CheckpointError(f"{source.where}: {name} does not match the table that bitsandbytes uses for this type")


def _read_bytes(source: TensorSource, interval: Interval, out: torch.Tensor) -> None:
    """Read an interval of the bytes of a tensor of any dtype."""
    width = source.dtype.itemsize
    whole = Interval(interval.start // width, -(-interval.stop // width))
    held = torch.empty(whole.numel, dtype=source.dtype)
    source.read(whole, held)
    start = interval.start - whole.start * width
    out.copy_(held.view(torch.uint8)[start : start + interval.numel])


def _fill(value: torch.Tensor, _interval: Interval, out: torch.Tensor) -> None:
    out.copy_(value.expand_as(out))


def _read_added(
    read: Callable[[Interval, torch.Tensor], None], offset: torch.Tensor, interval: Interval, out: torch.Tensor
) -> None:
    read(interval, out)
    out += offset.to(out.device)


def layer_problem(weight: Any, source: TensorSource) -> str:
    """Return how the settings of a bitsandbytes layer differ from those of its codes in the files; empty if equal."""
    if source.coded is None or not source.coded.tensors:
        return ""
    tensors, form = source.coded.tensors, source.coded.form
    layer = weight.quant_type, weight.blocksize, weight.compress_statistics, weight.quant_storage
    files = form.name.partition("-")[0], form.block, "nested_absmax" in tensors, tensors["weight"].dtype
    words = ("type", "block size", "double quantization", "storage")
    return ", ".join(
        f"{word} {ours} in the model and {theirs} in {source.where}"
        for word, ours, theirs in zip(words, layer, files, strict=True)
        if ours != theirs
    )


def restore(module: Any, source: TensorSource, device: torch.device) -> bool:
    """Replace a layer's meta weight with codes and scales from the files. Return False if they hold plain values."""
    if source.coded is None or not source.coded.tensors:
        return False
    held = {key: read_whole(one, one.shape, one.dtype, device) for key, one in source.coded.tensors.items()}
    kind = type(module._parameters["weight"])
    module._parameters["weight"] = kind.from_prequantized(held.pop("weight"), held, device=device, module=module)
    expose_scales(module)
    return True
