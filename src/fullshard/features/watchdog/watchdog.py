"""Watch how long this process waits for other ranks, report which ranks are missing, and end the wait at its timeout.

A thread checks twice per second. If a rank has made no progress for some seconds, because it waits or computes, its
thread writes the rank's status to the job's store. A rank that has waited for a long time reads there which ranks are
not waiting, and what they are doing instead. If all ranks wait, but in different places, the wait ends, too.

If a script catches an error on one rank, for example in backward, the other ranks wait at a point that this rank will
not reach. Therefore the store also counts errors. If a waiting rank sees that another rank has had more errors than it
has had itself, it ends the wait. As long as the job has had no error, this check reads only one number.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.gloo import end_waits
from fullshard.comm.mesh import LAUNCH_HINT, TIMEOUT_SECONDS
from fullshard.comm.waiting import PROGRESS, Waiting, Watcher
from fullshard.config.switches import PREEMPTION_DIR, timeout_of_environment
from fullshard.core.errors import plural, shortened, tell
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.process import StatusFile, is_of_script, this_process
from fullshard.core.threads import start_thread
from fullshard.features.watchdog import status
from fullshard.features.watchdog.status import PROCESS, STATUS, Status

BY_HAND_SECONDS, LAUNCHED_SECONDS = 8.0, 60.0
"""Seconds before a message is printed. A launcher starts all ranks, which can take long on a busy host."""


def _say_who_is_missing() -> None:
    said = {name: os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size = said["RANK"], said["WORLD_SIZE"]
    others = plural(int(size) - 1, "other") if rank == "0" and size.isdecimal() else "rank 0 and the others"
    tell(
        f"fullshard: rank {rank} of {size} is waiting for {others} at {said['MASTER_ADDR']}:{said['MASTER_PORT']} "
        f"(MASTER_ADDR, MASTER_PORT)\nhint: {LAUNCH_HINT}"
    )


LATER_SECONDS = 120.0
_STEPS = 3  # a rank may be late by this multiple of the slowest step
_STALL_SECONDS = 30.0


def seconds_to_wait(steps: int, slowest: float) -> float:
    """Return the maximum duration of a wait after this number of steps, if the script has not set a timeout."""
    return TIMEOUT_SECONDS if steps < 1 else min(TIMEOUT_SECONDS, max(LATER_SECONDS, _STEPS * slowest))


def stall_seconds(limit: float) -> float:
    """Return how many seconds a wait with this limit may take before it is reported."""
    return min(_STALL_SECONDS, limit / 2)


_FAILURES, _FAILED = "fullshard/failures", "fullshard/failed/{}"
"""Keys in the store: the total number of errors on all ranks, and by rank the errors by group and how often the group
has recovered."""
_GIVEN_UP = "fullshard/given-up"
"""Key in the store for the reason why a rank has closed its groups, read by ranks that find them closed."""
_SOON = 2.0
"""Seconds of a wait after which the thread checks for errors."""
_LOOKS = 15
"""Number of checks before a wait is reported; the other ranks leave their status after the first five."""
_QUOTED = 300
_FRAMES = 3
_BUSY = {
    "compiles": ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"),
    "saves": ("/fullshard/checkpoint/", "/torch/serialization.py", "/torch/distributed/checkpoint/"),
}
"""Work that may legitimately take long, identified by the files on the stack."""
_LIBRARIES = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", contextlib.__file__, "<frozen"
_CLOSED = re.compile("closed by peer|reset by peer|broken pipe|socket closed|(read|write) error", re.IGNORECASE)
"""Gloo's messages about a rank that has ended."""
_APART = re.compile(r"is in collective|preamble\.length")
"""Messages about ranks that are in different collectives."""
_NCCL_SECONDS = 600.0
"""torch's default timeout for NCCL; other backends use `default_pg_timeout`."""


