"""Compiles the device, once per machine, user, release of torch and state of the source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = [*sorted(Path(__file__).parent.glob("*.h")), Path(__file__).parent / "device.cpp"]


class CannotBuild(Exception):
    """There is no compiler, or it fails."""


@functools.cache
def library() -> Path:
    """The shared library, compiled now if it has not been.

    Raises:
        CannotBuild: see there.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fullshard-tests"
    path = cache / f"simulated-{digest.hexdigest()[:16]}.so"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # of several processes one compiles
        if not path.exists():
            _compile(path)
    return path


def why_not() -> str:
    """Why there is no device; empty if there is one."""
    try:
        library()
    except CannotBuild as error:
        return str(error)
    return ""


def _compile(path: Path) -> None:
    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    if compiler is None:
        raise CannotBuild("no C++ compiler: install g++ (apt-get install g++) or set CXX")
    unfinished = path.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O1", "-w", "-std=c++20", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS"]
    command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
    command += [str(SOURCES[-1]), "-o", str(unfinished)]
    command += [f"-L{folder}" for folder in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"{compiler} cannot compile the simulated device: {(errors or [done.stderr[-300:]])[0]}")
    unfinished.replace(path)
