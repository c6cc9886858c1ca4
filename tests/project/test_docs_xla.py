"""docs/xla.md has a row for every line about XLA and TPUs that documents print, and names tests that are there.

pytest tests/project/test_docs_xla.py
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.config.test_published_configs import DOCUMENTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "xla.md").read_text(encoding="utf-8")
_LINE = re.compile(r"^ *((?:xla|tpu|downcast)\w*):", re.MULTILINE)
_CALL = re.compile(r"(?:torchacc|model)\.(?:[a-z_]+\.)*([a-z_]+)\(")
_FIELD = re.compile(r"^\| (\w+) +\| (?:int|bool|Set\[str\]|callable) ", re.MULTILINE)
_OTHERS = {"to", "train", "parameters", "state_dict", "load_state_dict"}
"""What a script calls on any model."""
_TORCHACC = {
    *("size", "wrap_layer_cls", "flatten_parameters", "sync_module_states", "use_spmd", "shard_output_callable"),
    *("accelerate", "rendezvous", "mark_step", "save", "get_shard_metadata", "is_master_ordinal"),
    "consolidate_sharded_model_checkpoints",
}
"""Fields and calls of TorchAcc's guide, and those of the guide itself where it is among the documents."""


def test_every_line_of_the_documents_has_a_row() -> None:
    documents = [path.read_text(encoding="utf-8") for path in DOCUMENTS.iterdir() if path.is_file()]
    keys = {key for text in documents for key in _LINE.findall(text)}
    assert {"xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"} <= keys
    for guide in (text for text in documents if "import torchacc" in text):
        keys |= {*_CALL.findall(guide), *_FIELD.findall(guide)} - _OTHERS
    rows = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("|")]
    wanted = sorted(keys | _TORCHACC)
    assert [key for key in wanted if not any(re.search(rf"`[\w.]*\b{key}\b", row) for row in rows)] == []


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 4
    assert [name for name in named if not list((ROOT / "tests").rglob(f"{name}.py"))] == []
    files = set(re.findall(r"`(\w+\.yaml)`", PAGE))
    assert [name for name in files if not (ROOT / "tests" / "fixtures" / "bad_configs" / name).exists()] == []
