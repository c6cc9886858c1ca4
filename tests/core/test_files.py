"""Files are written whole or not at all.

pytest tests/core/test_files.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.core.files import atomic_file


def test_a_file_whose_writer_fails_stays_as_it_was_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(ValueError, match="no more"), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise ValueError("no more")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
