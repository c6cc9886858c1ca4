"""Watch how long this process waits for others: name the ranks it waits for, and end the wait at its time-out.

A thread looks twice a second. If a rank has not moved for some seconds, whether it waits or computes, its thread
leaves its place in the job's store. So a rank that waits for long can read which others do not wait, and what they do
instead. As long as steps follow one another nothing is sent.

If a script catches an error on one rank, in a backward say, the others wait where this rank does not come any more.
The store counts errors, too: ranks that wait, and see that others had more errors than they, wait in vain. While the
job has had no error, a look for errors reads a single number.

A waiting rank also tells the log of what it has waited for (`Track`), and compares it with that of one other, the next
rank. So two ranks that went different ways find each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import progress, torch_private
from fullshard.comm.gloo import end_waits
from fullshard.comm.progress import PROCESS, WORD, Word
from fullshard.comm.track import Track
from fullshard.config.switches import PREEMPTION_DIR, timeout_of_environment
from fullshard.core.errors import CommunicationError, FullshardError, cut
from fullshard.core.patience import FIRST_SECONDS, PATIENCE, seconds_to_wait, stall_seconds
from fullshard.core.place import PLACE, this_process
from fullshard.core.threads import start_thread

_FAILURES, _FAILED = "fullshard/failures", "fullshard/failed/{}"
"""Keys in the store: the number of errors of all ranks together; by rank, its own by group and how often the group was
in step again."""
_TRACKS = "fullshard/tracks/{}"
"""Key in the store, by rank: its logs, by name; see `Track.told`."""
_GIVEN_UP = "fullshard/given-up"
"""Key in the store: why a rank has closed its groups, for the ranks that find them closed."""
_SOON = 2.0
"""Seconds of a wait after which the thread looks for errors."""
_LOOKS = 15
"""Looks before a wait is worth a line; after the first five the other ranks leave word."""
_QUOTED = 300
_FRAMES = 3
_BUSY = {
    "compiles": ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"),
    "saves": ("/fullshard/checkpoint/", "/torch/serialization.py", "/torch/distributed/checkpoint/"),
}
"""Work that may take long and is no fault, by the files that are on the stack then."""
_LIBRARIES = ("/fullshard/", "/torch/", "/contextlib.py", "<frozen")

_CLOSED = re.compile("closed by peer|reset by peer|broken pipe|socket closed|(read|write) error", re.IGNORECASE)
"""Gloo's messages about a rank that is gone."""


