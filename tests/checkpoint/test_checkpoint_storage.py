"""Data files: readable by safetensors, proved chunk by chunk, and committed whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fullshard.checkpoint import storage
from fullshard.checkpoint.elements import tensor_bytes, write_tensors
from fullshard.checkpoint.format import CHUNK_NBYTES, DTYPES, FileRecord
from fullshard.checkpoint.storage import (
    commit_directory,
    discard_directory,
    make_temp_directory,
    remove_directory,
    write_file,
)
from fullshard.checkpoint.store import committed_directory
from fullshard.checkpoint.tensor_file import TensorEntry, TensorFileReader, parse_header, write_tensor_file
from fullshard.core.errors import CheckpointError

ROUNDS = 25


def _write(path: Path, tensors: dict[str, torch.Tensor], save_id: str = "id") -> FileRecord:
    return write_tensors(path, tensors, {"save_id": save_id, "rank": "0"})


def _reader(path: Path, record: FileRecord, save_id: str = "id") -> TensorFileReader:
    return TensorFileReader(path, record, chunk_nbytes=CHUNK_NBYTES, save_id=save_id)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: str) -> None:
    """One odd byte in front must not misalign what follows."""
    torch_dtype = getattr(torch, dtype)
    tensors = {
        "odd": torch.tensor([1], dtype=torch.uint8),
        "value": torch.randint(0, 2, (3, 5)).to(torch_dtype),
        "scalar": torch.tensor(1).to(torch_dtype),
        "empty": torch.empty(0, 4, dtype=torch_dtype),
    }
    _write(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].dtype == tensor.dtype
        assert tensor_bytes(loaded[name]).tobytes() == tensor_bytes(tensor).tobytes()


def test_reads_across_chunks_and_checks_each(tmp_path: Path) -> None:
    numel = 3 * CHUNK_NBYTES // 8 + 1000
    value = torch.arange(numel, dtype=torch.int64)
    record = _write(tmp_path / "f", {"a": torch.zeros(7), "value": value})
    assert len(record.crc32c) == 4
    rng = np.random.default_rng(0)
    with _reader(tmp_path / "f", record) as reader:
        stored = reader.find("value", "int64", numel)
        for start in [0, *rng.integers(0, numel - 600_000, 5).tolist()]:
            out = torch.empty(600_000, dtype=torch.int64)
            reader.read_into(stored.start + start * 8, tensor_bytes(out))
            assert torch.equal(out, value[start : start + 600_000])
        assert list(reader.damaged_chunks()) == []
    _reads_forward(tmp_path / "f", record, stored.start, value)
    data = bytearray((tmp_path / "f").read_bytes())
    data[2 * CHUNK_NBYTES + 5] ^= 16
    (tmp_path / "f").write_bytes(data)
    with _reader(tmp_path / "f", record) as reader:
        reader.read_into(stored.start, tensor_bytes(torch.empty(9, dtype=torch.int64)))  # the first chunk is sound
        with pytest.raises(CheckpointError, match=f"damaged between bytes {2 * CHUNK_NBYTES} and {3 * CHUNK_NBYTES}"):
            reader.read_into(2 * CHUNK_NBYTES + 100, tensor_bytes(torch.empty(1)))
        assert list(reader.damaged_chunks()) == [(2 * CHUNK_NBYTES, 3 * CHUNK_NBYTES)]


def _reads_forward(path: Path, record: FileRecord, start: int, value: torch.Tensor) -> None:
    """Adjacent reads, one with a gap inside a chunk, one in a later chunk, one backwards, and the end of the file."""
    nbytes = record.nbytes
    with _reader(path, record) as reader:
        reads = [(0, 10), (10, 700_000), (700_010, 3), (1_200_000, 50_000), (20, 100), (len(value) - 5, 5)]
        for first, numel in reads:
            out = torch.empty(numel, dtype=torch.int64)
            reader.read_into(start + first * 8, tensor_bytes(out))
            assert torch.equal(out, value[first : first + numel]), first
            again = torch.empty(2, dtype=torch.int64)
            reader.read_into(start + 160, tensor_bytes(again))
            assert torch.equal(again, value[20:22])
        with pytest.raises(CheckpointError, match=f"ends at byte {nbytes}"):
            reader.read_into(nbytes - 1, tensor_bytes(torch.empty(2, dtype=torch.uint8)))


@given(st.data())
@settings(max_examples=30)
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("flip") / "f"
    record = _write(path, {"a": torch.randn(30), "b": torch.arange(5)})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged between bytes"):
        _reader(path, record)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    record = _write(tmp_path / "f", {"a": torch.zeros(3)})
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"f has {record.nbytes - 1} bytes, expected {record.nbytes}"):
        _reader(tmp_path / "f", record)
    (tmp_path / "f").unlink()
    with pytest.raises(CheckpointError, match="f is missing"):
        _reader(tmp_path / "f", record)


def test_the_writer_wants_what_was_announced(tmp_path: Path) -> None:
    entry = TensorEntry("a", "float32", (3,))
    with pytest.raises(CheckpointError, match="'a' with 11 bytes, expected 12"):
        write_tensor_file(tmp_path / "f", [entry], {}, lambda _: [np.zeros(11, dtype=np.uint8)])


def test_a_commit_replaces_and_tidies_up(tmp_path: Path) -> None:
    final = tmp_path / "step[1]"
    for content in ("old", "new"):
        temp = make_temp_directory(final, content, overwrite=True)
        (temp / "file").write_text(content)
        commit_directory(temp, final, content, overwrite=True)
        assert (final / "file").read_text() == content
        assert [p.name for p in tmp_path.iterdir()] == ["step[1]"]
    with pytest.raises(CheckpointError, match=r"already exists\nhint: .*overwrite=True"):
        make_temp_directory(final, "x", overwrite=False)


def _committed(final: Path, content: str, error: Exception | None = None) -> None:
    with committed_directory(final, overwrite=True) as temp:
        (temp / "file").write_text(content)
        if error is not None:
            raise error


def test_a_file_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.write_text("notes")
    with pytest.raises(CheckpointError, match="is a file"):
        make_temp_directory(final, "id", overwrite=True)
    assert final.read_text() == "notes"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_appears_under_the_name_meanwhile_stays(tmp_path: Path, kind: str) -> None:
    """It is not ours to replace, unless the save was told so; a file never is."""
    final, theirs = tmp_path / "step", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")

    def save(*, overwrite: bool) -> None:
        with committed_directory(final, overwrite=overwrite) as temp:
            (temp / "file").write_text("mine")
            if kind == "directory":
                theirs.rename(final)
            elif kind == "file":
                (theirs / "file").rename(final)
            else:
                final.symlink_to(theirs)

    with pytest.raises(CheckpointError, match="step already exists"):
        save(overwrite=False)
    assert (final if kind == "file" else final / "file").read_text() == "theirs"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    if kind == "file":
        final.rename(theirs / "file")
        with pytest.raises(CheckpointError, match="step is a file, but a checkpoint is a directory"):
            save(overwrite=True)
        assert final.read_text() == "theirs" and {path.name for path in tmp_path.iterdir()} == {"step", "theirs"}


def test_what_came_back_is_not_replaced_either(tmp_path: Path) -> None:
    """A save was killed between its two renames: then the one before is what bears the name."""
    final = tmp_path / "step"
    (tmp_path / ".old-step-0123456789abcdef").mkdir()
    with pytest.raises(CheckpointError, match="step already exists"):
        make_temp_directory(final, "id", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_replaced_one_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _committed(tmp_path / "step", "old")
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_remove_tree", _raise_eacces)
        _committed(tmp_path / "step", "new")
    assert (tmp_path / "step" / "file").read_text() == "new"
    assert ".old-step-" in caplog.text and "cannot be removed: [Errno 13]" in caplog.text
    _committed(tmp_path / "step", "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def _raise_eacces(_: Path) -> None:
    raise OSError(errno.EACCES, "no permission")


def test_what_the_disk_refuses_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "step"
    _committed(final, "old")
    rename = os.rename

    def refuses(source: Path, target: Path) -> None:
        if source.name.startswith(".tmp-"):  # the old one has stepped aside by then
            raise OSError(errno.EIO, "the disk is broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuses)
    with pytest.raises(CheckpointError, match="the disk is broken"):
        _committed(final, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert (final / "file").read_text() == "old"


@pytest.mark.parametrize("error", [RuntimeError("mine"), OSError(errno.ENOSPC, "the disk is full")])
def test_a_save_that_fails_leaves_nothing_but_the_old_one(tmp_path: Path, error: Exception) -> None:
    _committed(tmp_path / "step", "old")
    with pytest.raises((RuntimeError, CheckpointError), match=r"mine|the disk is full"):
        _committed(tmp_path / "step", "new", error)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert (tmp_path / "step" / "file").read_text() == "old"


def test_saves_leave_no_file_open(tmp_path: Path) -> None:
    def is_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    _committed(tmp_path / "step", "first")
    before = is_open()
    for content in ("second", "third"):
        _committed(tmp_path / "step", content)
        write_file(tmp_path / "file", content.encode())
    with pytest.raises(RuntimeError):
        _committed(tmp_path / "step", "fourth", RuntimeError())
    assert is_open() == before


def test_saves_beside_each_other_take_nothing_of_each_other_away(tmp_path: Path) -> None:
    """What one prepares, completes or removes the others may see half-way, but never take for a leftover."""

    together = threading.Barrier(4)

    def save(thread: int) -> None:
        for number in range(ROUNDS):
            final = tmp_path / f"{thread}-{number}"
            _committed(final, "whole")
            write_file(tmp_path / "file", final.name.encode())
            assert (final / "file").read_text() == "whole"
            together.wait(20)
            for other in range(4 * (number < ROUNDS - 1)):
                remove_directory(tmp_path / f"{other}-{number}")

    with ThreadPoolExecutor(4) as pool:
        found = [done.exception() for done in [pool.submit(save, thread) for thread in range(4)]]
    assert [error for error in found if not isinstance(error, threading.BrokenBarrierError | None)] == []
    assert found == [None] * 4
    last = {f"{thread}-{ROUNDS - 1}" for thread in range(4)}
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".tmp-")} == {"file"} | last
    assert (tmp_path / "file").read_text() in last


def test_what_is_removed_as_a_leftover_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save has seen that nobody holds it just before this one does, which waits while it is removed."""
    lock, removed = fcntl.flock, list[Path]()

    def lock_late(descriptor: int, how: int) -> None:
        if not removed and how == fcntl.LOCK_SH:
            removed.extend(path for path in tmp_path.iterdir() if path.name.startswith(".tmp-"))
            for path in removed:
                path.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    made = make_temp_directory(tmp_path / "a", "0123456789abcdef", overwrite=True)
    assert removed == [made] and made.is_dir()
    with pytest.raises(CheckpointError, match="another process is saving to"):
        make_temp_directory(tmp_path / "a", "fedcba9876543210", overwrite=True)
    discard_directory(made)


