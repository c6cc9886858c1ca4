"""Kinds of parameters: who makes a bucket of which parameters, without a file of the engine knowing of the kind.

pytest tests/engine/test_kinds.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine import kinds
from fullshard.engine.bucket import Bucket
from fullshard.engine.kinds import ParameterKind, register_kinds
from fullshard.engine.lookup import units_of
from fullshard.features import fully_shard
from tests.distributed import run_ranks

KERNEL = [Path(kinds.__file__).parents[1] / layer for layer in ("core", "comm", "engine", "wrap")]
FEATURES = re.compile(r"\b(extended|composed|float8|tiles?|tiling|quantiz\w*|bitsandbytes|torchao)\b", re.I)


class CountingBucket(Bucket):
    """A bucket that counts its gathers."""

    gathers = 0

    def issue_unshard(self, *, exactly: bool = False) -> None:
        type(self).gathers += 1
        super().issue_unshard(exactly=exactly)


class Marked(ParameterKind):
    """Parameters with a mark."""

    bucket_type = CountingBucket
    is_alone = True

    def takes(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor, "is_marked", False)


class AlsoMarked(ParameterKind):
    """The same ones, registered later."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor, "is_marked", False)


@pytest.fixture
def registered() -> Iterator[None]:
    register_kinds(Marked(), AlsoMarked())
    yield
    del kinds._registered[-2:]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    setattr(made[0].weight, "is_marked", True)  # noqa: B010 -- mypy knows no such attribute
    return made


def buckets_and_gradients() -> tuple[list[tuple[str, list[str]]], int, bool]:
    register_kinds(Marked(), AlsoMarked())
    own, reference = model(), model()
    fully_shard(own)
    CountingBucket.gathers = 0
    own(torch.ones(2, 4)).sum().backward()
    reference(torch.ones(2, 4)).sum().backward()
    wholes = [p.grad.full_tensor() for p in own.parameters() if isinstance(p.grad, DTensor)]
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    are_equal = len(wholes) == 4 and all(map(torch.equal, wholes, grads))
    found = [(type(b).__name__, [p.name for p in b.sharded_parameters]) for u in units_of(own) for b in u.buckets]
    del kinds._registered[-2:]
    return found, CountingBucket.gathers, are_equal


def test_the_first_registered_kind_makes_the_bucket_and_plain_ones_come_last() -> None:
    """Its parameter has a bucket of its own, and trains as it would in any other."""
    for found, gathers, are_equal in run_ranks(buckets_and_gradients, 2):
        assert found == [("CountingBucket", ["0.weight"]), ("Bucket", ["0.bias", "1.weight", "1.bias"])]
        assert gathers >= 1
        assert are_equal


@pytest.mark.usefixtures("registered")
def test_a_kind_says_why_a_parameter_cannot_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marked, "why_not", lambda _, parameter: f"has {parameter.numel()} elements")
    with pytest.raises(ValueError, match=r"0\.weight: a parameter of type Parameter has 16 elements"):
        fully_shard(model())


def test_no_file_of_the_kernel_names_a_kind() -> None:
    for path in (path for folder in KERNEL for path in folder.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not FEATURES.search(line), f"{path.name}:{number}: {line}"
