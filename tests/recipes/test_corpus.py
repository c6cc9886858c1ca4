"""Documents from files, directories and rows; faults name the place."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullshard.core.errors import DataError, MissingExtraError
from fullshard.recipes.data import corpus_files, read_documents


def _documents(data: Path | str, *, text_field: str = "text", max_nbytes: int | None = None) -> list[str]:
    return list(read_documents(corpus_files(str(data)), str(data), text_field, max_nbytes))


def test_standard_library_is_there_and_capped() -> None:
    files = corpus_files(None)
    documents = list(read_documents(files, None, "text", None))
    nbytes = sum(len(document.encode()) for document in documents)
    assert 2_000_000 < nbytes <= 12_000_000
    assert documents == list(read_documents(corpus_files(None), None, "text", None))
    assert any(document == Path(os.__file__).read_text(encoding="utf-8") for document in documents)
    assert len(list(itertools.islice(read_documents(files, None, "text", 1000), 9))) <= 2


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "poem.verse"
    path.write_text("one\ntwo\n")
    assert _documents(path) == ["one\ntwo\n"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    for name, text in (("a.txt", "one\ufeff"), ("b.jsonl", '{"text": "one\ufeff"}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert _documents(tmp_path / name) == ["one\ufeff"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\xff")
    with pytest.raises(DataError, match=r"cannot be read as UTF-8 text: .* position 6: invalid start byte"):
        _documents(tmp_path / "a.txt")


def test_directory_mixes_kinds_in_a_fixed_order(tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"text {index}")
    (tmp_path / "rows.jsonl").write_text('{"text": "row 1"}\n\n{"text": "row 2"}\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    documents = _documents(tmp_path)
    assert sorted(documents) == ["row 1", "row 2", *(f"text {index}" for index in range(8))]
    assert documents != sorted(documents), "neighboring files are alike, so their order is shuffled"
    assert documents == _documents(tmp_path)


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"body": ["a", "b"], "id": [1, 2]}), path)
    assert _documents(path, text_field="body") == ["a", "b"]
    with pytest.raises(DataError, match=r"row 1: .*'text', got .*'body', 'id'\)\nhint: .*--text-field"):
        _documents(path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match=r"rows.parquet, row 2: expected text in 'text', got NoneType"):
        _documents(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read after row 0: Parquet magic"):
        _documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r"rows.jsonl cannot be read after row 0: .*JSON"),
        ('{"body": "x", "id": 3}', r"rows.jsonl, row 2: expected text in 'text', got NoneType .*'body', 'id'"),
        ('{"text": 3}', r"rows.jsonl, row 2: expected text in 'text', got int"),
        ('["text"]', r"rows.jsonl cannot be read after row 0"),
        ('{"text": "a \\ud800 b"}', r"rows.jsonl cannot be read after row 0: .*surrogate"),
        ('{"text": "a", "more": ' + "[" * 100_000, r"rows.jsonl cannot be read after row 0"),
    ],
)
def test_jsonl_faults_name_the_file_and_where_they_can_the_row(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        _documents(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no file with one of these suffixes"):
        corpus_files(str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt cannot be read as UTF-8 text: .* position 3"):
        _documents(tmp_path / "latin.txt")
    (tmp_path / "rows.json").write_text('[{"text": "a"}, {"text": "b"}]')
    assert _documents(tmp_path / "rows.json") == ["a", "b"]


def test_cap_counts_bytes_and_cuts_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("äöü", encoding="utf-8")
    assert _documents(path, max_nbytes=5) == ["äö"]
    assert _documents(path, max_nbytes=6) == ["äöü"]


def test_hub_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is needed is read; a row without the field is named by number."""
    read, asked = [], []

    def load_dataset(name: str, configuration: str | None, **options: object) -> Iterator[dict[str, str]]:
        asked.append((name, configuration, options))
        if name != "owner/set":
            raise ConnectionError("offline")

        def rows() -> Iterator[dict[str, str]]:
            for number in range(100):
                read.append(number)
                yield {"text": "four"} if number < 50 else {"body": "x"}

        return rows()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert _documents("owner/set:small", max_nbytes=10) == ["four", "four", "fo"]
    assert asked == [("owner/set", "small", {"split": "train", "streaming": True})]
    assert read == [0, 1, 2]
    with pytest.raises(DataError, match=r"owner/set, row 51: expected text in 'text', .*'body'\)"):
        _documents("owner/set")
    with pytest.raises(DataError, match=r"the hub dataset missing cannot be read after row 0: offline"):
        _documents("missing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fullshard\[hf\]'"):
        _documents("owner/set")


def test_a_damaged_page_of_parquet_is_an_own_error(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "f.parquet"
    parquet.write_table(pyarrow.table({"text": [f"number {i} of many" for i in range(1000)]}), path)
    data = bytearray(path.read_bytes())
    data[50:1000] = bytes(byte ^ 0xA5 for byte in data[50:1000])
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"f.parquet cannot be read after row "):
        _documents(tmp_path)


def test_a_read_error_is_an_own_error(tmp_path: Path) -> None:
    (tmp_path / "f.txt").symlink_to("/proc/self/mem")  # whose first page nobody can read
    with pytest.raises(DataError, match=r"f.txt cannot be read .*Input/output error"):
        _documents(tmp_path)
