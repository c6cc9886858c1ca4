"""The sources as trees, each parsed once for all tests of a file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """Every node of a file."""
    return tuple(ast.walk(parsed(path)))


def forget() -> None:
    """Let go of all trees, which take 100 MB and more."""
    parsed.cache_clear()
    nodes.cache_clear()
