"""Find the shapes of any model that Transformers supports, by building it on the meta device in another process.

A separate process is used because this package does not import torch. It runs `fullshard.api.counting`, once for each
configuration and version of Transformers. The results are cached in `$XDG_CACHE_HOME/fullshard/shapes`.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fullshard.core.errors import ConfigError
from fullshard.core.files import read_text, write_text
from fullshard.plan.shapes import ModelShape

_PROGRAM = "fullshard.api.counting"
_FORMAT = 5
"""The version of cached results. Shapes with another version are counted again."""
_SECONDS = 300
_SHAPES = TypeAdapter(ModelShape)


def is_known_to_transformers(kind: str) -> bool:
    """Return whether Transformers supports the `model_type` named `kind`, without importing Transformers."""
    return bool(kind) and f'"{kind}"' in _families_of_transformers()


def counted(values: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the shapes that Transformers builds from a configuration. Each layer's `Block` is only an estimate."""
    question = json.dumps(values, sort_keys=True, default=str)
    key = hashlib.sha256(f"{_FORMAT} {version('transformers')} {question}".encode()).hexdigest()
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fullshard" / "shapes" / f"{key}.json"
    try:
        return _SHAPES.validate_json(read_text(path))
    except (OSError, ValueError):
        answer = _count(question, where)
    with contextlib.suppress(OSError):  # without a cache, the shapes are counted again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, answer)
    return _SHAPES.validate_json(answer)


def written(model: ModelShape) -> str:
    """Serialize the shapes to text that `counted` can read."""
    return _SHAPES.dump_json(model).decode()


def _count(question: str, where: str) -> str:
    command = [sys.executable, "-m", _PROGRAM]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: Transformers did not build the model within {_SECONDS} s") from None
    if done.returncode != 0:
        lacks = re.search(r"\w+ requires the (\S+) library", done.stderr)
        reason = lacks[0] if lacks else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"{where}: Transformers {version('transformers')} cannot build the model: {reason}",
            hint=f"pip install {lacks[1]}" if lacks else "use the model's complete config.json",
        )
    return done.stdout


def _families_of_transformers() -> str:
    """Return the source of Transformers' lists of model types as text, because importing them takes seconds."""
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    tables = (Path(folder) / "models" / "auto" / name for folder in folders for name in _TABLES)
    return "".join(table.read_text(encoding="utf-8") for table in tables if table.is_file())


_TABLES = ("auto_mappings.py", "configuration_auto.py")
