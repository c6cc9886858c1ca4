"""Store optimizer state that is kept as 4-bit or 8-bit codes with one scale per block (bitsandbytes, torchao).

Blocks are counted from the start of a rank's interval, so only a rank with the same interval restores codes and scales
bit for bit. Other ranks and other programs read ordinary values, and the optimizer encodes them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.checkpoint.elements import stored_dtype
from fullshard.checkpoint.format import CodeRecord
from fullshard.core.errors import CheckpointError
from fullshard.features import ShardedParameter
from fullshard.features.local_optimizers.adapters import TORCHAO_BITS, TORCHAO_SIGNED, is_of, local_parameter
from fullshard.features.local_optimizers.coded import encode

_BITSANDBYTES_BLOCK = 256


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor of optimizer state, stored as codes and scales in the same way as in its optimizer. See `CodeRecord`."""

    codes: torch.Tensor
    scales: torch.Tensor
    book: torch.Tensor | None
    record: CodeRecord
    dtype: torch.dtype  # of the decoded values

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Return the tensors to store, keyed by the suffix of their names."""
        book = {} if self.book is None else {"book": self.book.detach()}
        return {"codes": self.codes.detach().reshape(-1), "scales": self.scales.detach(), **book}

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Encode `values` and overwrite the codes and scales in place."""
        values = values.to(self.scales.device, torch.float32)  # codes in paged memory look like host memory
        codes, scales = encode(values, self.book, bits=self.record.bits, block=self.record.block)
        self.codes.view(-1).copy_(codes)
        self.scales.copy_(scales)


def coded_tensors(state: Mapping[str, Any]) -> tuple[dict[str, CodedTensor], set[str]]:
    """Return the coded tensors of a parameter's state by key, and the keys of their scales and other parts."""
    found: dict[str, CodedTensor] = {}
    parts: set[str] = set()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype is torch.uint8 and key.startswith("state"):
            names = f"absmax{key.removeprefix('state')}", f"qmap{key.removeprefix('state')}"
            scales, book = (state.get(name) for name in names)
            parts.update(names)
            if value.ndim == 2 and scales is not None and len(scales) == len(value):  # AdEMAMix: two averages in one
                parts.add(key)
                for row, codes in enumerate(value):
                    found[f"{key}.{row}"] = _of_bitsandbytes(key, codes, scales[row], book)
            else:
                found[key] = _of_bitsandbytes(key, value, scales, book)
        elif (bits := TORCHAO_BITS.get(type(value).__name__)) is not None:
            found[key] = _of_torchao(value, bits)
    return found, parts


def rows_of(optimizer: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return views of moving averages that bitsandbytes keeps as rows of one uncoded 2-D tensor, named `KEY.ROW`."""
    if not is_of(optimizer, "bitsandbytes"):
        return {}
    return {
        f"{key}.{row}": average
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point() and key.startswith("state")
        for row, average in enumerate(value)
    }


def _of_bitsandbytes(key: str, codes: torch.Tensor, scales: Any, book: Any) -> CodedTensor:
    blocks = -(-codes.numel() // _BITSANDBYTES_BLOCK)
    if codes.ndim != 1 or scales is None or book is None or tuple(scales.shape) != (blocks,):
        shape = None if scales is None else tuple(scales.shape)
        raise CheckpointError(
            f"optimizer state {key!r} has codes of shape {tuple(codes.shape)} and scales of shape {shape}; expected a "
            f"1-D tensor of codes with one scale for every {_BITSANDBYTES_BLOCK} codes",
            hint="use bitsandbytes' 8-bit Adam, AdamW, AdEMAMix, Lion, SGD, RMSprop or Adagrad",
        )
    record = CodeRecord(dtype="uint8", bits=8, block=_BITSANDBYTES_BLOCK, book=book.numel())
    return CodedTensor(codes, scales, book, record, torch.float32)


def _of_torchao(value: Any, bits: int) -> CodedTensor:
    book = getattr(value, "qmap", None)
    record = CodeRecord(
        dtype=stored_dtype(value.codes, where="optimizer state"),
        bits=bits,
        block=value.block_size,
        book=0 if book is None else book.numel(),
    )
    return CodedTensor(value.codes, value.scale, book, record, value.dtype)


def fresh_state(optimizer: Any, group: int, index: int) -> dict[str, Any] | None:
    """Return the state that the optimizer would create for a parameter, or None if it consists of ordinary tensors."""
    parameter = optimizer.param_groups[group]["params"][index]
    if isinstance(parameter, ShardedParameter):
        parameter = local_parameter(parameter)
    if is_of(optimizer, "bitsandbytes"):
        kept = optimizer.state.pop(parameter, None)
        if not optimizer.initialized:
            optimizer.check_overrides()
        optimizer.init_state(optimizer.param_groups[group], parameter, group, index)
        made = optimizer.state.pop(parameter)
        if kept is not None:
            optimizer.state[parameter] = kept
        return dict(made)
    if is_of(optimizer, "torchao"):
        has_max = optimizer.param_groups[group].get("amsgrad")
        keys = [key for key in TORCHAO_SIGNED if has_max or not key.startswith("max")]
        return {key: optimizer._new_buffer(parameter, TORCHAO_SIGNED[key]) for key in keys}
    return None
