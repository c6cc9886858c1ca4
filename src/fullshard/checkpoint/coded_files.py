"""Directories whose weights are quantised already: sources of the values, and of the codes and scales as they are.

| `quant_method` | tensors of weight `X` | stored form |
|---|---|---|
| `mxfp4` (gpt-oss's experts) | `X_blocks`, `X_scales`; blocks run along the last dim but one of `X` | `mxfp4` |
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.chunks import read_transposed
from fullshard.checkpoint.tensor_file import MAX_HEADER_NBYTES
from fullshard.checkpoint.weight_files import Coded, TensorSource, json_file, stored_tensors
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.forms import CPU_PIECE_NUMEL, form_of
from fullshard.core.layout import Interval
from fullshard.engine.precision import torch_dtype
from fullshard.features.quantized_weights.codecs import codec
from fullshard.features.quantized_weights.marks import Mark

_Sources = Mapping[str, TensorSource]


def without_quantisation(config: Any, asked: Any, directory: Path) -> tuple[Any, Any]:
    """Return a model's configuration that says nothing of its quantised files, and what it said; None: nothing.

    `asked` is the caller's `quantization_config`, which replaces that of the files if it is of the same method.

    Raises:
        ConfigError: files that cannot be read here, or another method is asked for.
    """
    config = copy.deepcopy(config)
    said = getattr(config, "quantization_config", None)
    if said is None:
        return config, None
    method = _readable_method(said, directory)
    if asked is not None and _method(asked) != method:
        raise ConfigError(
            f"quantization_config is a {type(asked).__name__}, but the weights in {directory} are quantised already "
            f"({method})",
            hint="leave it out: weights keep the form of the files; quantize=... gives them another",
        )
    del config.quantization_config
    return config, said if asked is None else asked


def decoded_sources(stored: _Sources, quantisation: Any) -> dict[str, TensorSource]:
    """Return the tensors of a directory with one source for each quantised weight, instead of its codes and scales."""
    return _READERS[_method(quantisation)](stored)


def stored_values(directory: Path) -> dict[str, TensorSource]:
    """Return every tensor of a directory by name, quantised weights by their values."""
    path, stored = directory / "config.json", dict(stored_tensors(directory))
    said = json_file(path, limit_nbytes=MAX_HEADER_NBYTES).get("quantization_config") if path.is_file() else None
    if said is None:
        return stored
    _readable_method(said, directory)
    return decoded_sources(stored, said)


def is_to_be_decoded(quantisation: Any) -> bool:
    """Return whether a configuration asks for the values of quantised weights."""
    return bool(_setting(quantisation, "dequantize"))


def _readable_method(said: Any, directory: Path) -> str:
    method = _method(said)
    if method not in _READERS:
        raise ConfigError(
            f"the weights in {directory} are quantised already ({method})",
            hint=f"of such files {', '.join(_READERS)} can be read; take the model as it was before",
        )
    return method


def _method(quantisation: Any) -> str:
    method = _setting(quantisation, "quant_method")
    return str(getattr(method, "value", method))


def _setting(quantisation: Any, name: str) -> Any:
    return quantisation.get(name) if isinstance(quantisation, Mapping) else getattr(quantisation, name, None)


def _mxfp4(stored: _Sources) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for key, source in stored.items():
        name = key.removesuffix("_scales").removesuffix("_blocks")
        if name == key or source.dtype is not torch.uint8:
            found[key] = source
        elif name not in found:
            blocks, scales = (_partner(stored, f"{name}{ending}", key) for ending in ("_blocks", "_scales"))
            if blocks.shape != (*scales.shape, 16) or len(scales.shape) < 3:
                raise CheckpointError(
                    f"{blocks.where}: {name}_blocks has shape {blocks.shape} and {name}_scales {scales.shape}, "
                    "expected (..., rows, blocks, 16) and (..., rows, blocks)"
                )
            *others, rows, per_row = scales.shape
            mark = Mark("mxfp4", is_transposed=True)
            found[name] = coded_source((*others, per_row * 32, rows), blocks.where, mark, [blocks, scales])
    return found


def _partner(stored: _Sources, name: str, key: str) -> TensorSource:
    if name not in stored:
        raise CheckpointError(f"{stored[key].where} holds {key}, but no file of its directory {name}")
    return stored[name]


def coded_source(shape: tuple[int, ...], where: str, mark: Mark, parts: list[TensorSource]) -> TensorSource:
    """Return the source of a weight of which files hold the parts, each flattened in the order of the blocks."""
    coded = Coded(mark, dict(zip((part.name for part in form_of(mark.form).parts), parts, strict=True)))
    read: Callable[[Interval, torch.Tensor], None] = functools.partial(_read_decoded, coded, math.prod(shape))
    if mark.is_transposed:
        read = functools.partial(read_transposed, read, shape)
    return TensorSource(shape, torch.bfloat16, where, read, coded)


@torch.no_grad()
def _read_decoded(coded: Coded, numel: int, interval: Interval, out: torch.Tensor) -> None:
    """Fill `out` with elements `interval`, counted in the order of the blocks; a piece of them is decoded at a time."""
    form = form_of(coded.mark.form)
    for start in range(interval.start // form.atom * form.atom, interval.stop, CPU_PIECE_NUMEL):
        piece = Interval(start, min(start + CPU_PIECE_NUMEL, -(-interval.stop // form.atom) * form.atom, numel))
        values = torch.empty(piece.numel, dtype=out.dtype, device=out.device)
        parts = {
            p.name: torch.empty(p.numel(piece.numel), dtype=torch_dtype(p.dtype), device=out.device) for p in form.parts
        }
        coded.fill(piece, parts)
        codec(form.name).decode(list(parts.values()), values)
        wanted = piece.intersect(interval)
        own = values[wanted.start - start : wanted.stop - start]
        out[wanted.start - interval.start : wanted.stop - interval.start].copy_(own)


_READERS: dict[str, Callable[[_Sources], dict[str, TensorSource]]] = {"mxfp4": _mxfp4}
"""How the files of each `quant_method` that can be read hold weights."""
