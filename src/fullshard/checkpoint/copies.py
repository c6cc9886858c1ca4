"""Keep copies of the training state in host memory, so that a restart after a killed process does not read from disk.

    training       ... step | collect, copy weights | step ...                                        | step ...
    background              |                       | write to this host's memory, send to the partner, seal   |

A copy is a checkpoint whose files are spread over the memory of all hosts: each rank's files are on its own host and on
the next one. A copy is valid once every host has its files, and only then is the previous copy removed. There is
therefore always one complete copy, and if one host is lost, the others still have all of its files. In a load, the
ranks agree on the newest complete copy and verify it, and each host receives the files that its ranks will read.
"""

import functools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fullshard.checkpoint.background import AsyncSaver
from fullshard.checkpoint.collect import LoadArguments, RankWriter, SaveArguments
from fullshard.checkpoint.format import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    read_manifest_bytes,
)
from fullshard.checkpoint.load import load_proved
from fullshard.checkpoint.optimizer_state import unwrapped
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Destination
from fullshard.checkpoint.storage import write_file
from fullshard.checkpoint.store import Store
from fullshard.checkpoint.tensor_file import Bytes
from fullshard.checkpoint.verify import problems_of_file
from fullshard.config.switches import MAX_LOST_STEPS
from fullshard.core.errors import CheckpointError, ConfigError, DamagedError, plural, tell
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.sizes import format_nbytes
from fullshard.features.auto_reshard import available_host_memory
from fullshard.launch.copies import find_copies_directory
from fullshard.launch.environment import may_be_started_again, read_rank_environment


