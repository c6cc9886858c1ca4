"""Checkpoints in object stores, without one: memory, names, and what is refused.

pytest tests/checkpoint/test_checkpoint_stores.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import fullshard
from fullshard.checkpoint import (
    export_hf,
    latest_checkpoint,
    save_checkpoint,
    verify_checkpoint,
    whole_checkpoints,
)
from fullshard.checkpoint import objects as objects_module
from fullshard.checkpoint import store as store_module
from fullshard.checkpoint.lease import let_go
from fullshard.checkpoint.objects import ObjectPath, location
from fullshard.checkpoint.store import remove_checkpoint, store_at
from fullshard.checkpoint.tensor_file import ObjectSink, open_to_write
from fullshard.cli.main import app
from fullshard.core.errors import CheckpointError, ConfigError, MissingExtraError, StoreError
from tests.stored import job, loaded, same, state_of


def test_memory_in_one_process() -> None:
    """Save, verify, load, keep, replace, refuse, prune; what the store holds is laid out as on disk."""
    root = "memory://here/run"
    model, optimizer = job()
    for step in range(3):
        saved = ObjectPath("memory:", "here", "run", f"step-{step}")
        path = save_checkpoint(str(saved), model=model, optimizer=optimizer, extra={"step": step}, total_limit=2)
        assert path == saved
    assert [str(path) for path in whole_checkpoints(root)] == [f"{root}/step-2", f"{root}/step-1"]
    names = ["manifest.json", *(f"{kind}-rank00000.safetensors" for kind in ("model", "optimizer", "state"))]
    assert sorted(saved.beneath()) == names
    verify_checkpoint(saved).raise_if_damaged()
    extra, state = loaded(latest_checkpoint(root))
    assert extra == {"step": 2}
    assert same(state, state_of(model, optimizer))
    with pytest.raises(CheckpointError, match="step-2 already exists"):
        save_checkpoint(saved, model=model)
    assert save_checkpoint(saved, model=model, overwrite=True) == saved
    assert not set(names[1:]) & set(saved.beneath())  # both were whole until the manifest was replaced
    assert len(saved.beneath()) == 3  # no optimizer this time, and nothing of the one before
    verify_checkpoint(saved).raise_if_damaged()
    done = CliRunner().invoke(app, ["ckpt", "prune", root, "--keep", "1"])
    assert done.output == f"removed {root}/step-1\nkept 1 intact checkpoint\n"
    let_go()
    assert sorted(saved.parent.beneath()) == [f"step-2/{name}" for name in sorted(saved.beneath())]


def test_what_another_saves_there_meanwhile_stays() -> None:
    """Only a save with `overwrite` replaces it."""
    folder = ObjectPath("memory:", "meanwhile")
    save_checkpoint(folder / "theirs", model=job(1)[0])
    save_checkpoint(folder / "mine", model=job(2)[0])
    theirs = {name: (folder / "theirs" / name).read_bytes() for name in (folder / "theirs").beneath()}
    final, mine = folder / "final", (folder / "mine" / "manifest.json").read_bytes()
    store = store_at(final, "0123456789abcdef")
    store.manifest = mine
    store.prepare()
    for name, data in theirs.items():
        (final / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"another job saved .*final in the meantime"):
        store.commit()
    store.discard()
    assert {name: (final / name).read_bytes() for name in final.beneath()} == theirs
    let_go()


def test_a_save_that_is_refused_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job is about to write its files there."""
    path = ObjectPath("memory:", "refused", "a")
    theirs = path / "model-rank00000.safetensors"
    theirs.write_bytes(b"on its way")

    def in_use(_: Any) -> bool:
        raise ConfigError("in use")

    monkeypatch.setattr(store_module, "hold_name", in_use)
    with pytest.raises(CheckpointError, match="in use"):
        save_checkpoint(path, model=job()[0])
    assert theirs.is_file()


