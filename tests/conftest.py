"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import end_workers


@pytest.fixture(scope="module", autouse=True)
def _fresh_workers() -> Iterator[None]:
    """The processes of `run_ranks` serve one file: what a test leaves in them cannot reach another file's tests."""
    yield
    end_workers()
