"""The manifest and the encoding of Python state: what goes in comes out, and damage does not."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.format import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    MeshRecord,
    PieceRecord,
    TensorRecord,
    decode_manifest,
    encode_manifest,
)
from fullshard.checkpoint.rng import restore_rng, rng_tensors
from fullshard.checkpoint.values import decode_value, encode_value
from fullshard.core.errors import CheckpointError

_KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9), st.binary(max_size=9)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def _manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "save_id": "0123456789abcdef",
        "saved_at": 1.5,
        "fullshard_version": "0",
        "torch_version": "0",
        "world_size": 2,
        "mesh": MeshRecord(replicate=1, shard=2),
        "files": {"model-rank00000.safetensors": FileRecord(nbytes=10, crc32c=(7,))},
        "parameters": {
            "weight": TensorRecord(shape=(2, 3), dtype="float32", pieces=(PieceRecord(rank=0, start=0, stop=6),))
        },
        "buffers": {},
        "states": {"extra": {"loss": 0.1, "big": 2**70}},
    }
    return Manifest(**(fields | changes))


def test_manifest_round_trip() -> None:
    manifest = _manifest()
    data = encode_manifest(manifest)
    assert decode_manifest(data, where="m") == manifest
    assert json.loads(data)["manifest"]["parameters"]["weight"]["shape"] == [2, 3]


def test_no_flipped_bit_of_a_manifest_is_accepted() -> None:
    data = encode_manifest(_manifest())
    for index in range(len(data)):
        for bit in (0, 5):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode_manifest(bytes(damaged), where="m")


def test_truncated_manifest_is_refused() -> None:
    data = encode_manifest(_manifest())
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointError, match="damaged"):
            decode_manifest(data[:length], where="m")


def test_a_newer_version_says_so() -> None:
    data = encode_manifest(_manifest(format_version=FORMAT_VERSION + 1))
    newer = f"m has format version {FORMAT_VERSION + 1}, but this version of fullshard reads 1 to {FORMAT_VERSION}"
    with pytest.raises(CheckpointError, match=f"{newer}\nhint: update"):
        decode_manifest(data, where="m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", True), ("saved_at", float("nan")), ("saved_at", float("inf")), ("saved_at", 1e300),
        ("saved_at", -1.0), ("world_size", True), ("world_size", 10**15), ("parts", 10**15), ("chunk_nbytes", True),
        ("tiles", {"dim": 0, "parts": 10**15}), ("tiles", {"dim": False, "parts": 2}),
    ],
)  # fmt: skip
def test_numbers_are_numbers_that_can_be(field: str, value: Any) -> None:
    fields = json.loads(encode_manifest(_manifest()))["manifest"]
    (fields["parameters"]["weight"] if field == "tiles" else fields)[field] = value
    with pytest.raises(CheckpointError, match=f"{field}|format version True"):
        decode_manifest(_signed(fields), where="m")


def _signed(fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    return b'{"crc32c":"%08x","manifest":%s}\n' % (google_crc32c.value(body), body)


def test_what_could_not_be_read_is_not_written() -> None:
    nested: Any = 1
    for _ in range(250):
        nested = [nested]
    manifest = _manifest()
    manifest.states["extra"] = nested
    with pytest.raises(CheckpointError, match="the checkpoint could not be read back: recursion limit exceeded"):
        encode_manifest(manifest)


@pytest.mark.parametrize("name", ["../model.safetensors", "a/b", "", ".hidden", "/etc/passwd"])
def test_file_names_cannot_leave_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        _manifest(files={name: FileRecord(nbytes=0, crc32c=())})


@given(_VALUES)
def test_values_survive_json(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode_value(value, where="value", tensors=tensors)
    text = json.dumps(encoded, allow_nan=False)
    decoded = decode_value(json.loads(text), tensors)
    assert decoded == value
    assert repr(decoded) == repr(value), "types and signs of zero are kept too"


def test_values_json_has_no_word_for() -> None:
    value = {"nan": math.nan, "inf": -math.inf, "milestones": Counter({30: 2}), "set": {1, 2}, "np": np.float32(0.5)}
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode_value(value | {"t": torch.arange(3)}, where="v", tensors=tensors)
    decoded = decode_value(json.loads(json.dumps(encoded, allow_nan=False)), tensors)
    assert math.isnan(decoded.pop("nan"))
    assert decoded.pop("t").tolist() == [0, 1, 2]
    assert decoded == {"inf": -math.inf, "milestones": Counter({30: 2}), "set": {1, 2}, "np": 0.5}
    assert isinstance(decoded["milestones"], Counter)


def test_tensors_at_paths_that_read_alike_are_each_kept() -> None:
    value = {1: torch.tensor(1), "1": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode_value(value, where="extra", tensors=tensors)))
    assert decode_value(encoded, tensors) == value


def test_maps_in_maps_take_no_longer_than_they_are_deep() -> None:
    value: Any = 0
    for _ in range(40):
        value = {1: value}
    assert decode_value(encode_value(value, where="extra", tensors={}), {}) == value


def test_a_conjugate_is_stored_as_what_it_is() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encode_value(torch.tensor([1 + 2j]).conj(), where="extra", tensors=tensors)
    assert not tensors["extra"].is_conj() and tensors["extra"].tolist() == [1 - 2j]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: print, "extra/0 is a builtin_function_or_method, which cannot be stored without pickle"),
        (lambda: np.longdouble(1), "extra/0 is a longdouble, which cannot be stored"),
        (lambda: torch.eye(3).to_sparse(), "extra/0 is a torch.sparse_coo tensor of torch.float32"),
    ],
)
def test_what_cannot_be_stored_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        encode_value([make()], where="extra", tensors={})


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        numpy_draws = [float(np.random.rand()), float(np.random.randn())]
        return [random.random(), random.gauss(0, 1), *numpy_draws, *torch.randn(2).tolist()]

    draw()  # leaves Python's and NumPy's generators with half of a Gaussian pair
    saved = {name: tensor.clone() for name, tensor in rng_tensors(torch.device("cpu")).items()}
    expected = draw()
    draw()
    assert restore_rng(saved, torch.device("cpu")) == []
    assert draw() == expected