def test_a_removal_that_stops_half_way_leaves_nothing_that_looks_like_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = ObjectPath("memory:", "removal", "step-1")
    save_checkpoint(path, model=job()[0])
    remove, removed = MemoryFileSystem.rm, list[list[str]]()

    def once(store: Any, names: list[str], **options: Any) -> None:
        if removed:
            raise OSError("the store is gone")
        removed.append(names)
        remove(store, names, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm", once)
    with pytest.raises(StoreError, match="the store is gone"):
        remove_checkpoint(path)
    assert removed == [[f"{path}/manifest.json"]]
    assert latest_checkpoint(path.parent) is None and len(path.beneath()) == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_files_stay_when_nobody_knows_whether_the_manifest_was_written(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """The request got lost on its way, and comes through after the save has failed."""
    path = ObjectPath("memory:", "late", f"step-{is_replaced:d}")
    if is_replaced:
        save_checkpoint(path, model=job(1)[0])
    write, late = MemoryFileSystem.pipe_file, list[tuple[Any, ...]]()

    def lose(store: Any, name: str, data: bytes, **options: Any) -> None:
        if name.endswith("manifest.json"):
            late.append((store, name, data))
            raise OSError("the answer was lost")
        write(store, name, data, **options)

    model, optimizer = job()
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="the answer was lost"):
        patched.setattr(MemoryFileSystem, "pipe_file", lose)
        save_checkpoint(path, model=model, optimizer=optimizer, overwrite=True)
    write(*late[0])
    assert same(loaded(path)[1], state_of(model, optimizer))
    let_go()


@pytest.mark.parametrize(("nbytes", "part"), [(0, 16 * 2**20), (9000 * 16 * 2**20 + 1, 17 * 2**20)])
def test_large_files_are_sent_in_larger_parts(monkeypatch: pytest.MonkeyPatch, nbytes: int, part: int) -> None:
    """S3 takes 10,000 parts of an object."""
    opened, asked = MemoryFileSystem.open, list[int]()

    def note(store: Any, path: str, mode: str, block_size: int, **options: Any) -> Any:
        asked.append(block_size)
        return opened(store, path, mode, block_size, **options)

    monkeypatch.setattr(MemoryFileSystem, "open", note)
    ObjectSink(ObjectPath("memory:", "parts", "x", "f"), nbytes).finish()
    assert asked == [part]


def test_a_store_is_named_by_a_url(tmp_path: Path) -> None:
    assert str(location("MEMORY://b//x/y/")) == str(location(Path("memory://b/x/y"))) == "memory://b/x/y"
    assert location(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="nowhere://b: Protocol not known: nowhere"):
        location("nowhere://b/x")
    with pytest.raises(StoreError, match=r"ftp://no-such-host\.invalid/x cannot be opened: gaierror"):
        location("ftp://no-such-host.invalid/x")
    with pytest.raises(ConfigError, match="does not name a directory in a bucket"):
        location("memory://b/../x")
    with pytest.raises(ConfigError, match="is a URL, but only paths on this host"):
        location("https://host/x")
    with pytest.raises(CheckpointError, match="memory://b is a bucket"):
        save_checkpoint("memory://b", model=job()[0])


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    objects_module._file_system.cache_clear()
    monkeypatch.setattr(fsspec.core, "get_filesystem_class", _not_installed)
    with pytest.raises(MissingExtraError, match=r"(?s)s3://b needs the package 's3fs'.*fullshard\[s3\]"):
        location("s3://b/x")
    objects_module._file_system.cache_clear()


def _not_installed(_: str) -> None:
    raise ImportError("Install s3fs to access S3")


def test_what_needs_a_directory_of_this_host_says_so() -> None:
    model, optimizer = job()
    accelerator = fullshard.Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="memory://b/x' is a URL, but only paths on this host"):
        export_hf("memory://b/x", model=model)
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(
        ConfigError, match="a hook registered with register_save_state_pre_hook writes to a local directory"
    ):
        accelerator.save_state("memory://b/x")
    accelerator = fullshard.Accelerator(
        fsdp_plugin=fullshard.FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    )
    accelerator.prepare(*job())
    with pytest.raises(ConfigError, match="FULL_STATE_DICT adds files for other libraries to the checkpoint"):
        accelerator.save_state("memory://b/x")
    let_go()


def test_an_unfinished_file_in_memory_is_closed() -> None:
    sink = open_to_write(location("memory://unfinished/x"), 8)
    sink.write(memoryview(b"1234"))
    sink.close()
    sink.close()  # does nothing
