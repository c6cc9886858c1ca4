"""Copies of the training state in host memory, which outlive the processes: after a kill nothing is read from a disk.

    training       ... step | collect, copy weights | step ...                                        | step ...
    background              |                       | write to this host's memory, send to the partner, seal   |

A copy is a checkpoint whose files are spread over the memory of all hosts: each rank's are on its own and on the next
one (`partners`). It counts when all of that is done everywhere; the one before goes only then. So there is always a
whole one, and when one host is lost all files of it are on the others. A load agrees on the newest whose files are all
there, proves them, brings each host what its ranks will read, and is an ordinary load from then on, at any number of
ranks.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.collect import LoadArguments, RankReport, RankWriter, SaveArguments
from fullshard.checkpoint.format import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    read_manifest_bytes,
)
from fullshard.checkpoint.load import load_proved
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.optimizer_state import unwrapped
from fullshard.checkpoint.partners import HostGrid, transfers
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Destination, Pending
from fullshard.checkpoint.storage import write_file
from fullshard.checkpoint.tensor_file import Bytes
from fullshard.checkpoint.verify import problems_of_file
from fullshard.config.schema import COPIES_COST
from fullshard.config.switches import MAX_LOST_STEPS
from fullshard.core.errors import CheckpointError, ConfigError, DamagedError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.sizes import format_nbytes
from fullshard.features.auto_reshard.rule import available_host_memory
from fullshard.launch.copies import find_copies_directory
from fullshard.launch.environment import may_be_started_again, read_rank_environment


class MemoryCopies:
    """Copies of the training state in the memory of this host and of the next one, made while training goes on.

    Every rank has one and calls the same methods in the same order.

        with MemoryCopies(max_lost_steps=10) as copies:
            extra = copies.load(model=model, optimizer=optimizer)
            for step in range(extra["step"] if extra else 0, steps):
                ...
                optimizer.step()
                copies.after_step(step + 1, model=model, optimizer=optimizer)

    Args:
        max_lost_steps: how many steps a kill may undo at most; a copy is begun twice as often. 0: as few as copies
            allow that cost at most 3 % of the time of a step. None: what the launcher was told, else 0.
        say: told on rank 0 what copies cost, and which were passed over; by default it prints to standard error.

    Raises:
        ConfigError: fullshard's launcher has not started this process, or will not start it again.
    """

    def __init__(self, max_lost_steps: int | None = None, *, say: Callable[[str], None] | None = None) -> None:
        if max_lost_steps is None:
            max_lost_steps = int(MAX_LOST_STEPS.read() or 0)
        if max_lost_steps < 0:
            raise ConfigError(f"max_lost_steps = {max_lost_steps}", hint="use 1 or more, or 0 for as few as are cheap")
        self.directory = find_copies_directory()
        if not may_be_started_again():
            raise ConfigError(
                f"max_lost_steps = {max_lost_steps}, and nothing starts the processes again: copies would be of no use",
                hint="add --max_restarts N, or --nnodes MIN:MAX",
            )
        environment = read_rank_environment()
        self._hosts = HostGrid(environment.rank, environment.world_size, environment.local_world_size)
        self._say = say or _print
        self._asked, self._interval = max_lost_steps, max(1, max_lost_steps // 2)
        self._saver = AsyncSaver()
        self._ranks: Ranks | None = None
        self._pending: PendingCopy | None = None
        self._copied: int | None = None  # the step whose copy counts
        self._due: float = 0
        self._said = 0
        self._seconds: list[float] = []
        self._ended: float | None = None

    @property
    def max_lost_steps(self) -> int:
        """Return how many steps a kill undoes at most; where it was left open, as the last copy's cost has it."""
        return self._asked or 2 * self._interval

    def after_step(self, step: int, **arguments: Unpack[SaveArguments]) -> None:
        """Begin a copy if one is due, and see to it that no more steps can be lost than allowed. A collective.

        Args:
            step: of the run, the one that is done; goes into `extra`.
            arguments: those of `save_checkpoint`, but for `total_limit` and `overwrite`.

        Raises:
            CheckpointError: on every rank, if a copy could not be made: there is too little memory, say.
        """
        now = time.perf_counter()
        if self._ended is not None:
            self._seconds.append(now - self._ended)
        if self._copied is None:
            self._copied = step - 1
        if self._saver.check() is not None:
            self._count()
        if step >= self._due:
            self._begin(step, arguments)
        if self._asked and self._saver.is_saving and step - self._copied >= self._asked:
            self._wait()
        self._ended = time.perf_counter()

    def go_on_from(self, step: int) -> None:
        """Begin at a step, or go back to it: forget the copies of later steps."""
        self._wait()
        self._copied, self._due, self._ended = step, step + 1, None

    def load(self, *, newer_than: float = 0.0, **parts: Unpack[LoadArguments]) -> dict[str, Any] | None:
        """Load the newest copy whose files are all there, if there is one. A collective.

        Args:
            newer_than: `saved_at` of a checkpoint; copies from before it are left alone. Rank 0's counts.
            parts: as for `load_checkpoint`.

        Returns:
            The `extra` of `after_step`, with `step`; None if there is no copy.

        Raises:
            CheckpointError: the newest whole copy does not fit the model.
        """
        ranks = self._ranks = self._ranks or Ranks.of(parts["model"]).apart()
        found, loaded, began = None, "", time.perf_counter()
        newer_than = ranks.broadcast(newer_than)
        for name, data in _offered(self.directory, ranks, newer_than):
            copy = _Copy(self.directory / name, data, ranks, self._hosts)
            if lacking := copy.lacking():
                self._tell(f"the copy {name} in host memory is passed over: {lacking}")
                continue
            try:
                found, loaded = load_proved(copy.directory, data, ranks, copy.bring, parts), name
            except DamagedError as error:
                self._tell(f"the copy {name} in host memory is passed over, because it is damaged: {error}")
                continue
            self._tell(f"copies in host memory: found, proved and loaded in {time.perf_counter() - began:.2f} s")
            self.go_on_from(int(found["step"]))
            break
        if self._hosts.local_rank == 0:
            _remove_others(self.directory / (loaded or "none"))
        return found

    def close(self) -> None:
        """Wait for the copy under way."""
        self._saver.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.__exit__(kind, error, trace)

    def _begin(self, step: int, arguments: SaveArguments) -> None:
        self._wait()
        begin = time.perf_counter()
        self._saver.make_room()
        arguments["extra"] = {**(arguments.get("extra") or {}), "step": step}
        arguments["optimizer"] = unwrapped(arguments.get("optimizer"))
        destination = Destination.of(arguments["model"], self.directory / f"step-{step:06d}")
        ranks, save_id = destination.ranks, destination.save_id
        directory = self.directory / f"step-{step:06d}-{save_id}"
        writer = ranks.together(
            "collecting the state", lambda: RankWriter(directory, save_id, self._hosts.rank, arguments)
        )
        sizes = ranks.everywhere(writer.nbytes)
        cost = _Cost(sum(sizes[rank] for rank in self._hosts.kept_by(self._hosts.host_of(self._hosts.rank))))
        ranks.together("making room for a copy in host memory", lambda: self._make_room(directory, cost.nbytes))
        ranks.together("copying the state to host memory", lambda: writer.stage(self._saver.memory))
        destination = Destination(ranks, directory, save_id)
        self._pending = PendingCopy(destination, None, writer, self._hosts, cost, directory, step=step)
        self._saver.begin(self._pending)
        self._due = step + self._interval if self._asked else math.inf
        cost.seconds += time.perf_counter() - begin

    def _make_room(self, directory: Path, nbytes: int) -> None:
        """Make the directory of this copy, of which this host has `nbytes` bytes.

        Raises:
            CheckpointError: there is less memory than it takes; for the first one, less than the next one takes, too.
        """
        needed = nbytes if self._said else 2 * nbytes
        free = min(shutil.disk_usage(self.directory).free, available_host_memory())
        if free < needed:
            raise CheckpointError(
                f"{self.directory.parent} and host memory have {format_nbytes(free)} left, and copies of the state "
                f"need {format_nbytes(needed)}",
                hint="give the container more shared memory, use fewer ranks per host, or leave max_lost_steps out",
            )
        directory.mkdir(exist_ok=True)

    def _wait(self) -> None:
        if self._saver.wait() is not None:
            self._count()

    def _count(self) -> None:
        """Count the copy under way: report its cost, and set when the next one is due if that is for us to decide."""
        pending, self._pending = self._pending, None
        assert pending is not None and pending.step is not None  # noqa: S101 -- begun together
        ranks, self._copied = pending.destination.ranks, pending.step
        step_seconds = median(self._seconds) if self._seconds else 0.0
        self._seconds.clear()
        costs = ranks.everywhere([pending.cost.nbytes, pending.cost.seconds, step_seconds])
        nbytes, seconds, step_seconds = map(max, zip(*costs, strict=True))
        if not self._asked:
            self._interval = max(1, math.ceil(seconds / (COPIES_COST * step_seconds))) if step_seconds else 1
            self._due = pending.step + self._interval
        if not self._said or not self._said / 2 <= self._interval <= self._said * 2:
            self._said = self._interval
            part = seconds / (self._interval * step_seconds) if step_seconds else 0.0
            if self._hosts.rank == 0:
                JOURNAL.note(
                    Happening.COPY, step=self._copied, nbytes=nbytes, seconds=round(seconds, 3), every=self._interval,
                    max_lost_steps=self.max_lost_steps,
                )  # fmt: skip
            self._tell(
                f"copies in host memory: {format_nbytes(nbytes)} per host, every {_steps(self._interval)}; each takes "
                f"{seconds:.2f} s, {part:.1%} of the steps between; a kill undoes {_steps(self.max_lost_steps)} at most"
            )

    def _tell(self, line: str) -> None:
        if self._hosts.rank == 0:
            self._say(line)


