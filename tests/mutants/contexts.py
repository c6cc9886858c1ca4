"""Tells coverage which test runs, in whichever process.

A test's name is in the environment while it runs, and every process that it starts inherits the environment; so each
process finds the name there, whether it is a rank of `run_ranks` or one of a launched run.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

import coverage


class _TestNames(coverage.CoveragePlugin):
    def dynamic_context(self, frame: FrameType) -> str | None:
        """The test and its phase, such as `tests/core/test_layout.py::test_padding (call)`."""
        return os.environ.get("PYTEST_CURRENT_TEST")


def coverage_init(registry: Any, options: Any) -> None:
    """Called by coverage in each process."""
    registry.add_dynamic_context(_TestNames())
