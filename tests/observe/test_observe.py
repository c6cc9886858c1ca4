"""Numbers of a step: written, read back, cut for a resume, and drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from fullshard.config.write import save_text
from fullshard.core.errors import ConfigError, MissingExtraError
from fullshard.core.files import write_text
from fullshard.observe import (
    JsonlSink,
    StepMetrics,
    memory_nbytes,
    read_metrics,
    require_plots,
)


def _metrics(step: int, **changes: object) -> StepMetrics:
    metrics = StepMetrics(
        step=step,
        loss=1 / 3 + step,
        learning_rate=1e-3,
        grad_norm=0.1,
        step_seconds=0.5,
        tokens_per_second=4096.0,
        data_wait_seconds=0.001,
        memory_nbytes=(2**30, 3 * 2**29),
    )
    return dataclasses.replace(metrics, **changes)  # type: ignore[arg-type]


def test_files_are_written_to_what_their_name_stands_for(tmp_path: Path) -> None:
    """The file of a link, the pipe itself; a limit of the disk leaves what was there, and the error has its name."""
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    write_text(link, "text")
    assert link.is_symlink() and real.read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/real'"):
            write_text(real, 99 * "x")
        with pytest.raises(ConfigError, match=r"cannot write .*/real: File too large"):
            save_text(99 * "x", real, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert real.read_text() == "text" and len(list(tmp_path.iterdir())) == 3


def test_what_a_process_has_open_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A pipe without a name (`>(...)`), and standard output that is a file; both have names in /dev/fd."""
    source, sink = os.pipe()
    write_text(Path(f"/dev/fd/{sink}"), "text")
    assert os.read(source, 9) == b"text"
    with (tmp_path / "real").open("w") as file:
        (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        write_text(tmp_path / "link", "text")
        assert os.path.samestat(os.fstat(file.fileno()), (tmp_path / "real").stat())
    assert (tmp_path / "real").read_text() == "text"
    os.close(source)
    os.close(sink)


def test_a_new_file_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that comes while it is looked whether there is one; what could not be written leaves none."""
    path = tmp_path / "file"
    save_text("mine", path, overwrite=False)
    with pytest.raises(ConfigError, match=r"cannot write .*: File name too long\nhint: choose another file"):
        save_text("text", tmp_path / (300 * "x"), overwrite=False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(ConfigError, match="file already exists"):
        save_text("text", path, overwrite=False)
    assert path.read_text() == "mine"
    with pytest.raises(UnicodeEncodeError):
        save_text("\udcff", tmp_path / "new", overwrite=False)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text(Path("/dev/full"), "text")


def test_a_file_that_is_overwritten_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    write_text(path, "text")
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "text")


def test_a_file_is_written_where_it_is_if_it_cannot_be_replaced() -> None:
    """In a folder of somebody else's, and, where tests may mount, as a mount of its own."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        path, other = Path(name, "file"), Path(name, "other")
        path.touch()
        path.chmod(0o666)
        other.touch()
        path.parent.chmod(0o555)
        try:
            os.seteuid(user or 65534)
            write_text(path, "text")
            with pytest.raises(PermissionError, match=r"Permission denied: '.*/new'"):
                write_text(path.with_name("new"), "text")
        finally:
            os.seteuid(user)
            path.parent.chmod(0o755)
        assert path.read_text() == "text"
        if subprocess.run(["mount", "--bind", other, path], capture_output=True).returncode:
            return
        try:
            write_text(path, "mounted")
            assert {each.name for each in path.parent.iterdir()} == {"file", "other"}
        finally:
            subprocess.run(["umount", path], check=True)
        assert (path.read_text(), other.read_text()) == ("text", "mounted")


def _read_back(line: str) -> StepMetrics:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_text(line + "\n")
        (metrics,) = read_metrics(Path(folder) / "metrics.jsonl")
    return metrics


def test_json_keeps_every_bit() -> None:
    metrics = _metrics(3, loss=0.1 + 0.2)
    assert _read_back(metrics.to_json()) == metrics


def test_json_is_standard_json_for_a_skipped_step() -> None:
    """An overflow in fp16 gives an infinite norm, for which JSON has no number."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = _metrics(1, grad_norm=math.inf, loss=math.nan).to_json()
    json.loads(line, parse_constant=refuse)
    read = _read_back(line)
    assert read.grad_norm == math.inf
    assert math.isnan(read.loss)


def test_line_says_the_units() -> None:
    assert _metrics(7).line(100) == (
        "step   7/100 | loss 7.3333 | lr 1.00e-03 | grad norm 0.100 | 4,096 tokens/s"
        " | memory 1.50 GiB/rank | data wait 1.0 ms"
    )


def test_memory_follows_an_allocation() -> None:
    before = memory_nbytes(torch.device("cpu"))
    block = torch.ones(1 << 24)
    grown = memory_nbytes(torch.device("cpu")) - before
    assert grown >= 0.9 * block.nbytes


def test_jsonl_is_cut_to_the_resumed_step(tmp_path: Path) -> None:
    """A killed run leaves steps after its last checkpoint, and maybe half a line."""
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in (1, 2, 3):
        first.write(_metrics(step))
    with path.open("a") as file:
        file.write(_metrics(4).to_json()[:30])
    assert [metrics.step for metrics in read_metrics(path)] == [1, 2, 3]

    resumed = JsonlSink(path, last_step=2)
    resumed.write(_metrics(3, loss=9.0))
    assert [(metrics.step, metrics.loss) for metrics in read_metrics(path)] == [
        (1, 1 / 3 + 1),
        (2, 1 / 3 + 2),
        (3, 9.0),
    ]
    JsonlSink(path)
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


def test_a_foreign_line_is_not_dropped_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises((ValueError, TypeError, KeyError)):
        list(read_metrics(path))


def test_no_file_no_metrics(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fullshard\[plots\]'"):
        require_plots()
