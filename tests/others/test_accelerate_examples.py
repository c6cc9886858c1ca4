"""Accelerate's examples on two ranks, with one import changed, against the same with Accelerate (DDP).

    ACCELERATE_CHECKOUT=DIR pytest tests/others/test_accelerate_examples.py -m full

DIR is a checkout of Accelerate's repository: its packages hold no examples. Wants evaluate, scikit-learn, schedulefree,
timm and torchvision besides, which no other test does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.differential import CLOSE
from tests.others.accelerate_examples import EXAMPLES, Outcome, run_example, write_hub
from tests.trainers import close

CHECKOUT = os.environ.get("ACCELERATE_CHECKOUT")
REFUSED = {"by_feature/local_sgd": "LocalSGD is supported only for CPUs and GPUs"}
"""Accelerate's own code refuses these where a model is sharded, by Accelerate or here."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHECKOUT is None, reason="ACCELERATE_CHECKOUT names no checkout of Accelerate's repository"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hub")
    write_hub(place)
    return place


def check(found: Outcome, plain: Outcome) -> None:
    """The same losses on every rank, the same metrics, the same weights."""
    assert found.printed and len(found.printed) == len(plain.printed)
    for one, other in zip(found.ranks, plain.ranks, strict=True):
        assert one["sharded"] or not one["weights"]
        assert close(one["losses"], other["losses"])
    weights, expected = found.ranks[0]["weights"], plain.ranks[0]["weights"]
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, **CLOSE, msg=name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(tmp_path: Path, hub: Path, name: str) -> None:
    found = run_example(Path(str(CHECKOUT)), name, tmp_path / "changed", hub, changed=True)
    if name in REFUSED:
        assert found.status != 0 and REFUSED[name] in found.errors
        return
    assert found.status == 0, found.errors[-3000:]
    plain = run_example(Path(str(CHECKOUT)), name, tmp_path / "plain", hub, changed=False)
    assert plain.status == 0, plain.errors[-3000:]
    check(found, plain)