class MemoryCopies(AbstractContextManager["MemoryCopies"]):
    """Copies the training state in the background to the memory of this host and of the next one.

    Every rank creates a `MemoryCopies` and calls the same methods in the same order.

        with MemoryCopies(max_lost_steps=10) as copies:
            extra = copies.load(model=model, optimizer=optimizer)
            for step in range(extra["step"] if extra else 0, steps):
                ...
                optimizer.step()
                copies.after_step(step + 1, model=model, optimizer=optimizer)

    Args:
        max_lost_steps: the largest number of steps that may be lost if a process is killed. Copies are made twice as
            often. The default None means the value given to the launcher.
        say: called on rank 0 with messages about the size of copies and about skipped copies. The default prints them
            to standard error.

    Raises:
        ConfigError: fullshard's launcher did not start this process, or will not restart it.
    """

    def __init__(self, max_lost_steps: int | None = None, *, say: Callable[[str], None] | None = None) -> None:
        self.max_lost_steps = int(MAX_LOST_STEPS.read() or 0) if max_lost_steps is None else max_lost_steps
        if self.max_lost_steps < 1:
            raise ConfigError(
                f"max_lost_steps is {self.max_lost_steps}, but it must be at least 1", hint="use 1 or more"
            )
        self.directory = find_copies_directory()
        if not may_be_started_again():
            raise ConfigError(
                f"max_lost_steps is {self.max_lost_steps}, but the launcher will not restart the processes",
                hint="pass --max_restarts N or --nnodes MIN:MAX to the launcher",
            )
        environment = read_rank_environment()
        self._hosts = HostGrid(environment.rank, environment.world_size, environment.local_world_size)
        self._say = say or (lambda line: tell(f"fullshard: {line}"))
        self._saver = AsyncSaver()
        self._saver.title = "the next copy in host memory"
        self._ranks: Ranks | None = None
        self._begun = self._due = 0
        self._copied: int | None = None  # the step of the latest complete copy

    def after_step(self, step: int, **arguments: Unpack[SaveArguments]) -> None:
        """Start a copy if one is due. All ranks must call this.

        If more than `max_lost_steps` steps could be lost otherwise, wait until the running copy is complete.

        Args:
            step: the number of the step that has just ended; stored in `extra`.
            arguments: the arguments of `save_checkpoint`, except `total_limit` and `overwrite`.

        Raises:
            CheckpointError: a copy could not be made, for example because there is not enough memory. Every rank raises
                it.
        """
        if self._copied is None:
            self._copied = step - 1
        if self._saver.check() is not None:
            self._copied = self._begun
        if step >= self._due:
            self._begin(step, arguments)
        if step - self._copied >= self.max_lost_steps:
            self._wait()

    def load(self, *, newer_than: float = 0.0, **parts: Unpack[LoadArguments]) -> dict[str, Any] | None:
        """Load the newest complete copy, if there is one. All ranks must call this.

        Args:
            newer_than: the `saved_at` of a checkpoint; older copies are ignored. The value on rank 0 is used.
            parts: the objects to load, as for `load_checkpoint`.

        Returns:
            The `extra` of `after_step`, including `step`; None if there is no copy.

        Raises:
            CheckpointError: the newest complete copy does not match the model.
        """
        ranks = self._ranks = self._ranks or Ranks.of(parts["model"]).apart()
        found, loaded, began = None, "none", time.perf_counter()
        for name, data in _offered(self.directory, ranks, ranks.broadcast(newer_than)):
            try:
                found, loaded = _load_from(self.directory / name, data, ranks, self._hosts, parts), name
            except DamagedError as error:
                self._tell(f"skipping the copy {name} in host memory: {error}")
                continue
            step, seconds = int(name.split("-")[1]), time.perf_counter() - began
            self._tell(f"copies in host memory: step {step} found, verified and loaded in {seconds:.2f} s")
            self._copied = int(found["step"])
            self._due = self._copied + 1
            break
        if self._hosts.local_rank == 0:
            _remove_others(self.directory / loaded)
        return found

    def close(self) -> None:
        """Wait until a running copy has finished."""
        self._saver.wait()

    def __exit__(self, *error: Any) -> None:
        self._saver.__exit__(*error)

    def _begin(self, step: int, arguments: SaveArguments) -> None:
        self._wait()
        self._saver.make_room()
        arguments["extra"] = {**(arguments.get("extra") or {}), "step": step}
        arguments["optimizer"] = unwrapped(arguments.get("optimizer"))
        destination = Destination.of(arguments["model"], self.directory / f"step-{step:06d}")
        ranks, hosts, save_id = destination.ranks, self._hosts, destination.store.save_id
        directory = self.directory / f"step-{step:06d}-{save_id}"
        store = Store(directory, save_id)
        store.directory = directory  # files are written in place, and are valid once all hosts have the manifest
        writer = ranks.together("collecting the state", lambda: RankWriter(store, hosts.rank, arguments))
        sizes = ranks.everywhere(writer.nbytes)
        nbytes = sum(sizes[rank] for rank in hosts.kept_by(hosts.host_of(hosts.rank)))
        ranks.together("making room for a copy in host memory", lambda: self._make_room(directory, nbytes))
        ranks.together("copying the state to host memory", lambda: writer.stage(self._saver.memory))
        self._saver.begin(Destination(ranks, store), functools.partial(_complete, writer, hosts))
        if not self._begun and hosts.rank == 0:
            most = self.max_lost_steps
            JOURNAL.note(Happening.COPY, step=step, nbytes=nbytes, max_lost_steps=most)
            size, steps = format_nbytes(nbytes), plural(most, "step")
            self._say(f"copies in host memory: {size} per host; a kill undoes at most {steps}")
        self._begun, self._due = step, step + max(1, self.max_lost_steps // 2)

    def _make_room(self, directory: Path, nbytes: int) -> None:
        """Create the directory for a copy. Raise `CheckpointError` if there is not enough memory."""
        needed = nbytes if self._begun else 2 * nbytes  # the first copy also needs memory for the next one
        free = min(shutil.disk_usage(self.directory).free, available_host_memory())
        if free < needed:
            raise CheckpointError(
                f"{self.directory.parent} and host memory have {format_nbytes(free)} left, but copies of the state "
                f"need {format_nbytes(needed)}",
                hint="increase the container's shared memory, use fewer ranks per host, or omit max_lost_steps",
            )
        directory.mkdir(exist_ok=True)

    def _wait(self) -> None:
        if self._saver.wait() is not None:
            self._copied = self._begun

    def _tell(self, line: str) -> None:
        if self._hosts.rank == 0:
            self._say(line)


@dataclass(frozen=True, slots=True)
class HostGrid:
    """The hosts that the ranks run on, as seen from one rank. Each host has `per_host` consecutive ranks.

    host 0    ranks 0, 1    own files, and those of ranks 4, 5
    host 1    ranks 2, 3    own files, and those of ranks 0, 1
    host 2    ranks 4, 5    own files, and those of ranks 2, 3
    """

    rank: int
    world_size: int
    per_host: int

    @property
    def local_rank(self) -> int:
        """Return the number of this rank among the ranks on its host."""
        return self.rank % self.per_host

    def host_of(self, rank: int) -> int:
        """Return the number of the host that a rank runs on."""
        return rank // self.per_host

    def partner_of(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps a copy of this rank's files. Return None for a single host."""
        return (rank + self.per_host) % self.world_size if self.world_size > self.per_host else None

    def kept_by(self, host: int) -> list[int]:
        """Return the ranks whose files are kept in the memory of a host."""
        own = range(host * self.per_host, (host + 1) * self.per_host)
        return [*own, *(rank for rank in range(self.world_size) if self.partner_of(rank) in own)]


def transfers(
    wanted: Sequence[Collection[str]], held: Mapping[str, Sequence[int]], hosts: HostGrid
) -> list[tuple[str, int, int]]:
    """Return (file, sender, receiver) for each file in `wanted`, by rank, that is not `held` on the rank's host."""
    found = []
    for host in range(hosts.world_size // hosts.per_host):
        first = host * hosts.per_host
        wants = set().union(*wanted[first : first + hosts.per_host])
        for number, name in enumerate(sorted(name for name in wants if host not in held[name])):
            # Divide the transfers among the hosts that have the file, and among the ranks of each host.
            there, local = held[name][host % len(held[name])], number % hosts.per_host
            found.append((name, there * hosts.per_host + local, first + local))
    return found


def _complete(writer: RankWriter, hosts: HostGrid, ranks: Ranks) -> None:
    """Write a copy, send it to the next host, and mark it as valid. All of `ranks` must call this."""
    directory = writer.store.final
    reports = writer.write_together(ranks, "writing a copy to host memory")

    def describe() -> bytes:
        return encode_manifest(writer.manifest(reports, is_shared=False))

    data = ranks.broadcast_bytes(ranks.on_rank_0("describing a copy in host memory", describe) or b"")
    _send_to_partner(directory, {name: file.nbytes for name, file in writer.files.items()}, hosts, ranks)
    ranks.together("sealing a copy in host memory", lambda: _seal(directory, data, hosts))
    if hosts.local_rank == 0:
        _remove_others(directory)


def _send_to_partner(directory: Path, own: Mapping[str, int], hosts: HostGrid, ranks: Ranks) -> None:
    sizes = ranks.everywhere(own)
    if (partner := hosts.partner_of(hosts.rank)) is None:
        return
    giver = (hosts.rank - hosts.per_host) % hosts.world_size
    received = ranks.together(
        "making room for a partner's copy",
        lambda: [(giver, _new_file(directory / name, nbytes)) for name, nbytes in sorted(sizes[giver].items())],
    )
    ranks.exchange([(partner, _file(directory / name)) for name in sorted(own)], received)


def _load_from(directory: Path, data: bytes, ranks: Ranks, hosts: HostGrid, parts: LoadArguments) -> dict[str, Any]:
    """Load a copy, and read each file from any host that has it undamaged. All ranks must call this."""
    manifest = decode_manifest(data, where=str(directory / MANIFEST_NAME))
    names = sorted(manifest.files)[hosts.local_rank :: hosts.per_host]
    found = {name: problems_of_file(directory / name, manifest) for name in names if (directory / name).is_file()}
    held: dict[str, list[int]] = {}
    damaged: list[str] = []
    for rank, problems in enumerate(ranks.everywhere(found)):
        for name, texts in problems.items():
            damaged += texts
            if not texts:
                held.setdefault(name, []).append(hosts.host_of(rank))
    if missing := sorted(manifest.files.keys() - held.keys()):
        raise DamagedError(
            "; ".join([f"no host has an intact copy of {missing[0]} (missing files: {len(missing)})", *damaged[:1]])
        )

    def bring(manifest: Manifest, kinds: Sequence[str], files: Set[str]) -> None:
        moves = transfers(ranks.everywhere(sorted(files)), held, hosts)
        coming = {name: sender for name, sender, receiver in moves if receiver == hosts.rank}

        def make() -> list[tuple[int, Bytes]]:
            directory.mkdir(exist_ok=True)
            sizes = {name: manifest.files[name].nbytes for name in coming}
            return [(sender, _new_file(directory / f"{name}.arriving", sizes[name])) for name, sender in coming.items()]

        received = ranks.together("making room for copies from other hosts", make)
        ranks.exchange([(to, _file(directory / name)) for name, sender, to in moves if sender == hosts.rank], received)

        def prove() -> None:
            for name in coming:
                (directory / f"{name}.arriving").replace(directory / name)  # may replace a damaged file
                if problems := problems_of_file(directory / name, manifest):
                    raise DamagedError(problems[0])
            _seal(directory, data, hosts)

        ranks.together("verifying copies from other hosts", prove, kind=DamagedError)

    return load_proved(directory, data, ranks, bring, parts)


def _offered(directory: Path, ranks: Ranks, newer_than: float) -> Iterator[tuple[str, bytes]]:
    """Yield (name, manifest) of each copy that a host sealed after `newer_than`, newest first, on all ranks."""
    mine: dict[str, float] = {}
    for path in sorted(directory.glob("step-*")):
        try:
            mine[path.name] = read_manifest(path).saved_at
        except CheckpointError:
            continue  # not sealed here, or damaged; if the copy is valid, another host has its manifest
    everywhere = ranks.everywhere(mine)
    found = {name: saved_at for names in everywhere for name, saved_at in names.items() if saved_at > newer_than}
    for name in sorted(found, key=lambda name: found[name], reverse=True):
        holder = next(rank for rank, names in enumerate(everywhere) if name in names)
        texts = ranks.gather(read_manifest_bytes(directory / name).decode() if ranks.rank == holder else None)
        yield name, ranks.broadcast_bytes(texts[holder].encode() if texts else b"")


def _seal(directory: Path, data: bytes, hosts: HostGrid) -> None:
    """Mark a copy as valid on this host by writing its manifest. Only one rank per host does this."""
    if hosts.local_rank == 0:
        write_file(directory / MANIFEST_NAME, data)


def _file(path: Path) -> Bytes:
    """Map a file into memory and return its bytes."""
    return np.memmap(path, dtype=np.uint8, mode="r+")


def _new_file(path: Path, nbytes: int) -> Bytes:
    """Create a file and return its bytes, mapped into memory."""
    # Allocate now, so that too little memory raises an error here instead of ending the process with a signal later.
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} does not have room for another {format_nbytes(nbytes)}: {error.strerror}"
        ) from error
    return _file(path)


def _remove_others(kept: Path) -> None:
    for path in kept.parent.iterdir():
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)
