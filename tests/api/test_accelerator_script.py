"""An Accelerate script runs unchanged but for the import, sharded over two ranks, with the same losses.

pytest tests/api/test_accelerator_script.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator_script import main
from tests.differential import TOLERANCE
from tests.distributed import run_ranks
from tests.launching import run_python

ROOT = Path(__file__).parents[2]


def _with_accelerate(options: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: Accelerate keeps its state in globals."""
    pytest.importorskip("accelerate")
    code = (
        "import json, sys; from tests.accelerator_script import main; "
        "print(json.dumps(main('accelerate', json.loads(sys.argv[1]))))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    run = run_python([sys.executable, "-c", code, json.dumps(options)], ROOT, environment, 240)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("options", [{}, pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.full)])
def test_the_script_gives_accelerates_numbers(options: dict[str, Any]) -> None:
    theirs = _with_accelerate(options)
    results = run_ranks(main, 2, "fullshard.api", options)
    for ours in results:
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=TOLERANCE)
        assert ours["rate"] == pytest.approx(theirs["rate"])
        assert ours["references"] == ours["expected"] == theirs["references"]
        assert ours["predictions"] == theirs["predictions"]
    assert theirs["losses"][-1] < theirs["losses"][0], "the script must train for the comparison to mean something"


@pytest.mark.full
def test_one_rank_gives_them_too() -> None:
    theirs = _with_accelerate({})
    [ours] = run_ranks(main, 1, "fullshard.api", {})
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)


@pytest.mark.full
def test_half_precision_follows_accelerates() -> None:
    theirs = _with_accelerate({"mixed_precision": "bf16"})
    ours, _ = run_ranks(main, 2, "fullshard.api", {"mixed_precision": "bf16"})
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=3e-2)
