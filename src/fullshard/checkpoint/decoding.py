"""The way back from the JSON that `values` makes of Python state. No torch here."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from fullshard.core.errors import CheckpointError


def decode_value(value: JsonValue, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `encode_value` encoded.

    Raises:
        CheckpointError: A tensor is not there, a tag is of a newer version, or a tagged value is damaged.
    """
    try:
        return _decoded(value, tensors)
    except (TypeError, ValueError) as error:  # `float("x")`; a list in a set
        raise CheckpointError(f"a value of the checkpoint cannot be read: {error}") from None


class AnyTensor(dict[str, None]):
    """Stands for every tensor that a value names, and keeps the names: to see whether it can be decoded."""

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
                raise CheckpointError(f"tensor {name!r} is in no file of the checkpoint")
            return tensors[name]
        case {"$": "tuple", "items": list(items)}:
            return tuple(_decoded(item, tensors) for item in items)
        case {"$": "set", "items": list(items)}:
            return {_decoded(item, tensors) for item in items}
        case {"$": "map" | "counter" as kind, "items": list(items)}:
            decoded = dict(_pair(item, tensors) for item in items)
            return Counter(decoded) if kind == "counter" else decoded
        case {"$": tag}:
            raise CheckpointError(f"unknown kind of value {tag!r}", hint="update fullshard")
    return {key: _decoded(item, tensors) for key, item in value.items()}


def _pair(item: JsonValue, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"expected a key and a value, got {item!r}")
    return _decoded(item[0], tensors), _decoded(item[1], tensors)
