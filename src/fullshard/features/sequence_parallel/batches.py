"""Cut a batch along the sequence, as DeepSpeed's adapter for data loaders does under Accelerate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from fullshard.core.errors import DataError

_IGNORED = -100
_PADDING = {"labels": _IGNORED, "shift_labels": _IGNORED}
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""The bounds of packed documents in whole sequences, which attention needs as they are."""


def cut_batch(batch: Any, *, rank: int, size: int, length: int | None = None) -> dict[str, Any]:
    """Return the part of a batch that belongs to one of the `size` ranks that share it.

    The part contains `position_ids` in whole sequences and, if there are labels, `shift_labels`: the next token of each
    position. Sequences whose length is not a multiple of `size` get padding on the right, which has no labels.

    Raises:
        DataError: a tensor in the batch cannot be cut along the sequence, or sequences do not have this `length`.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise DataError(
            f"sequence parallelism needs input_ids of shape (sequences, length) in a batch, got {type(batch).__name__}",
            hint="return a dict from the collate function",
        )
    whole = dict(batch)
    count, tokens = ids.shape
    if length is not None and tokens != length:
        raise DataError(
            f"the batch has {tokens} tokens per sequence, but sp_seq_length is {length} and not variable",
            hint="pad to sp_seq_length, or set sp_seq_length_is_variable=True",
        )
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(tokens, device=ids.device).expand(count, -1)
    if whole.get("labels") is not None and "shift_labels" not in whole:
        whole["shift_labels"] = functional.pad(whole["labels"], (0, 1), value=_IGNORED)[..., 1:]
    missing = -tokens % size
    if missing and any(name in whole for name in _OF_DOCUMENTS):
        raise DataError(
            f"the batch has {tokens} tokens per sequence, which is not a multiple of sp_size = {size}, and packed "
            "documents cannot be padded",
            hint="pack to a multiple of sp_size",
        )
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and value.dim() and name not in _OF_DOCUMENTS:
            if value.shape[1:2] != (tokens,):
                raise DataError(
                    f"sequence parallelism cannot cut {name} of shape {tuple(value.shape)} along the sequence, because "
                    f"input_ids has shape {tuple(ids.shape)}",
                    hint="leave it out of the batch; images, 4-D masks and labels of whole sequences are not supported",
                )
            padding = value.new_full((len(value), missing, *value.shape[2:]), _PADDING.get(name, 0))
            if name == "position_ids":  # a jump would mean that another document begins
                padding = value[:, -1:] + torch.arange(1, missing + 1, device=value.device)
            whole[name] = torch.cat([value, padding], dim=1).chunk(size, dim=1)[rank].contiguous()
    return whole
