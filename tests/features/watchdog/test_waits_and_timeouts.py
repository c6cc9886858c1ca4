"""A rank that waits for long says for whom, and gives up when its time is over: which is said beforehand, and why.

pytest tests/features/watchdog/test_waits_and_timeouts.py. Real processes over shared memory and Gloo.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.api.state import ProcessState
from fullshard.checkpoint.ranks import Ranks, all_come
from fullshard.comm import torch_private
from fullshard.comm.gloo import end_waits, receive
from fullshard.comm.mesh import init_mesh, join_process_group
from fullshard.comm.waiting import PROGRESS, ProgressRecord, Waiting, Watcher
from fullshard.config.switches import COMM, timeout_of_environment
from fullshard.core.errors import CheckpointError, CommunicationError, ConfigError, LifecycleError
from fullshard.core.process import read_status
from fullshard.features import fully_shard
from fullshard.features.meta_device.initialize import take_from_rank_0
from fullshard.features.watchdog import WATCHDOG, watchdog
from fullshard.features.watchdog.status import read_statuses
from fullshard.features.watchdog.watchdog import Watchdog, keep_status_in, seconds_to_wait, stall_seconds
from fullshard.launch import RankEnvironment, read_rank_environment, run_on_main
from fullshard.optim import Muon
from tests.distributed import run_ranks
from tests.launching import free_port
from tests.traps import rank_and_size


def test_seconds_to_wait() -> None:
    """Half an hour for the first step, two minutes later, three of the slowest steps where those are longer."""
    assert seconds_to_wait(0, 0.0) == 1800
    assert seconds_to_wait(1, 0.0) == seconds_to_wait(7, 39.0) == 120
    assert seconds_to_wait(7, 100.0) == 300 and seconds_to_wait(7, 9000.0) == 1800
    assert stall_seconds(1800) == stall_seconds(120) == 30 and stall_seconds(4) == 2


def seconds_of_two_looks() -> float:
    start = time.monotonic()
    assert WATCHDOG._statuses(0.6)
    return time.monotonic() - start


def test_two_looks_at_the_other_ranks_take_no_longer_than_they_may() -> None:
    """Else a time-out would come later than was asked for."""
    assert all(0.6 <= seconds < 1.4 for seconds in run_ranks(seconds_of_two_looks, 2))


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TIMEOUT", text)
    with pytest.raises(ConfigError, match="FULLSHARD_TIMEOUT"):
        timeout_of_environment()


def test_what_a_process_did_last_outlasts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROGRESS, "tell", None)
    monkeypatch.setattr(PROGRESS, "step", 0)
    keep_status_in(tmp_path / "place")
    place = PROGRESS
    assert read_status(tmp_path / "place") == ("", 0.0, None) == read_status(tmp_path / "nowhere")
    place.enter("unit 'a name that is long', unshard", 3)
    waits = "step 3 of this process, waiting in unit 'a name that is long', unshard"
    assert read_status(tmp_path / "place")[0] == waits
    place.enter("unit 'b', reduce", 4)
    place.leave()
    line, age, _ = read_status(tmp_path / "place")
    assert line == "step 4 of this process, after unit 'b', reduce" and -0.01 < age < 60
    place.enter("x" * 5000, 5)
    assert 490 < len(read_status(tmp_path / "place")[0]) < 512


def test_how_long_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first of waits in one another to the end of it; what is not waited for does not count."""
    place, now = ProgressRecord(), iter((10.0, 13.0, 20.0, 24.5))
    monkeypatch.setattr("fullshard.comm.waiting.time.monotonic", lambda: next(now))
    place.enter("a gather", 1)
    place.enter("its last part", 1)
    place.leave()
    place.leave()
    assert place.waited == 3.0
    place.enter("a sum", 1)
    place.leave()
    assert place.waited == 7.5


