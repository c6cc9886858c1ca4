"""The sources of a configuration, each as a reading: a file in whatever dialect, the environment."""

from __future__ import annotations

from pathlib import Path

from fullshard.config.dialect import Reading
from fullshard.config.document import read_document
from fullshard.config.native import NATIVE


def load_file(path: str | Path) -> Reading:
    """What a YAML or JSON file sets, in the dialect it is written in.

    Raises:
        ConfigError: the file cannot be read as a mapping. Faults of keys and values are in the reading's problems.
    """
    return NATIVE.read(read_document(path))
