"""What a worker process does around its main function: die with its launcher, and report how it failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard.core.errors import ConfigError, DataError, MissingExtraError, WrapError

LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"
"""Set by the launcher of `fullshard.launch.local` for its workers."""

USER_ERROR = 2
"""Exit code of a mistake that the user can mend without reading a traceback."""

_USER_ERRORS = (ConfigError, DataError, MissingExtraError, WrapError)
_PR_SET_PDEATHSIG = 1


def run_worker(main: Callable[[], None]) -> None:
    """Run `main`; a failure is written where the launcher looks for it, and ends the process with code 1 or 2.

    The launcher (fullshard's own, or torchrun) then prints the traceback of the rank that failed first, once, instead
    of every rank printing its own. Code 2 stands for a mistake in the settings or the data, whose message says enough.
    Without a launcher the exception is raised as usual.
    """
    _die_with_launcher()
    handler = get_error_handler()
    handler.initialize()
    try:
        main()
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        handler.record_exception(error)
        sys.stdout.flush()
        # Not sys.exit: interpreter shutdown joins communication threads, which may wait for ranks that are gone.
        os._exit(USER_ERROR if isinstance(error, _USER_ERRORS) else 1)


def _die_with_launcher() -> None:
    """End this process as soon as its launcher ends, even if that was killed, and at once on an interrupt."""
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is None:
        return
    # The launcher handles Ctrl-C and passes it on; a KeyboardInterrupt on every rank would only be noise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher_pid):  # it ended before the request was made
            os._exit(1)
