"""Runs a command in the process of the test: starting Python for it takes as long as most commands do."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from fullshard.cli.main import main


def run_here(
    *words: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `fullshard` with these words prints, and its exit code. For commands that start no other processes."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["fullshard", *words]))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        if environ is not None:
            stack.enter_context(patch.dict(os.environ, environ, clear=True))
        if cwd is not None:
            stack.enter_context(contextlib.chdir(cwd))
        interrupt = signal.getsignal(signal.SIGINT)
        stack.callback(lambda: signal.signal(signal.SIGINT, interrupt))
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["fullshard", *words], code, out.getvalue(), err.getvalue())
