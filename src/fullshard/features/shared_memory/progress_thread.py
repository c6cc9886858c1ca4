"""A thread that sees messages through while the main one computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from fullshard.core.threads import start_thread

Result = TypeVar("Result")
_Tasks = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class ProgressThread:
    """Runs its tasks one after the other. After a failure it runs no more.

    An executor of the standard library would wait for its thread when the interpreter ends, however long that waits for
    a rank that is gone.

    Args:
        on_failure: called by the thread when a task fails.
        end_waits: makes the thread's waits fail, once the process ends and nothing else has ended them.
    """

    def __init__(self, on_failure: Callable[[], None], end_waits: Callable[[], object]) -> None:
        self._on_failure, self._end_waits = on_failure, end_waits
        self._tasks: _Tasks = SimpleQueue()
        self._failure: list[BaseException] = []
        self._thread: Thread | None = None
        self._lock = Lock()

    def submit(self, do: Callable[[], Result]) -> Future[Result]:
        """Have `do` called after everything that was submitted before."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # an exit handler comes after the thread's end
                arguments = (self._tasks, self._failure, self._on_failure)
                stop = partial(self._tasks.put, None)
                self._thread = start_thread("fullshard communication", _work, arguments, stop, self._end_waits)
                weakref.finalize(self, stop).atexit = False
        future: Future[Result] = Future()
        self._tasks.put((do, future))
        return future

    def check(self) -> None:
        """Raise the error of a failed task, if one has failed."""
        if self._failure:
            raise self._failure[0]

    def finish(self) -> None:
        """Wait until all submitted tasks are done, and raise the error of a failed one."""
        if self._thread is not None:
            self.submit(lambda: None).result()


def _work(tasks: _Tasks, failure: list[BaseException], on_failure: Callable[[], None]) -> None:
    """Run the thread's loop. It does not know the `ProgressThread`, which would otherwise never be freed."""
    while (task := tasks.get()) is not None:
        do, future = task
        try:
            if failure:
                raise failure[0]
            future.set_result(do())
        except BaseException as error:
            if not failure:
                failure.append(error)
                on_failure()
            future.set_exception(error)
        del task, do, future  # free its objects before waiting for the next
