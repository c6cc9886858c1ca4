"""Run a worker's main function in a process that ends with its launcher and reports its own failure."""

import os
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard.core.errors import ConfigError, DataError, MissingExtraError, WrapError, cause_of
from fullshard.core.journal import JOURNAL, Happening
from fullshard.launch.bootstrap import LAUNCHER_PID, die_with_launcher, leave_process_group, leave_stacks, tell_launcher
from fullshard.launch.preemption import exit_code

USER_ERROR = 2
"""Exit code for mistakes that the user can fix without a traceback."""

_USER_ERRORS = (ConfigError, DataError, MissingExtraError, WrapError)


def run_worker(main: Callable[[], None]) -> None:
    """Run `main`. If it fails, write a report for the launcher, and exit with code 1 or 2.

    The launcher (fullshard's own or torchrun) then prints the traceback of the rank that failed first, once, instead of
    every rank printing its own. Exit code 2 means that the settings or the data are wrong, so that the message is
    enough. Without a launcher, the exception is raised as usual.
    """
    die_with_launcher()
    leave_stacks()
    code = 0
    handler = get_error_handler()
    handler.initialize()
    try:
        main()
        leave_process_group()
        code = exit_code()
    except Exception as error:
        tell_launcher("failed")
        if LAUNCHER_PID not in os.environ:  # otherwise the launcher records it
            text = f"{type(error).__name__}: {error}"
            JOURNAL.note(Happening.FAILURE, text, cause_rank=cause_of(text, JOURNAL.rank))
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        handler.record_exception(error)
        sys.stdout.flush()
        # Do not use sys.exit: shutdown joins communication threads, which may wait for ranks that have ended.
        os._exit(USER_ERROR if isinstance(error, _USER_ERRORS) else 1)
    if code:
        sys.exit(code)