def until(condition: Any, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_a_dawdler(comm: str, where: str, directory: str) -> tuple[str, str]:
    """What rank 0 says, and the error it gets, while rank 1 does not come to a step, or to its end."""
    import os

    os.environ[COMM.name] = comm
    rank, _ = rank_and_size()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done, lines = Path(directory) / "done", io.StringIO()

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    if where == "the norm of gradients":
        model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    WATCHDOG._asked = 2.0  # not before: a busy machine takes longer for what was before
    if rank == 1:
        until(done.exists)
        return "", ""
    until(lambda: read_statuses(own=0)[1])
    sys.stderr = lines
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if where == "the norm of gradients" else step()
    except CommunicationError as error:
        return lines.getvalue(), str(error)
    finally:
        done.touch()
    return lines.getvalue(), ""


@pytest.mark.parametrize(
    ("comm", "where"),
    [
        ("auto", "the outermost unit"),
        pytest.param("auto", "the norm of gradients", marks=pytest.mark.full),
        pytest.param("gloo", "the outermost unit", marks=pytest.mark.full),
    ],
)
def test_who_is_waited_for_is_said_and_then_an_error(comm: str, where: str, tmp_path: Path) -> None:
    (line, error), _ = run_ranks(wait_for_a_dawdler, 2, comm, where, str(tmp_path))
    missing = (
        r"rank 1 \(process \d+ on \S+\) "
        r"(is running, at .*test_waits_and_timeouts.py:\d+ in until|no longer gives a sign of life)"
    )
    assert line, error
    step = r"\(step 3 of this process\)"
    assert re.match(rf"fullshard: {missing}.*; rank 0 has waited \d+ s, in {where}.*{step}$", line), line
    assert line.count("\n") == 1
    words = rf"rank 0, {where}.*: no answer from another rank for 2 s: {missing}.*{step}"
    assert re.match(words, error), error


def meet_alone(directory: str) -> list[str]:
    """What rank 0 gets, which computes on an accelerator, where rank 1 does not come: what is sent there never ends."""
    rank, _ = rank_and_size()
    model, done, errors = fully_shard(nn.Linear(8, 8)), Path(directory) / "done", list[str]()
    whole: Any = model.weight
    whole.full_tensor()  # the first one compares what is sharded
    cuda = torch.device("cuda")
    places = [
        lambda: ProcessState(read_rank_environment(), cuda).barrier(),
        lambda: WATCHDOG.before_full_tensor(init_mesh().shard_group, cuda),
    ]
    dist.barrier()
    WATCHDOG._asked = 1.0
    if rank == 1:
        until(done.exists)
        return errors
    until(lambda: read_statuses(own=0)[1])
    barrier, dist.barrier = dist.barrier, lambda: time.sleep(20)  # type: ignore[assignment, misc]
    for place in places:
        try:
            place()
        except CommunicationError as error:
            errors.append(str(error))
    done.touch()
    dist.barrier = barrier
    return errors


def test_on_accelerators_ranks_meet_from_host_to_host(tmp_path: Path) -> None:
    """NCCL's barrier ends with NCCL's time-out alone, and with the process."""
    (barrier, whole), _ = run_ranks(meet_alone, 2, str(tmp_path))
    missing = r"no answer from another rank for 1 s: rank 1 \(process \d+ on \S+\) (is running, at|gives no sign)"
    assert re.match(rf"rank 0, the end of a barrier: {missing}", barrier), barrier
    assert re.match(rf"rank 0, gathering a whole tensor: rank 0 has given up: {missing}", whole), whole


def save_alone(directory: str) -> str:
    """What rank 0 gets that saves a model of several axes, over the default group, where rank 1 does not come."""
    rank, _ = rank_and_size()
    fully_shard(nn.Linear(8, 8))
    done = Path(directory) / "done"
    dist.barrier()
    WATCHDOG._asked = 1.0
    if rank == 1:
        until(done.exists)
        return ""
    try:
        Ranks().all(True)
    except CheckpointError as error:
        return str(error)
    finally:
        done.touch()
    return ""


def test_a_checkpoint_of_several_axes_does_not_wait_for_ever(tmp_path: Path) -> None:
    begin = time.monotonic()
    said, _ = run_ranks(save_alone, 2, str(tmp_path))
    missing = r"no answer from another rank for 1 s: rank 1 \(process \d+ on \S+\) "
    assert re.match(rf"lost the other ranks while exchanging metadata: {missing}", said), said
    assert time.monotonic() - begin < 40  # the group's own time-out is 60


def waits_of_a_step() -> list[str]:
    """What this rank said that it waits in, where it is no unit's."""
    said = list[str]()
    enter = ProgressRecord.enter

    def note(place: ProgressRecord, what: str, step: int | None = None, groups: Any = ()) -> None:
        said.append(what)
        enter(place, what, step, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressRecord, "enter", note)
        model: Any = nn.Linear(8, 8)
        fully_shard(model)
        take_from_rank_0([torch.ones(2), torch.ones(3)], init_mesh())  # a wait each: it may take long
        optimizer, scaler = Muon(model), torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run_on_main(read_rank_environment(), list)
    return said


def test_every_wait_of_a_step_is_told() -> None:
    """Where another rank does not come it is named, and the wait is ended."""
    for said in run_ranks(waits_of_a_step, 2):
        assert said.count("the norm of gradients") == 1 and said.count("weights from rank 0") == 2
        assert {"unscaling gradients", "sharing a result of rank 0"} <= {*said}
        assert any("pieces of matrices to owners" in what for what in said)


def test_what_rank_0_says_goes_where_the_group_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that began with `init_process_group("nccl")` sends nothing from the host."""
    sent: list[torch.device | None] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, device, **__: sent.append(device))
    for backend, config in (("nccl", "cuda:nccl"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")):
        monkeypatch.setattr(dist, "get_backend", lambda found=backend: found)
        monkeypatch.setattr(dist, "get_backend_config", lambda found=config: found)
        run_on_main(RankEnvironment(0, 2, 0, 2, launched=True), int)
    assert sent == [None, torch.device("cpu")]


class Blocking(io.BytesIO):
    """A file that takes long to write."""

    def write(self, data: Any) -> int:
        """Until the watcher of this rank has left word often enough for the other's time to be over twice."""
        until(lambda: WATCHDOG._beat > 60)
        return super().write(data)


def wait_for_a_save() -> tuple[str, float]:
    """What rank 0 says while rank 1 saves for longer than it waits otherwise, and the loss after it."""
    rank, _ = rank_and_size()
    model: Any = nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = sys.stderr = io.StringIO()
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    watchdog.LATER_SECONDS, WATCHDOG._asked = 6.0, None
    if rank == 1:
        torch.save(torch.ones(4), Blocking())
    for _ in range(2):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
    watchdog.LATER_SECONDS = 120.0
    return lines.getvalue(), float(loss.detach())


@pytest.mark.full
def test_a_rank_that_saves_is_waited_for() -> None:
    (line, one), (_, other) = run_ranks(wait_for_a_save, 2)
    assert line == "" and one == other


def wait_for_one_another(directory: str) -> str:
    """In the first step, which is waited for patiently, each rank comes to another model than the other.

    The one that gives up first does not end.
    """
    rank, _ = rank_and_size()
    models = [fully_shard(nn.Linear(8, 8), reshard_after_forward=True) for _ in range(2)]
    outputs = [model(torch.ones(2, 8)) for model in models]
    message, here, there = "", Path(directory) / str(rank), Path(directory) / str(1 - rank)
    dist.barrier()
    watchdog._STALL_SECONDS, watchdog.LATER_SECONDS, WATCHDOG._asked, WATCHDOG.slowest = 1.0, 2.0, None, 0.0
    try:
        outputs[rank].sum().backward()
    except CommunicationError as error:
        message = str(error)
    here.touch()
    until(there.exists)
    watchdog._STALL_SECONDS, watchdog.LATER_SECONDS = 30.0, 120.0
    return message


def test_where_all_ranks_wait_none_is_waited_for_patiently(tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(wait_for_one_another, 2, str(tmp_path))):
        assert error.startswith(f"rank {rank}, the outermost unit, ") and "no answer from another rank for 2 s" in error


def generate_unevenly() -> str:
    """In the first step, which is waited for patiently, a rank has a batch more than the other, which is in torch's."""
    rank, ranks = rank_and_size()
    model, message, found = fully_shard(nn.Linear(8, 8)), "", [None] * ranks
    dist.barrier()
    watchdog._STALL_SECONDS, watchdog.LATER_SECONDS, WATCHDOG._asked, WATCHDOG.slowest = 1.0, 2.0, None, 0.0
    try:
        if rank == 0:
            model(torch.ones(2, 8))
    except CommunicationError as error:
        message = str(error)
    dist.all_gather_object(found, rank)
    watchdog._STALL_SECONDS, watchdog.LATER_SECONDS = 30.0, 120.0
    return message


def test_a_collective_of_torchs_is_a_wait_as_well() -> None:
    message, _ = run_ranks(generate_unevenly, 2)
    assert re.search(r"(no answer from another rank for 2 s|ranks are out of step): .*rank 1 \(", message), message
    assert "waits in torch's all_gather, at test_waits_and_timeouts.py" in message and "in generate_unevenly" in message


def end_early() -> str:
    """Rank 0 ends, as far as its thread knows; what rank 1 says of a connection that is closed."""
    rank, _ = rank_and_size()
    fully_shard(nn.Linear(8, 8))
    if rank == 0:
        PROGRESS.enter("unit 'a', reduce", 7)
        PROGRESS.leave()
        thread = Watchdog()
        thread._world = WATCHDOG._world
        thread._is_over.set()
        threading.Thread(target=thread._run).start()
    PROGRESS.given_up = ""  # by a test before
    error, reason = RuntimeError("[pair.cc:1] Connection closed by peer [::1]:1"), ""
    if rank == 1:
        until(lambda: "has ended; it did" in str(WATCHDOG.reason(error)), 20)
        reason = str(WATCHDOG.reason(error))
    dist.barrier()
    return reason


def test_who_has_ended_is_named_to_those_that_wait() -> None:
    reason = run_ranks(end_early, 2)[1]
    assert re.fullmatch(r"rank 0 \(process \d+ on \S+\) has ended; it did unit 'a', reduce \(step 7\) last", reason)


def leave_word() -> list[bool]:
    """Whether there is a word of this rank in the store: at first, when it has not moved for long, when it has."""
    stalls, found = Watchdog(), []
    for now in (0.0, 10.0, 11.0):
        if now > 10:
            PROGRESS.moves += 1
        stalls._look(2.0, now)
        found.append(bool(read_statuses(own=1)[0]))
    return found


def test_a_word_is_taken_back_by_who_moves_again() -> None:
    """Or others would be told where it was."""
    assert run_ranks(leave_word, 1) == [[False, True, False]]


def end_what_is_left(directory: str) -> bool:
    """Rank 1 has ended its connections; whether rank 0, which waits for rank 2, can end its own."""
    rank, (closed, done) = dist.get_rank(), (Path(directory) / name for name in ("closed", "done"))
    world = dist.group.WORLD
    assert world is not None
    if rank == 1:
        end_waits(world)
        closed.touch()
    until(closed.exists)
    if rank:
        until(done.exists)
        return True
    work = receive(torch.empty(1), world, 2, 5)

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    waiting = threading.Thread(target=wait)
    waiting.start()
    end_waits(world)
    waiting.join(20)
    done.touch()
    return not waiting.is_alive()


def test_waits_end_although_the_next_rank_has_ended_its_own(tmp_path: Path) -> None:
    assert all(run_ranks(end_what_is_left, 3, str(tmp_path)))


def look_for_errors() -> list[str]:
    """What is asked of the store by a look while nothing has failed."""
    asked, store = list[str](), torch_private.default_store()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store, name)

    init_mesh(shard_size=1)  # of more groups than one
    torch_private.default_store, own = Counting, torch_private.default_store  # type: ignore[assignment]
    try:
        assert WATCHDOG._failure() == ""
        return asked
    finally:
        torch_private.default_store = own


