"""What scripts do beside steps ends in a rehearsal: loaders, schedulers, metrics, evaluation, TRL's trainers.

pytest -m full tests/api/rehearsal/test_rehearsed_features.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.rehearsal.test_rehearse import EXAMPLES, SCRIPTS, rehearse

pytestmark = pytest.mark.full


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("kind", ["loop", "accelerate", "evaluation"])
def test_features_of_scripts_end(capfd: pytest.CaptureFixture[str], tmp_path: Path, kind: str, ranks: int) -> None:
    """Each as `tests/scripts/rehearsed_features.py` says."""
    script = [str(SCRIPTS / "rehearsed_features.py"), kind, str(tmp_path)]
    found, said = rehearse(capfd, "--as", f"{ranks}xH100", "--", "--cpu", *script)
    assert f"{kind} has ended" in said
    assert found["steps"] >= 4
    assert found["step_seconds"] > 0
    assert found["saves"]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", ["sft", "dpo_lora"])
def test_trainers_of_trl_end(capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, ranks: int) -> None:
    """The examples, with their last saves."""
    words = [str(EXAMPLES / f"{name}.py"), "--steps", "4", "--output", str(tmp_path)]
    found, _ = rehearse(capfd, "--as", f"{ranks}xH100", "--", "--cpu", *words)
    assert found["steps"] == 4
    assert found["saves"]
    assert not [*tmp_path.iterdir()]
