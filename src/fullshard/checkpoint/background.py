"""Save in the background: training waits while the state is copied to host memory, but not while it is written to disk.

    training       ... step | collect, copy the state | step ...                        | step ...
    background              |                         | write, fsync, agree, rename     |
                                                            all ranks learn of it here ^

The second part of `save` runs in another thread, with its own process group, so that messages never mix.
"""

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Unpack

from fullshard.checkpoint.collect import SaveArguments
from fullshard.checkpoint.objects import Location, ObjectPath, at_exit
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Destination, prepare_save
from fullshard.checkpoint.staging import HostMemory
from fullshard.core.errors import CheckpointError, tell

logger = logging.getLogger(__name__)

_WRITING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """Saves checkpoints while training continues, one at a time. A new save first waits for the previous one.

    Every rank creates an `AsyncSaver` and calls the same methods in the same order. An error in the background is
    raised by the next `check`, `save` or `wait`. If none of them is called, the process reports the error when it ends
    and exits with code 1. A process does not end before its save is written.

        with AsyncSaver() as saver:
            for step, batch in enumerate(batches):
                saver.check()
                ...
                if step % 1000 == 0:
                    saver.save(f"out/step-{step}", model=model, optimizer=optimizer, total_limit=2)

    Attributes:
        memory: host memory for the copies of this rank's share of the checkpoint. It is reused by later saves.
        title: what a message calls a save that failed, instead of the checkpoint and its path.
    """

    def __init__(self) -> None:
        self.memory, self.title = HostMemory(), ""
        self._ranks: Ranks | None = None
        self._background: Ranks | None = None
        self._thread: threading.Thread | None = None
        self._path: Location | None = None
        self._error: BaseException | None = None

    @property
    def is_saving(self) -> bool:
        """Return whether a save is running. It counts as running until `check` or `wait` has reported its end."""
        return self._thread is not None

    def save(self, path: str | Location, **arguments: Unpack[SaveArguments]) -> Location:
        """Copy the state, start writing it in the background, and return. All ranks must call this.

        The arguments are the same as for `save_checkpoint`.

        Returns:
            The path that the checkpoint will have.

        Raises:
            CheckpointError: this save could not start, or the previous one failed. In both cases nothing was started.
        """
        self.make_room()
        pending = prepare_save(path, self.memory, **arguments)
        self.begin(pending.destination, pending.complete)
        return pending.destination.final

    def make_room(self) -> None:
        """Wait until a running save has finished. All ranks must call this. Raises the same errors as `save`."""
        self.wait()
        self.memory.reuse()

    def begin(self, destination: Destination, complete: Callable[[Ranks], object]) -> None:
        """Start to call `complete` in the background, after a copy to `memory`. All ranks must call this."""
        self._ranks = destination.ranks
        if self._background is None:
            self._background = self._ranks.apart()
        self._path, self._error = destination.final, None
        self._thread = threading.Thread(target=self._write, args=(complete, self._background), name="fullshard-save")
        # Not a daemon, so that the interpreter waits for it at exit before `_report` looks for an unread error.
        atexit.register(self._report)
        _WRITING.add(self._thread)
        if isinstance(self._path, ObjectPath):
            at_exit(_wait_for_all)
        self._thread.start()

    def check(self) -> Location | None:
        """Check whether the running save has ended on all ranks. Call this once per step.

        While a save is running, this is a small collective.

        Returns:
            The path of the checkpoint on the first call after it is complete; otherwise None.

        Raises:
            CheckpointError: the save failed. Every rank raises it at the same step.
        """
        if self._thread is None or self._ranks is None:
            return None
        return self.wait() if self._ranks.all(not self._thread.is_alive()) else None

    def wait(self) -> Location | None:
        """Wait for a running save and return its path, or None if none is running. Raise the errors of `check`."""
        if self._thread is None:
            return None
        self._thread.join()
        path, error = self._path, self._error
        self._thread = self._error = None
        atexit.unregister(self._report)
        if error is not None:
            raise error
        return path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:
                raise
            logger.exception("besides, the checkpoint %s was not saved", self._path)

    def _write(self, complete: Callable[[Ranks], object], ranks: Ranks) -> None:
        try:
            complete(ranks)
        except BaseException as error:  # raised later in the thread that started the save
            self._error = error

    def _report(self) -> None:
        """Report the error of a failed save when the process ends, if no method has raised it, and exit with code 1."""
        if self._error is None:
            return
        sys.stdout.flush()
        what = self.title or f"the checkpoint {self._path}"
        tell(f"fullshard: {what} was not saved: {self._error}")
        os._exit(1)  # an exception here would be printed, but the exit code would still be 0


def _wait_for_all() -> None:
    for thread in list(_WRITING):
        if thread.is_alive():
            thread.join()