def test_what_is_made_anew_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one save removes a leftover, the save whose directory it was creates it again, and locks it."""
    leftover, remove = storage.temp_directory(tmp_path / "a", "0123456789abcdef"), shutil.rmtree
    leftover.mkdir()

    def remove_late(path: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        remove(path)
        make_temp_directory(tmp_path / "a", "0123456789abcdef", overwrite=True)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    discard_directory(make_temp_directory(tmp_path / "b", "fedcba9876543210", overwrite=True))
    assert leftover.is_dir() and shutil.rmtree is remove
    discard_directory(leftover)


def test_a_complete_save_is_held_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, held = Path.rename, list[bool]()

    def look(path: Path, target: Path) -> Path:
        with storage.unheld(path) as is_unheld:
            held.append(is_unheld is False)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    _committed(tmp_path / "step", "whole")
    assert held == [True]


def test_leftovers_of_killed_saves_go_and_replaced_ones_come_back(tmp_path: Path) -> None:
    final = tmp_path / "step"
    (tmp_path / ".tmp-step-dead").mkdir()
    (tmp_path / ".tmp-step-10-alive").mkdir()
    (tmp_path / ".old-step-10-dead").mkdir()
    (tmp_path / ".old-step-dead").mkdir()
    (tmp_path / ".old-step-dead" / "file").write_text("whole")
    make_temp_directory(final, "next", overwrite=True)
    assert (final / "file").read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".old-step-10-dead",
        ".tmp-step-10-alive",
        ".tmp-step-next",
        "step",
    ]


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    _write(path, {"a": torch.arange(4.0), "b": torch.arange(4.0)})
    data = path.read_bytes()
    assert b"[16,32]" in data
    path.write_bytes(data.replace(b"[16,32]", b"[12,28]"))
    record = FileRecord(nbytes=len(data), crc32c=(google_crc32c.value(path.read_bytes()),))
    with pytest.raises(CheckpointError, match=r"f: 'a' and 'b' overlap at byte \d+"):
        _reader(path, record)


def test_an_empty_tensor_overlaps_nothing(tmp_path: Path) -> None:
    """Wherever its header says that it begins."""
    path = tmp_path / "f"
    _write(path, {"a": torch.arange(4.0), "empty": torch.empty(0, 4)})
    data = path.read_bytes()
    assert b"[0,0]" in data
    path.write_bytes(data.replace(b"[0,0]", b"[4,4]"))
    record = FileRecord(nbytes=len(data), crc32c=(google_crc32c.value(path.read_bytes()),))
    with contextlib.closing(_reader(path, record)) as reader:
        assert set(reader.tensors) == {"a", "empty"}


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(100 * 2**20, "f is not valid JSON"), (100 * 2**20 + 1, "f has a header length of 104857601 bytes")],
)
def test_a_header_has_a_largest_size(nbytes: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_header(lambda _start, _nbytes: nbytes.to_bytes(8, "little"), 2 * nbytes, where="f")


def test_data_files_lie_in_the_checkpoint_and_are_files(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    record = _write(tmp_path / "outside", {"a": torch.arange(4.0)})
    (directory / "out").symlink_to("../outside")
    (directory / "in").hardlink_to(tmp_path / "outside")
    (directory / "link").symlink_to("in")
    os.mkfifo(directory / "pipe")
    (tmp_path / "another_way").symlink_to(directory)
    with pytest.raises(CheckpointError, match=rf"is a link to a file outside the checkpoint: {tmp_path}/outside"):
        _reader(directory / "out", record)
    with pytest.raises(CheckpointError, match="pipe is not a regular file"):
        _reader(directory / "pipe", FileRecord(nbytes=0, crc32c=()))
    for path in (directory / "link", tmp_path / "another_way" / "in", tmp_path / "another_way" / "link"):
        _reader(path, record).close()


def test_what_safetensors_cannot_hold_is_refused_before_there_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a is a .* of torch\.complex128"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
