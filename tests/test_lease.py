"""A folder is one job's at a time: the second is refused by name, and a job that has ended is no obstacle.

pytest tests/test_lease.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.checkpoint.lease import LASTS_SECONDS, LEASE_NAME, lease
from fullshard.core.errors import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from fullshard.checkpoint.lease import lease
with lease(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(600)
"""


def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
            found = rf"is in use: process {holder.pid} on .* has it since \d+ s, .* \d+ s ago\nhint"
            with pytest.raises(ConfigError, match=found), lease(tmp_path):
                pass
        finally:
            holder.kill()
    assert (tmp_path / LEASE_NAME).exists()
    with lease(tmp_path), lease(tmp_path):  # a killed one has left it; within a process it is one's own
        assert json.loads((tmp_path / LEASE_NAME).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_of_another_host_only_time_tells(tmp_path: Path) -> None:
    path = tmp_path / LEASE_NAME
    theirs = {"host": "node7", "pid": os.getpid(), "begun": 1, "machine": "another", "since": time.time() - 500}
    path.write_text(json.dumps(theirs))
    with pytest.raises(ConfigError, match=r"process \d+ on node7 has it since 500 s"), lease(tmp_path):
        pass
    old = time.time() - LASTS_SECONDS - 1
    os.utime(path, (old, old))
    with lease(tmp_path):
        assert json.loads(path.read_text())["host"] != "node7"
    path.write_text("")  # of a job that was killed as it began
    with lease(tmp_path):
        assert path.read_text()