def test_a_look_for_errors_is_one_read() -> None:
    """However many groups and ranks there are."""
    assert run_ranks(look_for_errors, 2) == [["get"], ["get"]]


def fail_in_a_wait() -> tuple[str, str]:
    """What is said of an error in a wait of rank 0's in a shard group, and once all have forgotten it."""
    mesh = init_mesh()
    group = mesh.shard_group
    assert group is not None
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError, match="rank 0, sums: broken"), Waiting("sums", [group]):
            raise RuntimeError("broken")
        until(lambda: int(torch_private.default_store().get("fullshard/failures")) > 0)
    dist.barrier()
    until(lambda: dist.get_rank() == 0 or WATCHDOG._failure() != "", 10)
    said = WATCHDOG._failure()
    dist.barrier()
    WATCHDOG.forget_failures(mesh.groups)
    WATCHDOG.failed([group], "another", None)  # on all ranks
    until(lambda: int(torch_private.default_store().get("fullshard/failures")) > 2)
    dist.barrier()
    return said, WATCHDOG._failure()


def test_an_error_in_a_wait_is_explained_and_forgotten() -> None:
    said, later = zip(*run_ranks(fail_in_a_wait, 2), strict=True)
    assert "rank 0 had an error in sums (RuntimeError('broken')) that rank 1 did not have" in said[1]
    assert later == ("", "")


