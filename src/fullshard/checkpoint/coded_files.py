"""Read directories with quantized weights, either as decoded values or as the unchanged codes and scales.

| `quant_method` | tensors of weight `X` | stored form |
|---|---|---|
| `mxfp4` (gpt-oss's experts) | `X_blocks`, `X_scales`; blocks run along the second-to-last dim of `X` | `mxfp4` |
| `fp8` (DeepSeek-V3, Qwen3) | `X`, `X_scale_inv`: one scale per block, for example of 128 x 128 elements | `fp8` |
| `bitsandbytes` in 4 bits | see `bitsandbytes_files` | `nf4`, `fp4` |
"""

import copy
import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.bitsandbytes_files import four_bit_sources
from fullshard.checkpoint.coded_sources import coded_source, partner
from fullshard.checkpoint.places import places_of
from fullshard.checkpoint.tensor_file import MAX_HEADER_NBYTES
from fullshard.checkpoint.weight_files import TensorSource, json_file, stored_tensors
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.forms import CPU_PIECE_NUMEL, FORMS, StoredForm
from fullshard.core.layout import Interval
from fullshard.core.sizes import format_count
from fullshard.features.quantized_weights.quantize import mark
from fullshard.features.quantized_weights.scales import whole_shape

logger = logging.getLogger(__name__)
_Sources = Mapping[str, TensorSource]


def without_quantization(config: Any, asked: Any, directory: Path) -> tuple[Any, Any]:
    """Return a copy of a configuration without quantization settings, and the removed settings, or None."""
    config = copy.deepcopy(config)
    said = getattr(config, "quantization_config", None)
    if said is None:
        return config, None
    method = _readable_method(said, directory)
    if asked is not None and _method(asked) != method:
        raise ConfigError(
            f"quantization_config is a {type(asked).__name__}, but the weights in {directory} are already quantized "
            f"({method})",
            hint="omit it to keep the weights as they are stored, or use quantize=... for another format",
        )
    del config.quantization_config
    return config, said


def decoded_sources(stored: _Sources, quantization: Any, form: str | None = None) -> dict[str, TensorSource]:
    """Return a directory's tensors, with one source per quantized weight. `form` is the requested form."""
    if _method(quantization) == "bitsandbytes":
        return four_bit_sources(stored, form)
    return _READERS[_method(quantization)](stored, quantization)


def stored_values(directory: Path) -> dict[str, TensorSource]:
    """Return the sources of all tensors in a directory, by name. Quantized weights are decoded when they are read."""
    path, stored = directory / "config.json", dict(stored_tensors(directory))
    said = json_file(path, limit_nbytes=MAX_HEADER_NBYTES).get("quantization_config") if path.is_file() else None
    if said is None:
        return stored
    _readable_method(said, directory)
    return decoded_sources(stored, said)


def is_to_be_decoded(quantization: Any) -> bool:
    """Return whether a `quantization_config` asks for the decoded values of quantized weights."""
    return quantization is not None and bool(_setting(quantization, "dequantize"))


def settings_of_layers(quantization: Any, asked: Any, is_wanted: bool) -> Any:
    """Return the `BitsAndBytesConfig` for the model's layers, or None if bitsandbytes did not quantize the files."""
    if _method(quantization) != "bitsandbytes":
        return None
    if not is_wanted and asked is not None:
        raise ConfigError(
            "quantization_config requests bitsandbytes' layers, but quantize or dequantize replaces these layers",
            hint="omit quantization_config, or omit quantize and dequantize",
        )
    if not is_wanted or asked is not None:
        return asked
    config = importlib.import_module("transformers").BitsAndBytesConfig
    return config.from_dict(dict(quantization)) if isinstance(quantization, Mapping) else quantization


def keep_codes(model: nn.Module, sources: Mapping[str, TensorSource], form: str | None) -> None:
    """Mark weights that the files store as codes (of `form`, if given), so that the sharded model keeps the codes."""
    kept: dict[str, int] = {}
    lost = 0
    for place in places_of(model):
        coded = sources[place.name].coded if place.name in sources else None
        is_in_layer = place.attribute == "weight" and whole_shape(place.module) is not None
        if coded is None or is_in_layer or form not in (None, coded.form.name):
            continue
        if coded.mark is None:
            lost += place.tensor.numel()
            continue
        place.tensor.requires_grad_(False)
        mark(place.module, place.attribute, coded.mark)
        kept[coded.form.name] = kept.get(coded.form.name, 0) + place.tensor.numel()
    title = type(model).__name__
    for name, numel in kept.items():
        logger.warning(
            "%s: %s parameters remain %s, as in the files, and are frozen; dequantize=True reads their values",
            title, format_count(numel), name,
        )  # fmt: skip
    if lost:
        logger.warning(
            "%s: the files hold %s parameters as codes in blocks that no form supports, so their values are read",
            title, format_count(lost),
        )  # fmt: skip


