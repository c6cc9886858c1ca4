"""The first code that runs in each process of a job: it runs the script and reports a failure to the launcher.

    python bootstrap.py script PATH ARGUMENTS...
    python bootstrap.py module NAME ARGUMENTS...
    python bootstrap.py program NAME ARGUMENTS...

The launcher starts this file by its path. The file uses only the standard library, so that the script starts with no
modules imported other than those that plain Python imports, unless names of torch are to be replaced.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import types
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # importing `typing` adds a tenth to Python's startup time
if TYPE_CHECKING:
    from typing import NoReturn, TextIO

LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"
"""Set by the launcher for its workers."""

PREEMPTION_DIR = "FULLSHARD_PREEMPTION_DIR"
"""Set by the launcher: the directory in which a process reports that it listens for signals, or stops for one."""

TRAINER_HOOK = "FULLSHARD_TRAINER_HOOK"
"""Set by the command line: the module whose `install()` is called when a script imports Transformers."""

TAKE = "FULLSHARD_TAKE"
"""Set by a user or by the launcher: which names of torch the script gets from fullshard."""

WATCHED = {
    "training.step_in_backward": (
        "FULLSHARD_STEP_IN_BACKWARD",
        "fullshard.features.steps_in_backward.stepper",
        "no optimizer was prepared to step in backward",
        "call fullshard.step_in_backward(optimizer) in the script, or use fullshard's Accelerator",
    ),
    "checkpoint.max_lost_steps": (
        "FULLSHARD_MAX_LOST_STEPS",
        "fullshard.checkpoint.copies",
        "the script keeps no copies of its state",
        "call accelerator.keep_copy(step) after each step, or use fullshard.checkpoint.MemoryCopies",
    ),
}
"""Settings that may have no effect in a script. Each has the variable that passes it to a worker, the module that is
imported if it takes effect, the reason why it may not, and what to do about it."""

STACK_SIGNAL = 40
"""The signal that asks a process for its threads' stacks: a Linux real-time signal that nothing else uses."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The file in which torchelastic looks for a worker's failure."""

EXIT_SECONDS = 10
"""Seconds that a failed process may spend in exit handlers, because its threads may wait for ranks that have ended."""

_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def die_with_launcher() -> None:
    """End this process when its launcher ends, even if it was killed, and on SIGINT, without a traceback."""
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is None:
        return
    import signal

    # The launcher handles Ctrl-C and passes it on; a KeyboardInterrupt on every rank would only be noise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        # A shell script between the launcher and this process ends with the launcher, and this process with the script.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if int(launcher_pid) not in _ancestors():  # the launcher ended before prctl took effect
            os._exit(1)


def _ancestors() -> list[int]:
    found = [os.getppid()]
    while found[-1] > 1:
        try:
            with open(f"/proc/{found[-1]}/stat", encoding="utf-8", errors="replace") as file:
                found.append(int(file.read().rpartition(")")[2].split()[1]))
        except OSError:
            break
    return found


def leave_stacks() -> None:
    """Let the launcher's signal write the stacks of all threads to its directory, even if the process is blocked."""
    directory = os.environ.get(PREEMPTION_DIR)
    if directory is None or sys.platform != "linux":
        return
    import contextlib
    import faulthandler
    import signal

    # An exiting interpreter removes the handler below and restores this one. The default would end the process.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        # The file stays open, because a signal handler must not open files.
        _kept.append(open(os.path.join(directory, f"stack-{os.getpid()}"), "w", encoding="utf-8"))  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, file=_kept[0], all_threads=True)


_kept: list[TextIO] = []


def write_report(message: str, callstack: str) -> bool:
    """Write a failure report for the launcher in torchelastic's format. Return False if that is not possible."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    import json
    import time

    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.rename(f"{path}.part", path)
    except OSError:
        return False
    return True


def main() -> None:
    """Run the script, module or program that the command line names, and report a failure to the launcher."""
    kind, target, *arguments = sys.argv[1:]
    die_with_launcher()
    if kind == "program":
        _become(target, arguments)
    leave_stacks()
    sys.argv[:] = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # otherwise lines that ranks write to a pipe arrive late
    sys.meta_path.insert(0, _ShardTrainers())
    atexit.register(_end_if_failed)  # first registered, so it runs last
    atexit.register(leave_process_group)  # runs after the script's own handlers
    try:
        if os.environ.get(TAKE):
            from importlib import import_module

            import_module("fullshard.launch.take").take()
        _run_module(target) if kind == "module" else _run_script(target)
    except SystemExit as end:
        if end.code in (None, 0):
            _finish()
        raise
    except Exception as error:
        _fail(error)
    _finish()


def tell_launcher(what: str) -> None:
    """Create an empty file where the launcher looks for it. The name of the file is the message."""
    if directory := os.environ.get(PREEMPTION_DIR):
        import contextlib

        with contextlib.suppress(OSError), open(os.path.join(directory, f"{what}-{os.getpid()}"), "w"):
            pass  # an error: the job may have ended


def _finish() -> None:
    """Tell the launcher, before this process ends, that the script has succeeded."""
    tell_launcher("finished")
    _say_if_nothing_was_sharded()


def leave_process_group() -> None:
    """Destroy a process group that the script left open, but not after a failure: NCCL would wait for missing ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or _failures:
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()
    from fullshard.core.threads import wait_for_gloo

    wait_for_gloo()