def test_an_error_of_its_own_is_not_taken_for_a_wait_that_failed() -> None:
    with pytest.raises(LifecycleError, match=r"^of its own$"), Waiting("sums", []):
        raise LifecycleError("of its own")


class Recorder(Watcher):
    """Write down what failed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def failed(self, groups: Any, what: str, error: BaseException | None) -> None:
        """Write it down."""
        self.told.append(f"{what}: {error!r}")


def test_what_a_watcher_learns_of_a_wait_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step only that ranks were lost: any other error ends a forward or backward, which tells it itself."""
    watcher = Recorder()
    monkeypatch.setattr(PROGRESS, "watcher", watcher)
    with (
        pytest.raises(CommunicationError, match=r"^rank 0, sums: lost \(step 3 of this process\)\n.*fewer batches"),
        Waiting("sums", [None], 3),
    ):
        raise RuntimeError("lost")
    for step in (3, None):
        with pytest.raises(torch.OutOfMemoryError), Waiting("notes", [], step):
            raise torch.OutOfMemoryError("full")
    assert watcher.told == ["sums: RuntimeError('lost')", "notes: OutOfMemoryError('full')"]
    assert not PROGRESS.is_waiting and PROGRESS.what == "notes"


def test_what_was_given_up_is_not_given_up_for_the_next_wait() -> None:
    """Who catches the error and waits again, in a new group say, is to wait."""
    place = ProgressRecord()
    place.enter("unit 'a', unshard", 3)
    place.given_up = "no answer"
    place.leave()
    assert place.given_up == "no answer"  # for whoever makes the error of it
    place.enter("exchanging metadata")
    assert place.given_up == ""


