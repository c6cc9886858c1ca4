"""Python state (schedules, scalers, hyper-parameters) as JSON, and back, without losing a type or a bit.

JSON has no tuples, no infinities and no keys but strings, and schedules use all three. What plain JSON cannot say is
an object with the key `$`. Tensors go to a data file and leave their name behind. Anything else is refused: there is
no pickle, so a checkpoint cannot run code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.elements import stored_dtype
from fullshard.core.errors import CheckpointError

_TAG = "$"


def encode_value(value: Any, *, where: str, tensors: dict[str, torch.Tensor]) -> JsonValue:
    """Return `value` as JSON.

    Args:
        value: None, bool, int, float, str, bytes, tensors, and lists, tuples, sets, dicts and Counters of them.
        where: path of the value, for messages and as the name of a tensor.
        tensors: receives the tensors found, by name.

    Raises:
        CheckpointError: a value of another type; the message says where it is.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a long double is its own
        return encode_value(value.item(), where=where, tensors=tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        name = where
        while name in tensors:  # {1: a, "1": b}
            name += "'"
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{where} is a sharded tensor, of which this rank has a part",
                hint="pass its full_tensor(), or its model and optimizer (one per checkpoint) as such",
            )
        stored_dtype(value, where=where)  # refuses what a file cannot hold, before anything is written
        tensors[name] = value.detach().resolve_conj().resolve_neg()
        return {_TAG: "tensor", "name": name}
    if isinstance(value, list | tuple | set):
        items = [encode_value(item, where=f"{where}/{i}", tensors=tensors) for i, item in enumerate(value)]
        return (
            items if isinstance(value, list) else {_TAG: "set" if isinstance(value, set) else "tuple", "items": items}
        )
    if isinstance(value, Mapping):
        return _encode_mapping(value, where=where, tensors=tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}, which cannot be stored without pickle",
        hint="store numbers, text, tensors, and lists, tuples, sets and dicts of them",
    )


def encode_plain(value: Any, *, where: str) -> JsonValue:
    """Return `value` as JSON, where there is no file for tensors: one of a single element is its number.

    Raises:
        CheckpointError: it holds others.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode_value(value, where=where, tensors=tensors)
    if tensors:
        raise CheckpointError(f"{where} holds tensors inside a Python value")
    return encoded


def _encode_mapping(value: Mapping[Any, Any], *, where: str, tensors: dict[str, torch.Tensor]) -> JsonValue:
    encoded = {key: encode_value(item, where=f"{where}/{key}", tensors=tensors) for key, item in value.items()}
    if not isinstance(value, Counter) and all(isinstance(key, str) and key != _TAG for key in encoded):
        return encoded
    items: list[JsonValue] = [
        [encode_value(key, where=f"a key of {where}", tensors={}), item] for key, item in encoded.items()
    ]
    return {_TAG: "counter" if isinstance(value, Counter) else "map", "items": items}