class _ShardTrainers:
    """An import hook that installs fullshard's engine in Transformers' Trainer once the script imports it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Install the engine if the script imports Transformers. Return None, so that the other finders find it."""
        if name == "transformers":
            sys.meta_path.remove(self)
            if module := os.environ.get(TRAINER_HOOK):
                from importlib import import_module

                import_module(module).install()


def _become(program: str, arguments: list[str]) -> NoReturn:
    # The request to die with the launcher outlives exec.
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        message = f"cannot run {program!r}: {error.strerror}"
        write_report(message, message)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _run_module(name: str) -> None:
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(target: str) -> None:
    path = os.path.join(os.getcwd(), target)
    if not os.path.isfile(path) or path.endswith((".zip", ".pyz")):
        import runpy

        runpy.run_path(target, run_name="__main__")
        return
    # The script must not see the names of this file. Child processes of multiprocessing find it again by __file__.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__builtins__=builtins, __file__=path, __loader__=loader, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    _warn_of_other_accelerator(code)
    exec(code, vars(module))


def _warn_of_other_accelerator(code: types.CodeType) -> None:
    """Warn before training if a script uses Accelerate's `Accelerator`, and neither fullshard nor a Trainer."""
    if os.environ.get("RANK") != "0" or "FULLSHARD_CONFIG" not in os.environ or TAKE in os.environ:
        return
    others = any(name.startswith("fullshard") or name.endswith("Trainer") for name in code.co_names)
    if {"accelerate", "Accelerator"} <= set(code.co_names) and not others:
        sys.stderr.write(
            "fullshard: the script imports Accelerator from accelerate, which does not shard with fullshard\n"
            "hint: change the import to `from fullshard import Accelerator`\n"
        )


def _fail(error: Exception) -> NoReturn:
    """Write the failure report and exit. The launcher prints the report of the first failure."""
    import threading
    import traceback

    tell_launcher("failed")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    # If a report exists, torchelastic's `record` around the script's main function has written it.
    reported = os.path.isfile(os.environ.get(ERROR_FILE, ""))
    if not reported:
        text = "".join(traceback.format_exception(type(error), error, frames))
        if not write_report("".join(traceback.format_exception_only(error)).strip(), text):
            sys.stderr.write(text)
    ours = sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch.")
    if not ours:  # trackers and debuggers need the hook; torch's hook would only print the same text again
        sys.excepthook(type(error), error, frames)
    _failures.append(error)
    end = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    end.daemon = True
    end.start()
    sys.exit(1)


_failures: list[Exception] = []


def _end_if_failed() -> None:
    """Skip the interpreter's shutdown after a failure, because Gloo threads that are still running could abort it."""
    if not _failures:
        return
    import contextlib

    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The stream may have no reader, be closed, or not exist.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def _say_if_nothing_was_sharded() -> None:
    if os.environ.get("RANK") != "0" or not {"FULLSHARD_CONFIG", TAKE} & os.environ.keys():
        return
    engine = sys.modules.get("fullshard.engine.extension")
    if engine is not None and engine.anything_was_sharded():
        for path, (variable, module, why, hint) in WATCHED.items():
            used = sys.modules.get(module)
            if variable in os.environ and not (used and getattr(used, "anything_steps_in_backward", lambda: True)()):
                sys.stderr.write(f"fullshard: {path.partition('.')[2]} had no effect: {why}\nhint: {hint}\n")
        return
    count = os.environ.get("WORLD_SIZE", "1")
    sys.stderr.write(
        f"fullshard: no model was sharded on rank 0, so the sharding and precision settings had no effect; unless the "
        f"script divides the work itself, each of the {count} processes did all of it\n"
        "hint: use fullshard's Accelerator, accelerate() or fully_shard in the script, or Transformers' Trainer\n"
    )


if __name__ == "__main__":
    main()
