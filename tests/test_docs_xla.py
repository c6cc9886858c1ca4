"""docs/xla.md has a row for every line about XLA and TPUs that documents print, and names tests that are there.

pytest tests/test_docs_xla.py
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_published_configs import DOCUMENTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "xla.md").read_text(encoding="utf-8")
_LINE = re.compile(r"^ *((?:xla|tpu|downcast)\w*):", re.MULTILINE)
_TORCHACC = ("use_spmd", "shard_output_callable", "flatten_parameters")


def test_every_line_of_the_documents_has_a_row() -> None:
    documents = [path.read_text(encoding="utf-8") for path in DOCUMENTS.iterdir() if path.is_file()]
    keys = {key for text in documents for key in _LINE.findall(text)}
    assert {"xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"} <= keys
    rows = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("|")]
    assert [key for key in (*sorted(keys), *_TORCHACC) if not any(re.search(rf"`{key}\b", row) for row in rows)] == []


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 4
    assert [name for name in named if not list((ROOT / "tests").rglob(f"{name}.py"))] == []
    files = set(re.findall(r"`(\w+\.yaml)`", PAGE))
    assert [name for name in files if not (ROOT / "tests" / "fixtures" / "bad_configs" / name).exists()] == []