class Watchdog(Watcher):
    """The watchdog thread of this process and the data it uses.

    Attributes:
        groups: the process groups that this process may wait in.
        slowest: duration of the slowest step in seconds, excluding the first step.
    """

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.slowest, self._step_began = 0.0, 0.0
        self._pid, self._is_over = 0, threading.Event()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._asked: float | None = None
        self._trainer = threading.main_thread().ident
        self._moves, self._since, self._next_line, self._beat, self._noted = -1, 0.0, 0.0, 0, -1
        self._forget_world()

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Return a context in which ranks join the job. If this takes long, print that this rank waits for others."""
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ
        timer = threading.Timer(LAUNCHED_SECONDS if is_launched else BY_HAND_SECONDS, _say_who_is_missing)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _forget_world(self) -> None:
        self.groups.clear()  # names of groups may be reused
        self._rallies = dict[str, int]()
        self._failures: dict[str, tuple[int, str]] = {}
        self._unexplained: set[str] = set()
        self._told: dict[str, str] = {}
        self._untold = 0
        self._found: tuple[int, dict[int, dict[str, Any]]] = (0, {})

    def watch(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        """Also watch waits in these groups. An entry is None if this rank has no peers along an axis."""
        world = dist.group.WORLD
        if world is None or world.size() == 1 or torch_private.backend_of(world, device) is None:
            return  # ranks of a group implemented in Python may be threads
        if self._world is None or self._world() is not world:
            self._forget_world()
        self.groups.update(group for group in groups if group is not None)
        self._asked = _asked_seconds(torch_private.timeout_of(world, device).total_seconds(), device)
        self._trainer, self._world, self._moves = threading.get_ident(), weakref.ref(world), -1
        with contextlib.suppress(RuntimeError):
            store, own = torch_private.default_store(), dist.get_rank()
            store.set(PROCESS.format(own), this_process())
            for key in {STATUS, _FAILED} - self._told.keys():  # make these keys readable from now on
                self._tell(key, "{}")
            store.set(_GIVEN_UP, "")
            store.add(_FAILURES, 0)
        if self._pid != os.getpid():  # a forked process has none of its parent's threads
            self._pid = os.getpid()
            if directory := PREEMPTION_DIR.read():
                with contextlib.suppress(OSError):  # the directory of a finished job
                    keep_status_in(Path(directory) / f"status-{os.getpid()}")
            self._is_over = threading.Event()
            start_thread("fullshard watchdog", self._run, self._is_over.set)

    def begin_step(self, now: float) -> None:
        """Start a new step, and record the duration of the previous one."""
        if self._step_began:
            self.slowest = max(self.slowest, now - self._step_began)
        self._step_began = now

    def before_full_tensor(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Before a complete tensor is gathered on accelerators, wait for all ranks, and report missing ranks."""
        if group is not None:
            meet(group, device, "gathering a whole tensor")

    def failed(self, groups: Iterable[dist.ProcessGroup | None], what: str, error: BaseException | None) -> None:
        """Tell the other ranks of these groups that this rank had an error and will not reach their next wait."""
        for name in [self._name(group) for group in groups if group is not None and group in self.groups]:
            self._failures[name] = self._failures.get(name, (0, ""))[0] + 1, what
            self._unexplained.add(name)
            self._untold += 1
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Store the text of an error with all failures that have no explanation yet, because it has caused them."""
        while self._unexplained:
            count, what = self._failures[name := self._unexplained.pop()]
            self._failures[name] = count, f"{what} ({shortened(repr(error), _QUOTED)})"

    def forget_failures(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """No longer count earlier failures in these groups, because all of their ranks are at the same point."""
        for group in groups:
            if group is not None:
                self._rallies[group.group_name] = self._rallies.get(group.group_name, 0) + 1

    def _name(self, group: dist.ProcessGroup) -> str:
        return f"{group.group_name}/{self._rallies.get(group.group_name, 0)}"

    def reason(self, error: RuntimeError) -> object:
        """Return the reason why a wait has ended with a torch error, or the error itself if the reason is unknown."""
        why, text = PROGRESS.given_up, str(error)
        with contextlib.suppress(Exception):  # the store may also be gone
            if not why and self._is_in_its_world:
                why = self._failure() or torch_private.default_store().get(_GIVEN_UP).decode() or status.ended()
        if not why and _CLOSED.search(text):
            other = f"rank {1 - dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() == 2 else "a rank"
            why = f"{other} has ended or left its process group while this rank waits for it"
        return why or (f"ranks are out of step: {text}" if _APART.search(text) else error)

    @property
    def limit(self) -> float:
        """Return how many seconds the current wait may take."""
        return self._asked or seconds_to_wait(0 if PROGRESS.is_patient else PROGRESS.step - 1, self.slowest)

    @property
    def _is_in_its_world(self) -> bool:
        """Return whether the default group is still the one that is being watched, without keeping it alive."""
        return self._world is not None and self._world() is dist.group.WORLD is not None

    def _run(self) -> None:
        """Run the loop of the watchdog thread. It blocks signals, which the main thread must receive."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._is_over.wait(_pause(stall_seconds(limit := self.limit))):
            with contextlib.suppress(Exception):  # a group or store is closing, which the waiting thread notices
                if self._is_in_its_world:
                    self._look(limit, time.monotonic())
        with contextlib.suppress(Exception):  # the group or the store is gone
            if self._is_in_its_world:
                self._tell(STATUS, json.dumps({"what": PROGRESS.what, "step": PROGRESS.step, "has_ended": True}))

    def _look(self, limit: float, now: float) -> None:
        stall = stall_seconds(limit)
        self._tell(_FAILED, json.dumps(dict(self._failures)))  # before other ranks check it
        if count := self._untold:
            self._untold -= count
            torch_private.default_store().add(_FAILURES, count)
        if self._moves != PROGRESS.moves:
            if self._beat:
                self._tell(STATUS, "{}")
            self._moves, self._since, self._next_line, self._beat = PROGRESS.moves, now, stall / 2, 0
            return
        idle = now - self._since
        is_long = PROGRESS.is_waiting and idle >= min(_SOON, stall / 3)
        if is_long and self._end_waits(self._given_up_elsewhere()):
            return
        is_in_vain = is_long and bool(self._failure())
        if idle < stall / 3 and not is_in_vain:
            return
        own = self._tell_status()
        reading = 2.5 * _pause(stall)  # start early by this much, to finish in time
        if is_in_vain and self._end_waits(self._failure(self._statuses(reading))):
            return
        if not PROGRESS.is_waiting or idle < min(self._next_line, limit - reading):
            return
        others = self._statuses(reading)
        if self._moves != PROGRESS.moves:
            return  # the wait has ended in the meantime
        everyone = {dist.get_rank(): own | {"is_alive": True}, **others}
        alike = {rank: each for rank, each in everyone.items() if each.get("group") == own["group"]}
        concerned = alike if len(alike) == own["group"][0] and status.parted(alike) else everyone
        why = status.parted(concerned)
        # Wait longer than a step, because queued work on a device or a slow link also makes ranks wait.
        if why and idle >= (max(stall / 2, self.slowest) if self.slowest else 2 * stall):
            if all(each["is_alive"] for each in concerned.values()):
                self._end_waits(why)
                return
            if idle < limit - reading:
                return  # on a busy machine ranks report rarely: check again
        self._next_line = 2 * max(idle, stall / 2)
        if self._asked is None and others and all(status.waits(other) for other in others.values()):
            limit = min(limit, seconds_to_wait(1, self.slowest))  # no rank is loading, compiling or saving
        if idle >= limit - reading:
            is_late = time.monotonic() - self._since >= TIMEOUT_SECONDS
            if self._asked is not None or is_late or not status.are_busy(status.missing(others)):
                where = (len(alike) == own["group"][0] and status.met(alike)) or status.named(others)
                self._end_waits(f"no answer from another rank for {limit:g} s: {where}")
        elif idle >= stall and all(rank > dist.get_rank() for rank in others.keys() - status.missing(others).keys()):
            self._say(idle, others)

    def _tell_status(self) -> Status:
        above, script, busy, is_waiting, call = list[str](), list[str](), "", PROGRESS.is_waiting, ""
        worker = ""
        frame: FrameType | None = sys._current_frames().get(self._trainer or 0)
        collective = status.collective(frame)
        local = None if frame is None else frame.f_locals.get("group")  # torch uses this name everywhere
        while frame is not None:
            file = frame.f_code.co_filename
            worker = worker or torch_private.awaited_worker(frame)
            busy = next((what for what, files in _BUSY.items() if any(name in file for name in files)), busy)
            if not file.startswith(_LIBRARIES) and (is_of_script(file) or not (script or is_waiting)):
                place = f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                place += call if is_of_script(file) and not script else ""
                (script if is_of_script(file) else above).append(place)
            is_ours = file.startswith(_LIBRARIES[1]) and not frame.f_code.co_name.startswith("_")
            call = f" ({frame.f_code.co_name})" if is_ours else ""
            frame = frame.f_back
        here = [*above[: (not worker) if script else _FRAMES], *script][:_FRAMES]
        busy = "" if is_waiting else busy
        self._beat += 1
        group = next(iter(PROGRESS.groups), None) or (local if collective else None)
        ranks = dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
        own: Status = {"what": PROGRESS.what, "step": PROGRESS.step, "is_waiting": is_waiting, "here": here}
        own |= {"busy": busy, "collective": "" if busy else collective, "beat": self._beat, "worker": worker}
        own["group"] = [len(ranks), zlib.crc32(repr(ranks).encode())]
        self._tell(STATUS, json.dumps(own))
        return own

    def _statuses(self, seconds: float) -> dict[int, Status]:
        """Watch the other ranks for `seconds`. Return their statuses, with `is_alive` for those that were updated."""
        try:
            before = status.read_statuses(dist.get_rank())
            self._is_over.wait(seconds / 2)
            self._tell_status()  # other ranks that check at the same times would otherwise consider this rank dead
            self._is_over.wait(seconds / 2)
            now = status.read_statuses(dist.get_rank())
        except RuntimeError:  # the store is gone, because its rank has ended
            return {}
        return {
            rank: other | {"is_alive": other.get("beat") != before.get(rank, {}).get("beat") or not other}
            for rank, other in now.items()
        }

    def _end_waits(self, why: str) -> bool:
        """End the current wait and return True, unless `why` is empty or the wait has already ended."""
        if not why or self._moves != PROGRESS.moves:
            return False
        PROGRESS.given_up = why
        with contextlib.suppress(RuntimeError):  # the store is gone, because its rank has ended
            torch_private.default_store().compare_set(_GIVEN_UP, "", f"rank {dist.get_rank()} has given up: {why}")
        for group in [*self.groups, *PROGRESS.groups]:
            end_waits(group)
        return True

    def _given_up_elsewhere(self) -> str:
        """Return why another rank of these groups gave up, or "", because waits in shared memory do not notice it."""
        text = torch_private.default_store().get(_GIVEN_UP).decode()
        rank = int(text.split()[1]) if text else dist.get_rank()
        closed = [group for group in PROGRESS.groups if group in self.groups]  # a group made later is still open
        is_near = any(rank in dist.get_process_group_ranks(group) for group in closed)
        return text if is_near and rank != dist.get_rank() else ""

    def _tell(self, key: str, text: str) -> None:
        """Write a text to the store under this rank's key, unless the store already contains it."""
        if self._told.get(key) != text:
            torch_private.default_store().set(key.format(dist.get_rank()), text)
            self._told[key] = text

    def _failure(self, others: dict[int, Status] | None = None) -> str:
        """Return a message if a rank had an error that others did not have. Of `others`, only ranks that wait count."""
        own, total = dist.get_rank(), int(torch_private.default_store().get(_FAILURES))
        if total and (total != self._found[0] or others is not None):  # the explanation may arrive later
            ranks = sorted({rank for group in self.groups for rank in dist.get_process_group_ranks(group)})
            self._found = total, dict(zip(ranks, status.read([_FAILED.format(rank) for rank in ranks]), strict=True))
        for group in list(self.groups) if total else []:
            name, had = self._name(group), dict[int, tuple[int, str]]()
            for rank in dist.get_process_group_ranks(group):
                had[rank] = self._found[1].get(rank, {}).get(name, (0, ""))
            had[own] = self._failures.get(name, (0, ""))
            fewest, most = min(had, key=lambda rank: had[rank][0]), max(had, key=lambda rank: had[rank][0])
            behind = [rank for rank, (count, _) in had.items() if rank != own and count == had[fewest][0]]
            are_stuck = others is None or all(others.get(rank, {}).get("is_waiting") for rank in behind)
            if had[fewest][0] < had[most][0] and are_stuck:
                what = had[most][1]
                return (
                    f"rank {most} had an error in {what} that rank {fewest} did not have, so the ranks are out of step"
                )
        return ""

    def _say(self, seconds: float, others: dict[int, Status]) -> None:
        """Print for which ranks this rank has waited, and record it once per wait, unless they do work that is long."""
        if status.are_busy(status.missing(others)):
            return
        step = f" (step {PROGRESS.step} of this process)" if PROGRESS.step else ""
        said = f"{status.named(others)}; rank {dist.get_rank()} has waited {seconds:.0f} s, in {PROGRESS.what}{step}"
        tell(f"fullshard: {said}")
        if self._noted != self._moves:
            self._noted = self._moves
            JOURNAL.note(Happening.WAITING, said, cause_rank=next(iter(status.missing(others)), None))


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group have arrived, if its hosts can, so that the next operation does not hang."""
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), Waiting(what, [group]):
            dist.all_reduce(torch.zeros(1, device=host), group=group)


def keep_status_in(path: Path) -> None:
    """Keep a file up to date with what this process is waiting for or did last."""
    file = StatusFile(path)

    def tell() -> None:
        step = f"step {PROGRESS.step} of this process, " if PROGRESS.step else ""
        file.write(f"{step}{'waiting in' if PROGRESS.is_waiting else 'after'} {PROGRESS.what}", JOURNAL.step)

    PROGRESS.tell = tell


def _pause(stall: float) -> float:
    """Return the seconds between two checks by the watchdog thread."""
    return min(0.5, stall / _LOOKS)


def _asked_seconds(group: float, device: torch.device) -> float | None:
    """Return the timeout in seconds that fullshard, the environment or the default group sets, or None if none does."""
    default = _NCCL_SECONDS if device.type == "cuda" else dist.default_pg_timeout.total_seconds()
    return PROGRESS.limit or timeout_of_environment() or (None if group in (default, TIMEOUT_SECONDS) else group)


WATCHDOG = Watchdog()
"""The watchdog of this process."""
