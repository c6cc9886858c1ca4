"""What holds in environments that the default tests do not run in: PyTorch/XLA's torch, no extras, an installed wheel.

pytest tests/test_environments.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` first on the path."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def torch_2_9(tmp_path: Path) -> Path:
    """A folder by which packages are found whose metadata say torch 2.9 and the torch_xla that goes with it."""
    for name, version in (("torch", "2.9.1"), ("torch_xla", "2.9.0")):
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path


@pytest.mark.parametrize("module", ["fullshard.integrations.xla", "fullshard.torchacc"])
def test_pytorch_xla_needs_nothing_that_needs_a_newer_torch(torch_2_9: Path, module: str) -> None:
    done = run_in(torch_2_9, "-c", f"import {module}")
    assert done.returncode == 0, done.stderr


def test_the_engine_is_refused_there(torch_2_9: Path) -> None:
    done = run_in(torch_2_9, "-c", "from fullshard import fully_shard")
    assert "fullshard needs torch 2.11 or later, got 2.9.1" in done.stderr
    assert "use fullshard.integrations.xla" in done.stderr