def come_and_be_interrupted() -> list[bool]:
    rank, come = dist.get_rank(), []
    if rank == 0:
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            all_come("here", 30)
    dist.barrier()
    if rank == 1:
        come.append(all_come("here", 0.05))
    dist.barrier()
    return [*come, all_come("here", 30)]


def test_who_was_interrupted_while_it_waited_has_not_come() -> None:
    assert run_ranks(come_and_be_interrupted, 2) == [[True], [False, True]]


def waits(replicas: int) -> list[str]:
    """Where this rank waits in a step of a model whose part has been used before, by itself."""
    found: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    model[0](torch.ones(1, 4))
    fully_shard(model, mesh=mesh)
    enter = ProgressRecord.enter

    def note(self: ProgressRecord, what: str, step: int | None = None, groups: Any = ()) -> None:
        found.append(what)
        enter(self, what, step, groups)

    with mock.patch.object(ProgressRecord, "enter", note):
        model(torch.ones(1, 4)).sum().backward()
    return found


def test_waits_are_named_as_the_model_is_by_now_and_for_each_axis() -> None:
    for replicas in (1, 2):
        for found in run_ranks(waits, 2, replicas):
            assert found.count("unit '0', reduce") == found.count("the outermost unit, reduce") == replicas
            assert "unit '0', unshard" in found


def test_a_rank_that_waits_for_others_to_join_says_where(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(watchdog, "BY_HAND_SECONDS", 0.05)
    with pytest.raises(dist.DistStoreError):
        join_process_group(backend="gloo", rank=0, world_size=3, timeout=timedelta(seconds=1))
    told = capfd.readouterr().err
    assert f"rank 0 of 3 is waiting for 2 others at 127.0.0.1:{port}" in told
    assert told.count("is waiting for") == 1 and "unset RANK and WORLD_SIZE to run one process" in told
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match=r"RANK = 0 and WORLD_SIZE = 3 are set, but MASTER_ADDR, .*, is not\nhint"):
        init_mesh()
