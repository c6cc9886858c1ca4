"""Save in the background: training waits for a copy into host memory, not for the disk.

    training       ... step | collect, copy the state | step ...                        | step ...
    background              |                         | write, fsync, agree, rename     |
                                                            all ranks learn of it here ^

What is written and how it is made to count is the code of `save`; only the thread is another one, and the process
group, so that its messages never mix with those of the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Self, Unpack

from fullshard.checkpoint.collect import SaveArguments
from fullshard.checkpoint.objects import Location, ObjectPath, at_exit
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Pending, prepare_save
from fullshard.checkpoint.staging import HostMemory
from fullshard.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_WRITING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class AsyncSaver:
    """Saves checkpoints while training goes on, one at a time: one that comes too early waits for the one before it.

    Every rank has one and calls the same methods in the same order. An error in the background is raised by the next
    `check`, `save` or `wait`; if none of them comes, the process ends with it and with exit code 1. A process that
    ends waits until its save is written.

        with AsyncSaver() as saver:
            for step, batch in enumerate(batches):
                saver.check()
                ...
                if step % 1000 == 0:
                    saver.save(f"out/step-{step}", model=model, optimizer=optimizer, total_limit=2)

    Attributes:
        memory: host memory of the copies, this rank's share of the checkpoint; kept from save to save.
    """

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._ranks: Ranks | None = None
        self._background: Ranks | None = None
        self._thread: threading.Thread | None = None
        self._path: Location | None = None
        self._error: BaseException | None = None

    @property
    def is_saving(self) -> bool:
        """Return whether a save has begun and this rank has not seen its end yet."""
        return self._thread is not None

    def save(self, path: str | Location, **arguments: Unpack[SaveArguments]) -> Location:
        """Copy the state and return; it is written meanwhile. Takes the arguments of `save_checkpoint`. A collective.

        Raises:
            CheckpointError: this save could not begin, or the one before it failed. Nothing was begun then.
        """
        self.make_room()
        pending = prepare_save(path, self.memory, **arguments)
        self.begin(pending)
        return pending.destination.final

    def make_room(self) -> None:
        """Wait for a save under way. A collective. Raises as `save` does."""
        self.wait()
        self.memory.reuse()

    def begin(self, pending: Pending) -> None:
        """Write what was prepared with `memory` after `make_room`. A collective."""
        self._ranks = pending.destination.ranks
        if self._background is None:
            self._background = self._ranks.apart()
        self._path, self._error = pending.destination.final, None
        self._thread = threading.Thread(target=self._write, args=(pending, self._background), name="fullshard-save")
        # Not a daemon: an interpreter that ends waits for it. Only then it looks for an unread error.
        atexit.register(self._report)
        _WRITING.add(self._thread)
        if isinstance(self._path, ObjectPath):
            at_exit(_wait_for_all)
        self._thread.start()

    def check(self) -> Location | None:
        """Check whether the save has ended on all ranks; call it once per step. A small collective during a save.

        Returns:
            The checkpoint, the first time it is known to be complete; else None.

        Raises:
            CheckpointError: on every rank at the same step, if the save failed.
        """
        if self._thread is None or self._ranks is None:
            return None
        return self.wait() if self._ranks.all(not self._thread.is_alive()) else None

    def wait(self) -> Location | None:
        """Wait for the save under way, if there is one. Returns its path. Raises as `check` does."""
        if self._thread is None:
            return None
        self._thread.join()
        path, error = self._path, self._error
        self._thread = self._error = None
        atexit.unregister(self._report)
        if error is not None:
            raise error
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:
                raise
            logger.exception("besides, the checkpoint %s was not saved", self._path)

    def _write(self, pending: Pending, ranks: Ranks) -> None:
        try:
            pending.complete(ranks)
        except BaseException as error:  # whatever it is, it belongs to the thread that asked for the save
            self._error = error

    def _report(self) -> None:
        """Report an unread error at the end of the process, which must not end in success then."""
        if self._error is None:
            return
        sys.stdout.flush()
        print(f"fullshard: the checkpoint {self._path} was not saved: {self._error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # an exception here would be printed, and the exit code be 0 nevertheless


def _wait_for_all() -> None:
    for thread in list(_WRITING):
        if thread.is_alive():
            thread.join()
