"""Convert Python state (schedules, scalers, hyperparameters) to JSON and back, without loss of types or precision.

JSON does not have tuples, infinities or keys that are not strings, and schedules use all three. A value that plain JSON
cannot express becomes an object with the key `$`. Tensors are stored in a data file, and their names replace them in
the JSON. Any other value is an error. No pickle is used, so a checkpoint cannot run code.
"""

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
    """Convert `value` to JSON. Add its tensors to `tensors`, keyed by `where` and their paths in `value`."""
    if value is None or isinstance(value, bool | str):
        return value
    # `item()` of a long double returns itself.
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
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
                f"{where} is a sharded tensor, and this rank holds only a part of it",
                hint="pass its full_tensor(), or pass its model and optimizer as arguments (one each per checkpoint)",
            )
        stored_dtype(value, where=where)  # raises an error for an unsupported tensor before anything is written
        tensors[name] = value.detach().resolve_conj().resolve_neg()
        return {_TAG: "tensor", "name": name}
    if isinstance(value, list | tuple | set):
        items = [encode_value(item, where=f"{where}/{i}", tensors=tensors) for i, item in enumerate(value)]
        kind = "set" if isinstance(value, set) else "tuple"
        return items if isinstance(value, list) else {_TAG: kind, "items": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where=where, tensors=tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}, which cannot be stored without pickle",
        hint="store numbers, text and tensors, and lists, tuples, sets and dicts of them",
    )


def encode_plain(value: Any, *, where: str) -> JsonValue:
    """Convert `value` to JSON. A tensor with one element becomes a number, and any other tensor is an error."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode_value(value, where=where, tensors=tensors)
    if tensors:
        raise CheckpointError(f"{where} contains tensors inside a Python value")
    return encoded


def _encode_mapping(value: Mapping[Any, Any], *, where: str, tensors: dict[str, torch.Tensor]) -> JsonValue:
    encoded = {key: encode_value(item, where=f"{where}/{key}", tensors=tensors) for key, item in value.items()}
    if not isinstance(value, Counter) and all(isinstance(key, str) and key != _TAG for key in encoded):
        return encoded
    items: list[JsonValue] = [
        [encode_value(key, where=f"a key of {where}", tensors={}), item] for key, item in encoded.items()
    ]
    return {_TAG: "counter" if isinstance(value, Counter) else "map", "items": items}


def decode_value(value: JsonValue, tensors: Mapping[str, Any]) -> Any:
    """Return the value that was passed to `encode_value`."""
    try:
        return _decoded(value, tensors)
    except (TypeError, ValueError) as error:  # for example `float("x")`, or a list in a set
        raise CheckpointError(f"a value of the checkpoint cannot be read: {error}") from None


class AnyTensor(dict[str, None]):
    """A mapping that has every name and records it, to check that values can be decoded without reading tensors."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> None:
        self[name] = None


def _decoded(value: JsonValue, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$": "float", "value": str(text)}:
            return float(text)
        case {"$": "bytes", "value": str(text)}:
            return base64.b64decode(text)
        case {"$": "tensor", "name": str(name)}:
            if name not in tensors:
                raise CheckpointError(f"tensor {name!r} is not in any file of the checkpoint")
            return tensors[name]
        case {"$": "tuple", "items": list(items)}:
            return tuple(_decoded(item, tensors) for item in items)
        case {"$": "set", "items": list(items)}:
            return {_decoded(item, tensors) for item in items}
        case {"$": "map" | "counter" as kind, "items": list(items)}:
            decoded = dict(_pair(item, tensors) for item in items)
            return Counter(decoded) if kind == "counter" else decoded
        case {"$": tag}:
            raise CheckpointError(
                f"the checkpoint contains a value of the unknown kind {tag!r}", hint="update fullshard"
            )
    return {key: _decoded(item, tensors) for key, item in value.items()}


def _pair(item: JsonValue, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"expected a key-value pair, got {item!r}")
    return _decoded(item[0], tensors), _decoded(item[1], tensors)
