"""Waits that only another rank could end are errors of a rehearsal, which name what the script waits for.

pytest tests/api/rehearsal/test_rehearsal_waits.py
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.api.rehearsal import waits
from fullshard.api.rehearsal.group import unknown
from fullshard.core.errors import CommunicationError
from tests.api.rehearsal.test_rehearsal_group import rehearsed
from tests.api.rehearsal.test_rehearse import rehearse

NEVER = pytest.mark.parametrize(
    ("wait", "named"),
    [
        ("store.get('vote')", "waited for the key 'vote' of a store"),
        ("store.wait(['mine', 'yours'])", "waited for the key 'yours' of a store"),
        ("store.multi_get(['mine', 'yours'])", "waited for the key 'yours' of a store"),
        ("while not store.check(['done']): pass", "asked 100 times for the key 'done' of a store"),
        ("while store.add('arrived', 0) < 4: pass", "the key 'arrived' of a store, which stays 1"),
        ("while store.get('turn') != b'3': pass", "the key 'turn' of a store, which stays b'1'"),
        ("while not flag: dist.broadcast(flag, src=2)", "asked 100 times for broadcast from rank 2"),
        ("while not flag: dist.recv(flag, group_src=2)", "asked 100 times for recv from rank 2"),
        ("while not any(found): dist.broadcast_object_list(found, 3)", "broadcast_object_list from rank 3"),
    ],
)  # fmt: skip


@NEVER
def test_a_wait_for_another_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, wait: str, named: str) -> None:
    """It names the key or the message."""
    monkeypatch.setattr(waits, "GRACE", timedelta(milliseconds=20))
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.0)
    with rehearsed(1, 4):
        unknown.clear()
        store = dist.distributed_c10d._get_default_store()
        store.set("mine", "1")
        store.set("turn", "1")
        store.add("arrived", 1)
        with pytest.raises(CommunicationError, match=r"no other rank exists in a rehearsal") as error:
            exec(wait, {"store": store, "dist": dist, "flag": torch.zeros(1), "found": [None]})
    assert named in str(error.value)
    assert any(what in str(error.value) for what in unknown)


def test_a_wait_that_ends_is_no_error() -> None:
    """Keys of this rank's own threads, waits that the script bounds, and questions that a message answers."""
    with rehearsed(1, 4):
        store = dist.distributed_c10d._get_default_store()
        threading.Timer(0.1, store.set, ("late", "1")).start()
        assert store.get("late") == b"1"
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.wait(["never"], timedelta(milliseconds=10))
        for _ in range(2 * waits.POLLS):
            assert not store.check(["stop"])
        group = dist.new_group([1, 2], use_local_synchronization=True)
        dist.barrier(group)


def test_a_question_in_every_step_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may look for a key that says that it should stop, as long as it trains meanwhile."""
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.0)
    with rehearsed(1, 4):
        store = dist.distributed_c10d._get_default_store()
        for _ in range(2 * waits.POLLS):
            assert not store.check(["stop"])
            dist.all_reduce(torch.ones(1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("wait", "named"),
    [
        ("while not store.check(['vote/3']): time.sleep(0.01)", "the key 'vote/3' of a store"),
        ("votes = [store.get(f'vote/{rank}') for rank in range(dist.get_world_size())]", "the key 'vote/0' of a store"),
        ("while not flag: dist.broadcast(flag, src=5); time.sleep(0.01)", "broadcast from rank 5"),
        ("dist.recv(flag)", "waits for a message from any rank"),
    ],
)
def test_a_script_that_waits_ends_with_an_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, wait: str, named: str
) -> None:
    """Within seconds, and with the name of what it waits for."""
    lines = ["import time, torch, torch.distributed as dist", "dist.init_process_group('gloo')",
             "store, flag = dist.distributed_c10d._get_default_store(), torch.zeros(1)",
             "store.set('vote/1', 'yes')", wait]  # fmt: skip
    (tmp_path / "waits.py").write_text("\n".join(lines))
    begin = time.monotonic()
    found, said = rehearse(capfd, "--as", "8xH100", "--rank", "1", "--", "--cpu", str(tmp_path / "waits.py"), code=1)
    assert found == {}
    assert named in said
    assert time.monotonic() - begin < 60