class Stalls:
    """The detection of stalls in this process.

    Attributes:
        groups: the groups that this process may wait in.
    """

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._pid, self._is_over = 0, threading.Event()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._asked: float | None = None
        self._trainer = threading.main_thread().ident
        self._moves, self._since = -1, 0.0
        self._next_line = 0.0
        self._beat = 0
        self._failures: dict[str, tuple[int, str]] = {}
        self._told: dict[str, str] = {}
        self._untold = 0
        self._found: tuple[int, dict[int, dict[str, Any]]] = (0, {})
        self._joined: list[dist.ProcessGroup] = []
        self._tracks: weakref.WeakSet[Track] = weakref.WeakSet()
        self._opened: dict[str, int] = {}
        self._rallies: dict[str, int] = {}

    def watch(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        """Watch waits in these groups, too; None stands for a rank alone. All are parts of the default group."""
        world = dist.group.WORLD
        if world is None or world.size() == 1 or torch_private.backend_of(world, device) is None:
            return  # a group that is written in Python may have threads for ranks
        if self._world is None or self._world() is not world:
            self._failures, self._told, self._rallies, self._untold, self._found = {}, {}, {}, 0, (0, {})
            self.groups.clear()  # of the last one, under names that are given again
            self._tracks.clear()
            self._opened = {}
        self.groups.update(group for group in groups if group is not None)
        self._asked = _asked_seconds(torch_private.timeout_of(world, device).total_seconds(), device)
        self._trainer, self._world, self._moves = threading.get_ident(), weakref.ref(world), -1
        with contextlib.suppress(RuntimeError):
            store, own = torch_private.default_store(), dist.get_rank()
            store.set(PROCESS.format(own), this_process())
            for key in {WORD, _TRACKS, _FAILED} - self._told.keys():  # from here on they can be read
                self._tell(key, "{}")
            store.set(_GIVEN_UP, "")
            store.add(_FAILURES, 0)
        if self._pid != os.getpid():  # a forked process has none of its parent's threads
            self._pid = os.getpid()
            if directory := PREEMPTION_DIR.read():
                with contextlib.suppress(OSError):  # of a job that is over
                    PLACE.keep_in(Path(directory) / f"place-{os.getpid()}")
            self._is_over = threading.Event()
            start_thread("fullshard stalls", self._run, (), self._is_over.set)

    def note_failure(self, group: dist.ProcessGroup, what: str) -> None:
        """Note that an error on this rank has ended what the ranks of a group do together."""
        name = self._name(group)
        count, _ = self._failures.get(name, (0, ""))
        self._failures[name] = count + 1, what
        self._untold += 1

    def forget_failures(self, group: dist.ProcessGroup) -> None:
        """Forget earlier failures of some ranks: all ranks of the group are at the same place."""
        self._rallies[group.group_name] = self._rallies.get(group.group_name, 0) + 1

    def _name(self, group: dist.ProcessGroup) -> str:
        return f"{group.group_name}/{self._rallies.get(group.group_name, 0)}"

    def tell(self, track: Track, group: dist.ProcessGroup) -> None:
        """Tell from now on the track of a model that the ranks of a group share. The same on every rank."""
        number = self._opened[group.group_name] = self._opened.get(group.group_name, 0) + 1
        track.name = f"{group.group_name}/{number}"
        track.next_rank = dist.get_global_rank(group, (group.rank() + 1) % group.size())
        self._tracks.add(track)

    def explain_failures(self, error: BaseException) -> None:
        """Name the error that caused the failures which have no explanation yet."""
        for name, (count, what) in self._failures.items():
            if not what.endswith(")"):
                self._failures[name] = count, f"{what} ({cut(repr(error), _QUOTED)})"

    def reason(self, error: RuntimeError) -> object:
        """Return why a wait has ended in a torch error, which names only a socket, if the reason is known."""
        why = PLACE.given_up
        with contextlib.suppress(Exception):  # the store is gone, too
            if not why and self._is_in_its_world:
                is_closed = _CLOSED.search(str(error)) is not None
                why = self._other_way(0.0 if is_closed else _SOON) or self._failure()
                why = why or torch_private.default_store().get(_GIVEN_UP).decode() or progress.ended()
        if not why and _CLOSED.search(str(error)):
            other = f"rank {1 - dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() == 2 else "a rank"
            why = f"{other} has ended, or left its process group, while this one waits for it"
        return why or error

    def waiting_for_all(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Watch a wait of this process in the default group. Raises as `waiting_in`."""
        return self.waiting_in([] if dist.group.WORLD is None else [dist.group.WORLD], what)

    @contextlib.contextmanager
    def waiting_in(self, groups: Sequence[dist.ProcessGroup], what: str, *, in_step: bool = False) -> Iterator[None]:
        """Watch a wait of this process in these groups, which are of no use any more once it is given up.

        Args:
            groups: all of them.
            what: see `Whereabouts.waiting`.
            in_step: see there.

        Raises:
            CommunicationError: As `explaining`.
        """
        around = self._joined
        if threading.current_thread() is threading.main_thread():  # only the main thread's wait is watched
            self._joined = list(groups)
        try:
            with PLACE.waiting(what, in_step=in_step), self.explaining(what, groups, in_step=in_step):
                yield
        finally:
            if threading.current_thread() is threading.main_thread():
                self._joined = around

    @contextlib.contextmanager
    def explaining(
        self, what: str, groups: Iterable[dist.ProcessGroup] = (), *, in_step: bool = False
    ) -> Iterator[None]:
        """Explain torch's errors about ranks that do not come, and tell the other ranks of the groups.

        Raises:
            CommunicationError: Another rank has failed, has ended or does not come.
        """
        try:
            yield
        except RuntimeError as error:
            for group in self.groups.intersection(groups):
                self.note_failure(group, what)
            self.explain_failures(error)
            if isinstance(error, FullshardError | torch.OutOfMemoryError):
                raise
            rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
            step = f" (step {PLACE.step} of this process)" if in_step and PLACE.step else ""
            raise CommunicationError(
                f"{rank}{what}: {self.reason(error)}{step}",
                hint="see whether another rank failed first, or does not come here",
            ) from error

    @property
    def limit(self) -> float:
        """Seconds that the wait which is under way may take."""
        return self._asked or seconds_to_wait(0 if PLACE.is_patient else PLACE.step - 1, PLACE.slowest)

    @property
    def _is_in_its_world(self) -> bool:
        """Return whether the default group is the watched one, without keeping that group alive."""
        return self._world is not None and self._world() is dist.group.WORLD is not None

    def _run(self) -> None:
        """Run the thread's loop. It leaves signals to other threads: the launcher's asks what the main one does."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._is_over.wait(_pause(stall_seconds(limit := self.limit))):
            with contextlib.suppress(Exception):  # a group or store that is just going: the waiting thread notices that
                if self._is_in_its_world:
                    self._look(limit, time.monotonic())
        with contextlib.suppress(Exception):  # it is gone, or the store is
            if self._is_in_its_world:
                self._tell(WORD, json.dumps({"what": PLACE.what, "step": PLACE.step, "has_ended": True}))

    def _look(self, limit: float, now: float) -> None:
        stall = stall_seconds(limit)
        self._tell(_FAILED, json.dumps(dict(self._failures)))  # before others look for it
        if count := self._untold:
            self._untold -= count
            torch_private.default_store().add(_FAILURES, count)
        if self._moves != PLACE.moves:
            if self._beat:
                self._tell(WORD, "{}")
            self._moves, self._since, self._next_line, self._beat = PLACE.moves, now, stall / 2, 0
            return
        idle = now - self._since
        is_long = PLACE.is_waiting and idle >= min(_SOON, stall / 3)
        if is_long and (why := self._other_way()) and self._moves == PLACE.moves:
            self._end_waits(why)
            return
        is_in_vain = is_long and bool(self._failure())
        if idle < stall / 3 and not is_in_vain:
            return
        own = self._leave_word()
        reading = 2.5 * _pause(stall)  # so long before the end, or it would come as much later
        if is_in_vain:
            why = self._failure(self._words(reading))
            if why and self._moves == PLACE.moves:
                self._end_waits(why)
                return
        if not PLACE.is_waiting or idle < min(self._next_line, limit - reading):
            return
        words = self._words(reading)
        if self._moves != PLACE.moves:
            return  # a rank has come meanwhile
        if why := progress.parted({dist.get_rank(): own, **words}):
            if all(word["is_alive"] for word in words.values()):
                self._end_waits(why)
                return
            if idle < limit - reading:
                return  # on a busy machine a rank says rarely that it is still there: look again
        self._next_line = 2 * max(idle, stall / 2)
        if self._asked is None and words and all(progress.waits(word) for word in words.values()):
            limit = min(limit, seconds_to_wait(1, PLACE.slowest))  # none loads, compiles or saves
        if idle >= limit - reading:
            self._give_up(limit, words)
        elif idle < stall:
            return
        elif not any(word.get("is_waiting") for rank, word in words.items() if rank < dist.get_rank()):
            self._say(f"has waited {idle:.0f} s", words)

    def _leave_word(self) -> Word:
        here, busy = list[str](), ""
        frame: FrameType | None = sys._current_frames().get(self._trainer or 0)
        collective, groups = (
            progress.collective(frame),
            [] if PLACE.is_waiting and not PLACE.is_patient else self._joined,
        )
        if collective and frame is not None and not PLACE.is_waiting:
            group = frame.f_locals.get("group") or dist.group.WORLD  # torch has one name for it everywhere
            groups = [group] if isinstance(group, dist.ProcessGroup) else []
        while frame is not None and not PLACE.is_waiting:
            file = frame.f_code.co_filename
            busy = next((what for what, files in _BUSY.items() if any(name in file for name in files)), busy)
            if len(here) < _FRAMES and not any(name in file for name in _LIBRARIES):
                here.append(f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        self._beat += 1
        word = {"what": PLACE.what, "step": PLACE.step, "is_waiting": PLACE.is_waiting, "here": here, "busy": busy}
        word |= {"collective": "" if busy else collective, "beat": self._beat}
        word["is_for_all"] = any(group.size() == dist.get_world_size() for group in groups)
        word["come_to"] = {track.name: track.told()[0] for track in list(self._tracks)}
        self._tell(WORD, json.dumps(word))
        return word

    def _words(self, seconds: float) -> dict[int, Word]:
        """Return the words that other ranks have left, by rank. `is_alive`: left again some seconds later."""
        try:
            before = progress.read_words(dist.get_rank())
            self._is_over.wait(seconds / 2)
            self._leave_word()  # others may look at the same moments, and would take this rank for dead each time
            self._is_over.wait(seconds / 2)
            now = progress.read_words(dist.get_rank())
        except RuntimeError:  # the store is gone: its rank has ended
            return {}
        return {
            rank: word | {"is_alive": word.get("beat") != before.get(rank, {}).get("beat") or not word}
            for rank, word in now.items()
        }

    def _give_up(self, limit: float, words: dict[int, Word]) -> None:
        is_late = time.monotonic() - self._since >= FIRST_SECONDS
        if self._asked is None and not is_late and progress.are_busy(progress.missing(words)):
            return
        self._end_waits(f"no answer from another rank for {limit:g} s: {progress.named(words)}")

    def _end_waits(self, why: str) -> None:
        PLACE.given_up = why
        with contextlib.suppress(RuntimeError):  # the store is gone: its rank has ended
            torch_private.default_store().set(_GIVEN_UP, f"rank {dist.get_rank()} has given up: {why}")
        for group in [*self.groups, *self._joined]:
            end_waits(group)

    def _tell(self, key: str, text: str) -> None:
        """Leave it in the store for others, unless it is there."""
        if self._told.get(key) != text:
            torch_private.default_store().set(key.format(dist.get_rank()), text)
            self._told[key] = text

    def _other_way(self, seconds: float = 0.0) -> str:
        """Return where the next rank of a group has gone another way than this one, if both have told their logs.

        Args:
            seconds: to look again and again: a rank tells its log when it has waited for long, or has had an error.
        """
        until, tracks = time.monotonic() + seconds, list(self._tracks)
        ranks = sorted({track.next_rank for track in tracks})
        while tracks:
            self._tell(_TRACKS, json.dumps({track.name: track.told() for track in tracks}))
            theirs = dict(zip(ranks, progress.read([_TRACKS.format(rank) for rank in ranks]), strict=True))
            found = (track.difference(*theirs[track.next_rank].get(track.name, (0, ()))) for track in tracks)
            if (why := next(filter(None, found), "")) or time.monotonic() >= until:
                return why
            time.sleep(_SOON / 10)
        return ""

    def _failure(self, words: dict[int, Word] | None = None) -> str:
        """Return which rank has had an error that others of a group did not have; empty if all had the same.

        Args:
            words: of the other ranks. Those that had fewer errors must all wait: one that has not come so far may have
                the same error later. None: they are not looked at.
        """
        own, total = dist.get_rank(), int(torch_private.default_store().get(_FAILURES))
        if total and (total != self._found[0] or words is not None):  # the explanation of a failure may have come later
            ranks = sorted({rank for group in self.groups for rank in dist.get_process_group_ranks(group)})
            self._found = total, dict(zip(ranks, progress.read([_FAILED.format(rank) for rank in ranks]), strict=True))
        for group in list(self.groups) if total else []:
            name, had = self._name(group), dict[int, tuple[int, str]]()
            for rank in dist.get_process_group_ranks(group):
                had[rank] = self._found[1].get(rank, {}).get(name, (0, ""))
            had[own] = self._failures.get(name, (0, ""))
            fewest, most = min(had, key=lambda rank: had[rank][0]), max(had, key=lambda rank: had[rank][0])
            behind = [rank for rank, (count, _) in had.items() if rank != own and count == had[fewest][0]]
            are_stuck = words is None or all(words.get(rank, {}).get("is_waiting") for rank in behind)
            if had[fewest][0] < had[most][0] and are_stuck:
                what = had[most][1]
                return f"rank {most} had an error in {what} that rank {fewest} did not have: they are out of step"
        return ""

    def _say(self, how: str, words: dict[int, Word]) -> None:
        if progress.are_busy(progress.missing(words)):
            return
        step = f" (step {PLACE.step} of this process)" if PLACE.step else ""
        sys.stderr.write(f"fullshard: rank {dist.get_rank()} {how}, in {PLACE.what}{step}: {progress.named(words)}\n")
        sys.stderr.flush()


def all_come(where: str, seconds: float) -> bool:
    """Return whether all ranks of the job come to a place in time. A rank alone there goes on, unlike in a collective.

    Args:
        where: the place's name. Ranks come there equally often, but for those that were alone.
        seconds: to wait.
    """
    number = _COME.get(where, 0)
    key, store, size = f"fullshard/come/{where}/{number}", torch_private.default_store(), dist.get_world_size()
    come, until = store.add(key, 1), time.monotonic() + seconds
    try:
        while come < size and time.monotonic() < until:
            time.sleep(0.02)
            come = store.add(key, 0)
    finally:  # a rank that is interrupted has not come, either
        if come < size:
            come = store.add(key, -1) + 1
            if come == size:  # the last one has come at this very moment
                store.add(key, 1)
        if come == size:
            _COME[where] = number + 1
    return come == size


_COME: dict[str, int] = {}
"""How often all ranks have come to a place."""


def all_reduce(
    tensor: torch.Tensor, what: str, groups: Iterable[dist.ProcessGroup], op: Any = dist.ReduceOp.SUM
) -> None:
    """Combine a tensor, in place, over the ranks of each of these groups. A collective of the current step.

    Args:
        tensor: of which each rank has its own.
        what: its purpose in words, for ranks that ask what this rank waits for.
        groups: one after the other.
        op: how elements are combined.

    Raises:
        CommunicationError: Another rank has failed, has ended or does not come.
    """
    groups = list(groups)
    with STALLS.waiting_in(groups, what, in_step=True):
        for group in groups:
            torch_private.count_for_debugging("c10d_functional.all_reduce")  # as where a DTensor's partial sum is read
            with torch_private.uncounted():
                dist.all_reduce(tensor, op=op, group=group)


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group are here. What follows could neither be ended, nor name a rank that did not come.

    It uses a message from host to host, if the group sends such. An accelerator's collectives either let no host wait,
    and it then waits where it reads a number, or, as NCCL's barrier, wait until NCCL ends the process.

    Args:
        group: whose ranks meet.
        device: where they go on. Messages between CPUs are watched as they are.
        what: as in `Stalls.waiting_in`.

    Raises:
        CommunicationError: As in `Stalls.waiting_in`.
    """
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), STALLS.waiting_in([group], what):
            dist.all_reduce(torch.zeros(1, device=host), group=group)


def _pause(stall: float) -> float:
    """Return the seconds between two looks."""
    return min(0.5, stall / _LOOKS)


def _asked_seconds(group: float, device: torch.device) -> float | None:
    """Return the time-out set in fullshard, in the environment or for the default group; None if none was set."""
    default = _NCCL_SECONDS if device.type == "cuda" else dist.default_pg_timeout.total_seconds()
    return PATIENCE.asked or timeout_of_environment() or (None if group in (default, FIRST_SECONDS) else group)


_NCCL_SECONDS = 600.0
"""Torch's default for it; else it is `default_pg_timeout`."""
STALLS = Stalls()
"""The stall detection of this process."""
