"""Damage and malice: every flipped bit is refused by name, nothing crafted runs, nothing claimed fills the memory.

Run: `python -m pytest tests/checkpoint/offline/test_offline_damage.py`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from fullshard.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.offline import open_source, write_native, write_weights
from fullshard.checkpoint.offline.dcp_metadata import read_metadata
from fullshard.core.errors import CheckpointError
from fullshard.core.sizes import MIB
from tests.distributed import run_ranks
from tests.interchange import save_native, write_xla
from tests.memory import PeakGrowth


class Evil:
    """Makes a directory when it is unpickled by a reader that lets it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "saved"
    run_ranks(save_native, 2, str(path))
    verify_checkpoint(path).raise_if_damaged()
    return path


def _named(path: Path, name: str) -> bool:
    """Whether verification refuses the checkpoint and names the file."""
    found = verify_checkpoint(path)
    return not found.is_valid and any(name in problem for problem in found.problems)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_flipped_bits(pristine: Path, count: int) -> None:
    """Anywhere in any file, each refused with the file's name: all of them."""
    rng = random.Random(0)
    files = sorted(pristine.iterdir())
    sizes = [file.stat().st_size for file in files]
    missed = []
    for _ in range(count):
        file = rng.choices(files, sizes)[0]
        data = bytearray(file.read_bytes())
        bit = rng.randrange(len(data) * 8)
        original = bytes(data)
        data[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(data)
        if not _named(pristine, file.name):
            missed.append((file.name, bit))
        file.write_bytes(original)
    assert missed == []
    verify_checkpoint(pristine).raise_if_damaged()


def test_flipped_bits_are_refused_by_loading_too(tmp_path: Path) -> None:
    """And by everything that reads offline: one rank's checkpoint is read wholly by each."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    path = tmp_path / "a"
    save_checkpoint(path, model=model, optimizer=optimizer)
    rng, other = random.Random(1), nn.Linear(5, 3)
    for number in range(60):
        file = rng.choice(sorted(path.iterdir()))
        original = file.read_bytes()
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=file.name):
            load_checkpoint(path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
        with pytest.raises(CheckpointError, match=file.name), open_source(path) as source:
            write_native(source, tmp_path / f"b{number}", world_size=1)
        file.write_bytes(original)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a"]


def test_each_file_cut_deleted_swapped_and_renamed(pristine: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in pristine.iterdir())
    for name in names:
        for number, harm in enumerate((_cut, _delete, _empty, _rename, _append, _swap)):
            copy = tmp_path / f"{name}-{number}"
            shutil.copytree(pristine, copy)
            harmed = harm(copy, name)
            assert _named(copy, harmed), (name, harm)
            if name != "manifest.json" or harm not in (_swap,):
                with pytest.raises(CheckpointError), open_source(copy) as source:
                    write_native(source, tmp_path / "out", world_size=1)
            assert not (tmp_path / "out").exists()


def _cut(directory: Path, name: str) -> str:
    os.truncate(directory / name, (directory / name).stat().st_size // 2)
    return name


def _empty(directory: Path, name: str) -> str:
    os.truncate(directory / name, 0)
    return name


def _delete(directory: Path, name: str) -> str:
    (directory / name).unlink()
    return name


def _rename(directory: Path, name: str) -> str:
    (directory / name).rename(directory / f"x{name}")
    return name


def _append(directory: Path, name: str) -> str:
    with (directory / name).open("ab") as file:
        file.write(b"\0")
    return name


def _swap(directory: Path, name: str) -> str:
    """With the next file, which for data files is of the same kind or size where there is one."""
    names = sorted(file.name for file in directory.iterdir())
    other = names[(names.index(name) + 1) % len(names)]
    (directory / name).rename(directory / "aside")
    (directory / other).rename(directory / name)
    (directory / "aside").rename(directory / other)
    return name if "manifest.json" not in (name, other) else "manifest.json"


def test_a_file_from_another_save_is_refused(pristine: Path, tmp_path: Path) -> None:
    """Same names, same sizes, same shapes: only the save differs."""
    other = tmp_path / "other"
    run_ranks(save_native, 2, str(other))
    for file in sorted(pristine.glob("*.safetensors")):
        copy = tmp_path / file.stem
        shutil.copytree(pristine, copy)
        shutil.copyfile(other / file.name, copy / file.name)
        assert _named(copy, file.name)


def _dcp_directory(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    return path


def _metadata(directory: Path) -> Any:
    return pickle.loads((directory / ".metadata").read_bytes())  # noqa: S301 -- made by this test


def _write_metadata(directory: Path, metadata: Any) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def _in_planner_data(metadata: Any, evil: Evil) -> None:
    metadata.planner_data["x"] = evil


def _in_storage_data(metadata: Any, evil: Evil) -> None:
    metadata.storage_data[next(iter(metadata.storage_data))] = evil


def _in_version(metadata: Any, evil: Evil) -> None:
    metadata.version = evil


@pytest.mark.parametrize("place", [_in_planner_data, _in_storage_data, _in_version])
def test_metadata_that_runs_code_is_refused(tmp_path: Path, place: Callable[[Any, Evil], None]) -> None:
    directory = _dcp_directory(tmp_path / "a")
    metadata = _metadata(directory)
    place(metadata, Evil(tmp_path / "canary"))
    _write_metadata(directory, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata refers to posix\.mkdir, .* nothing was executed"):
        open_source(directory)
    assert not (tmp_path / "canary").exists()
    pickle.loads((directory / ".metadata").read_bytes())  # noqa: S301 -- the pickle does what it says
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x29torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
        b"\x80\x04\x8c\x2atorch.distributed.checkpoint.metadata\x8c\x0bMetadata.os\x93.",
        b"(i__main__\nEvil\n.",
        b"\x82\x01.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0fa.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0fa.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x0fa.",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"",
        b".",
        b"N.",
        b"Pfile\n.",
    ],
)
def test_pickle_programs_are_refused_without_making_room(tmp_path: Path, program: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError, match="metadata"), PeakGrowth() as peak:
        read_metadata(tmp_path)
    assert peak.nbytes < 64 * MIB


def test_metadata_cannot_change_the_reader(tmp_path: Path) -> None:
    """A pickle may write to the classes it is given; the next file gets others."""
    module = b"\x8c\x29torch.distributed.checkpoint.metadata"
    program = b"\x80\x04" + module + b"\x8c\x08Metadata\x93" + b"N}\x8c\x0c__setstate__Ns\x86b."
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    assert len(read_metadata(_dcp_directory(tmp_path / "a"))) == 2
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata({}).state_dict_metadata == {}


def test_parts_of_dcp_that_run_code_or_lie(tmp_path: Path) -> None:
    """A part that is a program, one of another shape, one that is a view of nothing, and parts that overlap."""
    directory = _dcp_directory(tmp_path / "a")
    metadata = _metadata(directory)
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.a")
    file = directory / info.relative_path
    original = file.read_bytes()

    def replaced(value: Any) -> None:
        stream = io.BytesIO()
        torch.save(value, stream)
        file.write_bytes(original + stream.getvalue())
        info.offset, info.length = len(original), len(stream.getvalue())
        _write_metadata(directory, metadata)

    def message() -> str:
        with pytest.raises(CheckpointError) as caught, open_source(directory) as source:
            write_weights(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    replaced(Evil(tmp_path / "canary"))
    assert "was not unpickled" in message()
    assert not (tmp_path / "canary").exists()
    replaced(torch.ones(3, 2))
    assert "of shape (3, 2), expected float32 of (2, 3)" in message()
    replaced(torch.ones(2, 3, dtype=torch.float64))
    assert "is torch.float64" in message()
    replaced([1, 2])
    assert "is a list, not a tensor" in message()
    replaced(torch.ones(1).expand(2, 3))
    assert "but too few bytes" in message()
    info.relative_path = "../a/" + info.relative_path
    _write_metadata(directory, metadata)
    assert "outside its directory" in message()
    info.relative_path = file.name
    _write_metadata(directory, metadata)
    for linked in (file, directory / ".metadata"):
        linked.rename(tmp_path / "outside")
        linked.symlink_to(tmp_path / "outside")
        assert f"{linked.name} is a link to a file outside the checkpoint" in message()
        linked.unlink()
        os.mkfifo(linked)
        # Without `.metadata` it is no checkpoint.
        assert f"{linked.name} is not a regular file" in message() or linked.name == ".metadata"
        linked.unlink()
        (tmp_path / "outside").rename(linked)
    info.length = 2**50
    _write_metadata(directory, metadata)
    assert "are not inside" in message()
    info.length = 100
    chunk = metadata.state_dict_metadata["model.a"].chunks[0]
    size = metadata.state_dict_metadata["model.a"].size
    chunk.sizes = metadata.state_dict_metadata["model.a"].size = torch.Size([2**30, 2**30])
    _write_metadata(directory, metadata)
    assert "elements of float32 do not fit in 100 bytes" in message()
    chunk.sizes, metadata.state_dict_metadata["model.a"].size = size, torch.Size([3, 3])
    info.offset, info.length = 0, len(original)
    _write_metadata(directory, metadata)
    assert "6 of its 9 elements are stored" in message()
    assert index.fqn == "model.a"


def test_torch_files_that_run_code(tmp_path: Path) -> None:
    def refused(path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"was not unpickled: .*mkdir"):
            open_source(path)
        assert not (tmp_path / "canary").exists()

    evil = Evil(tmp_path / "canary")
    for name in ("plain.pt", "hf/pytorch_model.bin", "full/pytorch_model_fsdp.bin", "xla/rank-0-of-1.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"a": torch.ones(2), "b": evil}, tmp_path / name)
        refused(tmp_path / name if name == "plain.pt" else (tmp_path / name).parent)
    torch.save({"a": torch.ones(2)}, tmp_path / "full" / "pytorch_model_fsdp.bin")
    torch.save(evil, tmp_path / "full" / "optimizer.bin")
    refused(tmp_path / "full")
    write_xla(tmp_path / "xla", nn.Linear(3, 2), [], 2, flat=True)
    torch.save(evil, tmp_path / "xla" / "rank-1-of-2.pth")
    refused(tmp_path / "xla")


def _bomb(path: Path) -> None:
    """A file of torch.save whose data is compressed: 256 MiB in less than one."""
    torch.save({"a": torch.zeros(64 * 2**20)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".new"), "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    path.with_suffix(".new").replace(path)
    assert path.stat().st_size < 2**20


def test_torch_files_that_claim_too_much(tmp_path: Path) -> None:
    _bomb(tmp_path / "bomb.pt")
    torch.save({"a": torch.zeros(1).expand(2**40)}, tmp_path / "view.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"a": torch.zeros(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "view.pt").read_bytes()[:-30])
    for name, message in {
        "bomb.pt": "unpacks to more than its",
        "view.pt": "but too few bytes",
        "text.pt": "not written by torch.save",
        "legacy.pt": "before torch 1.6",
        "cut.pt": "not written by torch.save",
    }.items():
        with pytest.raises(CheckpointError, match=message) as caught, PeakGrowth() as peak:
            open_source(tmp_path / name)
        assert name in str(caught.value)
        assert peak.nbytes < 64 * MIB


def _safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _cases() -> Iterator[tuple[str, Callable[[Path], Any], str]]:
    def tensor(shape: list[int], offsets: list[int]) -> dict[str, Any]:
        return {"dtype": "F32", "shape": shape, "data_offsets": offsets}

    yield "length", lambda p: p.write_bytes(struct.pack("<Q", 2**60) + b"{}"), "has a header length"
    yield "shape", lambda p: _safetensors(p, {"a": tensor([2**40], [0, 2**42])}), "is at bytes"
    yield "negative", lambda p: _safetensors(p, {"a": tensor([1], [-4, 0])}, b"1234"), "is at bytes"
    yield (
        "size",
        lambda p: _safetensors(p, {"a": tensor([2**40], [0, 4])}, b"1234"),
        r"has 4 bytes, which does not match",
    )
    yield "deep", lambda p: _safetensors(p, b"[" * 200_000 + b"]" * 200_000), "is not valid JSON"
    many = {f"t{i}": tensor([250], [0, 1000]) for i in range(200)}
    yield "overlap", lambda p: _safetensors(p, many, b"\0" * 1000), "'t0' and 't1' overlap at byte"
    two = {"a": tensor([2], [0, 8]), "b": tensor([2], [4, 12])}
    yield "a shared byte", lambda p: _safetensors(p, two, b"\0" * 12), "'a' and 'b' overlap at byte"
    yield (
        "dtype",
        lambda p: _safetensors(p, {"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        "X9",
    )


@pytest.mark.parametrize(("write", "message"), [case[1:] for case in _cases()], ids=[case[0] for case in _cases()])
def test_safetensors_that_lie(tmp_path: Path, write: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message), PeakGrowth() as peak:
        open_source(tmp_path)
    assert peak.nbytes < 64 * MIB


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "sub/model.safetensors", "\0"])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_stays_in_its_directory(tmp_path: Path, index: str, name: str) -> None:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    save_file({"a": torch.ones(2)}, directory / "sub" / "model.safetensors")
    (directory / index).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        open_source(directory)


def test_nothing_known_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint was found at"):
        open_source(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"does not hold a checkpoint in a known format; it holds notes\.txt"):
        open_source(tmp_path)
    save_checkpoint(tmp_path / "step-1", model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"did you mean .*step-1"):
        open_source(tmp_path)
