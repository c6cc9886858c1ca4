"""Every type of model that Transformers has trains, is saved and generates sharded as it does unsharded.

pytest tests/engine/test_model_types.py -m "full or not full"
"""

from __future__ import annotations

import pytest
import transformers

from tests.model_types import PAGE, page, read_record, right_share, row_of, verdict
from tests.tiny_models import model_types

RECORD = read_record()
QUICK = ["esm", "mllama", "pegasus", "resnet", "unlimited_ocr", "wav2vec2"]
"""A few of what other tests do not train: encoders and towers of two classes, batch norms, one-element weights; the
features of images computed by `generate`, past forward."""

TRIED = [name for name, row in RECORD.items() if verdict(row) != "absent"]


def test_the_record_is_of_every_type() -> None:
    assert sorted(RECORD) == model_types()


def test_the_page_is_made_from_the_record() -> None:
    """`python -m tests.model_types --page` makes it."""
    assert PAGE.read_text() == page(RECORD)
    assert f"Transformers {transformers.__version__}" in PAGE.read_text()


def test_nearly_all_types_are_right() -> None:
    assert right_share(RECORD) >= 0.99


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in TRIED]
)
def test_a_type_does_as_its_row_says(model_type: str) -> None:
    expected, row = verdict(RECORD[model_type]), row_of(model_type)
    # Equal bit for bit here may be rounding on a processor whose products depend on where operands lie.
    allowed = {"equal", "rounding"} if expected in ("equal", "rounding") else {expected}
    assert verdict(row) in allowed, row