@dataclass(slots=True)
class _Cost:
    """The cost of one copy: bytes in the memory of this host, and seconds that training may have missed."""

    nbytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PendingCopy(Pending):
    """A copy whose state is collected."""

    writer: RankWriter
    hosts: HostGrid
    cost: _Cost
    directory: Path

    def complete(self, ranks: Ranks) -> Location:
        """See `Pending`."""
        ranks.together("sealing a copy in host memory", self._write(ranks))
        if self.hosts.local_rank == 0:
            _remove_others(self.directory)
        return self.directory

    def _write(self, ranks: Ranks) -> Callable[[], None]:
        began = time.thread_time()
        report = ranks.together("writing a copy to host memory", self.writer.write)
        reports = ranks.gather(report.model_dump(mode="json"))
        written = ranks.on_rank_0("describing a copy in host memory", lambda: self._manifest(reports))
        data = ranks.broadcast_bytes(written or b"")
        sizes = ranks.everywhere({name: record.nbytes for name, record in report.files.items()})
        if self.writer.device.type == "cpu":  # where the training computes; accelerators do not miss what this took
            self.cost.seconds += time.thread_time() - began
        began_to_send = time.perf_counter()
        self._send_to_partner(ranks, sizes)
        self.cost.seconds += time.perf_counter() - began_to_send
        return lambda: _seal(self.directory, data, self.hosts)

    def _manifest(self, reports: Sequence[Any]) -> bytes:
        found = [RankReport.model_validate(report) for report in reports]
        return encode_manifest(self.writer.manifest(found, is_shared=False))

    def _send_to_partner(self, ranks: Ranks, sizes: Sequence[Mapping[str, int]]) -> None:
        hosts, directory = self.hosts, self.directory
        if (partner := hosts.partner_of(hosts.rank)) is None:
            return
        giver = (hosts.rank - hosts.per_host) % hosts.world_size
        received = ranks.together(
            "making room for a partner's copy",
            lambda: [(giver, _new_file(directory / name, nbytes)) for name, nbytes in sorted(sizes[giver].items())],
        )
        ranks.exchange([(partner, _file(directory / name)) for name in sorted(sizes[hosts.rank])], received)


