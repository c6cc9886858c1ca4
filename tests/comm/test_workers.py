"""What tests run on several processes with (`tests.distributed`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks


def _tensor() -> torch.Tensor:
    return torch.arange(3) + dist.get_rank()


def _what_cannot_be_pickled() -> Any:
    return [lambda: None]


def test_results_come_back_in_rank_order_and_what_cannot_is_an_error() -> None:
    assert [value.tolist() for value in run_ranks(_tensor, 2)] == [[0, 1, 2], [1, 2, 3]]
    with pytest.raises(RuntimeError, match=r"(?s)rank \d raised:\nit returned what cannot be pickled.*lambda"):
        run_ranks(_what_cannot_be_pickled, 2, timeout=30)
