"""What Slurm's variables are taken to mean.

Run: pytest tests/launch/test_launch_slurm.py. Nothing is started here; `test_launch.py` runs a printed batch script.
"""

from __future__ import annotations

import pytest

from fullshard.core.errors import ConfigError
from fullshard.launch.slurm import devices_per_host, first_host, read_allocation

STEP = {
    "SLURM_JOB_ID": "412345",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("login", "login"),
        ("gpu[01-03,7],login", "gpu01"),
        ("r[1-2]n[8-10]-ib", "r1n8-ib"),
        ("a-b-1,c[098-101]", "a-b-1"),
        ("gpu[007]", "gpu007"),
    ],
)
def test_the_first_of_a_list_of_hosts(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "gpu[", "gpu[1-]", "gpu[a-b]", "gpu]1[", "]", ","])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a list of hosts"):
        first_host(text)


def test_one_task_per_host_needs_no_flags() -> None:
    reading = read_allocation(STEP)
    found = {setting.path: (setting.value, setting.origin.text) for setting in reading.settings}
    assert found == {
        "launch.num_machines": (2, "$SLURM_NNODES"),
        "launch.machine_rank": (1, "$SLURM_PROCID"),
        "launch.main_process_ip": ("gpu07", "$SLURM_JOB_NODELIST"),
        "launch.main_process_port": (22345, "$SLURM_JOB_ID"),
        "launch.rdzv_id": ("412345.0", "$SLURM_JOB_ID"),
    }
    assert "num_machines = 2" in str(reading.notes[0])


def test_outside_and_on_one_host_nothing_is_set() -> None:
    assert read_allocation({}).settings == []
    assert read_allocation({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}).settings == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_NTASKS": "16"}, "srun started 16 tasks on 2 hosts"),
        ({"SLURM_NTASKS": "1"}, "has 2 hosts, but the launcher was started on 1 of them"),
        ({"SLURM_STEP_ID": None}, "srun --ntasks-per-node=1"),
        ({"SLURM_NNODES": "two"}, r"\$SLURM_NNODES must be a whole number"),
    ],
)
def test_other_ways_to_start_are_explained(change: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in {**STEP, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        read_allocation(environ)


def test_devices() -> None:
    assert devices_per_host({"SLURM_GPUS_ON_NODE": "4"}) == 4
    assert devices_per_host({}) is None