class _Copy:
    """A copy that may be loaded. Every method is a collective; messages lie in host memory."""

    def __init__(self, directory: Path, data: bytes, ranks: Ranks, hosts: HostGrid) -> None:
        self.directory, self._data, self._ranks, self._hosts = directory, data, ranks, hosts
        self._manifest = decode_manifest(data, where=str(directory / MANIFEST_NAME))
        self._held: dict[str, list[int]] = {}

    def lacking(self) -> str:
        """Verify all files on any host, and name those that no host has whole; an empty text if there are none."""
        hosts, problems = self._hosts, list[str]()
        whole = []
        for name in sorted(self._manifest.files)[hosts.local_rank :: hosts.per_host]:
            if (self.directory / name).is_file():
                found = problems_of_file(self.directory / name, self._manifest)
                problems += found
                whole += [] if found else [name]
        reports = self._ranks.everywhere([whole, problems[:1]])
        for rank, (names, _) in enumerate(reports):
            for name in names:
                self._held.setdefault(name, []).append(hosts.host_of(rank))
        damaged = [problem for _, found in reports for problem in found]
        missing = sorted(self._manifest.files.keys() - self._held.keys())
        if not missing:
            return ""
        return f"{missing[0]} ({len(missing)} in all) is whole on no host" + "".join(
            f"; {text}" for text in damaged[:1]
        )

    def bring(self, manifest: Manifest, kinds: Sequence[str], files: Set[str]) -> None:
        """Bring the files that its ranks will read to this host, whole."""
        ranks, rank = self._ranks, self._hosts.rank
        found = transfers(ranks.everywhere(sorted(files)), self._held, self._hosts)
        sizes = {name: record.nbytes for name, record in manifest.files.items()}

        def make() -> list[tuple[int, Bytes]]:
            self.directory.mkdir(exist_ok=True)
            return [
                (one.sender, _new_file(self._arriving(one.name), sizes[one.name]))
                for one in found
                if one.receiver == rank
            ]

        received = ranks.together("making room for copies from other hosts", make)
        sent = [(one.receiver, _file(self.directory / one.name)) for one in found if one.sender == rank]
        ranks.exchange(sent, received)

        def prove() -> None:
            for one in found:
                if one.receiver == rank:
                    self._arriving(one.name).replace(self.directory / one.name)  # maybe of a damaged one
                    if problems := problems_of_file(self.directory / one.name, manifest):
                        raise DamagedError(problems[0])
            _seal(self.directory, self._data, self._hosts)

        ranks.together("proving copies from other hosts", prove, kind=DamagedError)

    def _arriving(self, name: str) -> Path:
        return self.directory / f"{name}.arriving"


