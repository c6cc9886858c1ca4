"""A warm standby: a process that has done a rank's imports, and waits until it is to be a rank.

    python -m fullshard.launch.spare DESCRIPTOR

`launch.spares` sends the list of imports through standard input, and the process to become through the socket with that
descriptor. The standby starts in the environment in which the rank did the same imports, and gets the new process's
environment when it becomes one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path

from fullshard.launch import bootstrap

HEADER_NBYTES = 8
"""Bytes of an order's length, big-endian; the descriptors of the three standard streams come with it."""


def main() -> None:
    """Import, wait, and run what a rank runs."""
    bootstrap.die_with_launcher()
    bootstrap.watch_for_trainers()
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, where a file may have a package's name
    for name in json.load(sys.stdin):
        with contextlib.suppress(Exception, SystemExit):  # the code that needs it imports it again, and gets the error
            import_module(name)
    arguments = _wait(int(sys.argv[1]))
    sys.orig_argv[:] = [sys.executable, *arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)  # type: ignore[union-attr]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        bootstrap.run_module(arguments[1])
    else:
        sys.argv[:] = arguments
        bootstrap.main()


def _wait(descriptor: int) -> list[str]:
    """Wait for the arguments of the process to become, and take over its environment and streams."""
    with socket.socket(fileno=descriptor) as launcher:
        with contextlib.suppress(BrokenPipeError):  # the launcher has said everything already, and gone on
            launcher.sendall(b".")
        header, streams, _, _ = socket.recv_fds(launcher, HEADER_NBYTES, 3)
        if len(header) < HEADER_NBYTES:
            sys.exit()  # the launcher has ended
        with launcher.makefile("rb") as file:
            order = json.loads(file.read(int.from_bytes(header, "big")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    return list(order["arguments"])


if __name__ == "__main__":
    main()
