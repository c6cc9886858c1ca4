"""Numbers as other processors compute them: tests marked `numerics`, run again with kernels made for less.

torch and the libraries under it choose their kernels as they are imported. So each run is a process of its own, whose
ranks inherit its variables.

pytest tests/project/test_processors.py
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROCESSORS = {
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
}
"""MKL heeds the second variable on Intel's processors only, the third on others, too."""


@pytest.mark.timeout(900)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these variables are read on x86 only")
@pytest.mark.parametrize(
    ("processor", "folders"),
    [
        ("no vectors", "engine features optim"),
        pytest.param("no vectors", "integrations", marks=pytest.mark.full),
        pytest.param("AVX2", ".", marks=pytest.mark.full),
    ],
)
def test_numbers_hold_on_other_processors(processor: str, folders: str) -> None:
    found = [path for folder in folders.split() for path in sorted((TESTS / folder).rglob("test_*.py"))]
    files = [str(path) for path in found if "pytest.mark.numerics" in path.read_text()]
    assert files
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "numerics and not full"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=TESTS.parent,
        env=variables | PROCESSORS[processor] | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"with {PROCESSORS[processor]}:\n{done.stdout}"