def _offered(directory: Path, ranks: Ranks, newer_than: float) -> Iterator[tuple[str, bytes]]:
    """Return names and manifests of copies that any host has sealed after a time, the newest first. A collective."""
    mine: dict[str, float] = {}
    for path in sorted(directory.glob("step-*")):
        try:
            mine[path.name] = read_manifest(path).saved_at
        except CheckpointError:
            continue  # never sealed here, or damaged; another host has a manifest if it counts
    everywhere = ranks.everywhere(mine)
    found = {name: saved_at for names in everywhere for name, saved_at in names.items() if saved_at > newer_than}
    for name in sorted(found, key=lambda name: found[name], reverse=True):
        holder = next(rank for rank, names in enumerate(everywhere) if name in names)
        texts = ranks.gather(read_manifest_bytes(directory / name).decode() if ranks.rank == holder else None)
        yield name, ranks.broadcast_bytes(texts[holder].encode() if texts else b"")


def _seal(directory: Path, data: bytes, hosts: HostGrid) -> None:
    """Make a copy count on this host."""
    if hosts.local_rank == 0:
        write_file(directory / MANIFEST_NAME, data)


def _file(path: Path) -> Bytes:
    """Return the bytes of a file, in place."""
    return np.memmap(path, dtype=np.uint8, mode="r+")


def _new_file(path: Path, nbytes: int) -> Bytes:
    """Return the bytes of a new file. Takes its memory at once, so that a lack is an error here and no signal later.

    Raises:
        CheckpointError: there is no room.
    """
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} has no room for {format_nbytes(nbytes)} more: {error.strerror}"
        ) from error
    return _file(path)


def _remove_others(kept: Path) -> None:
    for path in kept.parent.iterdir():
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _print(line: str) -> None:
    sys.stderr.write(f"fullshard: {line}\n")
    sys.stderr.flush()
