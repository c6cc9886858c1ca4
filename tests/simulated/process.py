"""Runs functions of tests in a process that has the simulated device: it is the accelerator of all of a process.

One process serves all tests of a file, as in `tests.distributed`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.distributed import preload
from tests.simulated.build import why_not

_CONTEXT = mp.get_context("forkserver")
preload("torch.testing._internal.distributed.multi_threaded_pg")
_worker: tuple[Any, Any, Any] | None = None


def _serve(tasks: Any, results: Any) -> None:
    faulthandler.enable()
    from tests.simulated.group import device  # only here, because it makes it the accelerator

    torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it has no kernels for, anew for each shape
    while True:
        environment, function, arguments = tasks.get()
        os.environ.clear()
        os.environ.update(environment)
        device.begin(device.Order.LAZY)
        try:
            outcome = (True, function(*arguments))
        except BaseException:
            outcome = (False, traceback.format_exc())
        results.put(outcome)
        del outcome, function, arguments
        gc.collect()


def end_worker() -> None:
    """End the process, if there is one."""
    global _worker
    if _worker is not None:
        _worker[0].kill()
        _worker[0].join()
        _worker = None


atexit.register(end_worker)


def on_device(function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> Any:
    """Call a function at module level in a process whose accelerator is the simulated device.

    Raises:
        RuntimeError: it raised (the message has the traceback), ended the process, or took too long.
    """
    global _worker
    reason = why_not()
    if reason:
        pytest.skip(reason)
    if _worker is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        tasks, results = _CONTEXT.Queue(), _CONTEXT.Queue()
        process = _CONTEXT.Process(target=_serve, args=(tasks, results), daemon=True)
        process.start()
        _worker = process, tasks, results
    process, tasks, results = _worker
    tasks.put((dict(os.environ), function, arguments))
    deadline = time.monotonic() + timeout
    while True:
        try:
            succeeded, value = results.get(timeout=0.5)
        except queue.Empty:
            if process.exitcode is None and time.monotonic() < deadline:
                continue
            code = process.exitcode
            end_worker()
            what = "did not finish in time" if code is None else f"ended its process with code {code}"
            raise RuntimeError(f"{function.__name__} {what}") from None
        except BaseException:  # the time that pytest gives a test is over: the next one is not to have this result
            end_worker()
            raise
        if succeeded:
            return value
        end_worker()
        raise RuntimeError(f"{function.__name__} raised:\n{value}")