def _readable_method(said: Any, directory: Path) -> str:
    method, is_8bit = _method(said), _setting(said, "load_in_8bit")
    if is_8bit or method not in (*_READERS, "bitsandbytes"):
        raise ConfigError(
            f"the weights in {directory} are already quantized ({method}{', 8-bit' if is_8bit else ''})",
            hint=(
                f"use the unquantized model; the only quantized formats that can be read are {', '.join(_READERS)} "
                "and bitsandbytes' 4-bit format"
            ),
        )
    return method


def _method(quantization: Any) -> str:
    method = _setting(quantization, "quant_method")
    return str(getattr(method, "value", method))


def _setting(quantization: Any, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, Mapping) else getattr(quantization, name, None)


def _mxfp4(stored: _Sources, _quantization: Any) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for key, source in stored.items():
        name = key.removesuffix("_scales").removesuffix("_blocks")
        if name == key or source.dtype is not torch.uint8:
            found[key] = source
        elif name not in found:
            blocks, scales = (partner(stored, f"{name}{ending}", key) for ending in ("_blocks", "_scales"))
            if blocks.shape != (*scales.shape, 16) or len(scales.shape) < 3:
                raise CheckpointError(
                    f"{blocks.where}: {name}_blocks has shape {blocks.shape} and {name}_scales has shape "
                    f"{scales.shape}, expected (..., rows, blocks, 16) and (..., rows, blocks)"
                )
            *others, rows, per_row = scales.shape
            found[name] = coded_source(
                (*others, per_row * 32, rows), FORMS["mxfp4"], [blocks, scales], is_transposed=True
            )
    return found


def _fp8(stored: _Sources, quantization: Any) -> dict[str, TensorSource]:
    block = _setting(quantization, "weight_block_size")
    found: dict[str, TensorSource] = {}
    for key, source in stored.items():
        name = key.removesuffix("_scale_inv")
        if name != key:
            codes = partner(stored, name, key)
            if codes.dtype is not torch.float8_e4m3fn:
                raise CheckpointError(
                    f"{codes.where}: {name} has dtype {codes.dtype}, but {key} exists, so torch.float8_e4m3fn was "
                    "expected"
                )
            found[name] = _fp8_source(name, codes, source, block)
        elif source.dtype in _FLOATS_OF_8_BITS:
            partner(stored, f"{key}_scale_inv", key)
        elif not key.endswith(".activation_scale"):  # the layers compute with values, so this scale is not used
            found[key] = source
    return found


def _fp8_source(name: str, codes: TensorSource, scales: TensorSource, block: Sequence[int] | None) -> TensorSource:
    """Return the source of a weight with one scale per block of rows and columns, or per matrix if `block` is None."""
    *others, rows, columns = codes.shape if len(codes.shape) > 1 else (1, *codes.shape)
    height, width = (rows, columns) if block is None else block
    grid = (*others, -(-rows // height), -(-columns // width))
    if scales.numel != math.prod(grid) or (block is not None and scales.shape != grid):
        raise CheckpointError(
            f"{scales.where}: {name} has shape {codes.shape} and {name}_scale_inv has shape {scales.shape}, expected "
            f"{grid} for blocks of {height} x {width}"
        )
    # The length of runs of consecutive elements that share a scale, in any row and block.
    run = math.gcd(columns, width, CPU_PIECE_NUMEL)
    form = FORMS["fp8"]
    if run % form.block:
        form = StoredForm("fp8", (form.parts[0], form.parts[1]._replace(elements=run)))
    per_row = columns // form.block
    index = torch.arange(per_row) * form.block // width
    read = functools.partial(_read_spread, scales, (rows, height), index)
    spread = TensorSource((*codes.shape[:-1], per_row), torch.float32, scales.where, read)
    return coded_source(codes.shape, form, [codes, spread])


@torch.no_grad()
def _read_spread(
    scales: TensorSource, rows: tuple[int, int], columns: torch.Tensor, interval: Interval, out: torch.Tensor
) -> None:
    """Read the scales of blocks, repeated so that every row of the matrix has its own scales."""
    # `rows` is the number of rows in a matrix and in a block. `columns` is the block column of each scale of a row.
    first, stop = interval.start // len(columns), -(-interval.stop // len(columns))
    per_matrix, per_row = -(-rows[0] // rows[1]), int(columns[-1]) + 1
    index = torch.arange(first, stop)
    index = index // rows[0] * per_matrix + index % rows[0] // rows[1]
    low, high = (int(index[0]), int(index[-1]) + 1) if interval.numel else (0, 0)
    held = torch.empty((high - low) * per_row, dtype=scales.dtype)
    scales.read(Interval(low * per_row, high * per_row), held)
    if held.dtype is torch.uint8:  # powers of two
        held = held.view(torch.float8_e8m0fnu)
    spread = held.float().view(-1, per_row)[index - low][:, columns].view(-1)
    out.copy_(spread[interval.start - first * len(columns) :][: interval.numel])


_FLOATS_OF_8_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}
_READERS: dict[str, Callable[[_Sources, Any], dict[str, TensorSource]]] = {"mxfp4": _mxfp4, "fp8": _fp8}
"""Readers for the file format of each supported `quant_method`."""
