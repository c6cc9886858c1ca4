"""What the tests of `fullshard launch` share: starting it, looking at processes, and cleaning up after a failure."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, cast

import torch.multiprocessing as mp

from tests.distributed import preload

_CONTEXT = mp.get_context("forkserver")
preload("fullshard.launch.local", "fullshard.cli.launch", "tests.launching")
LAUNCH = [sys.executable, "-c", "from fullshard.cli.main import main; main()", "launch"]

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from fullshard import fully_shard
from fullshard.launch import init_process_group_from_environment

directory, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
environment = init_process_group_from_environment(torch.device("cpu"))
(directory / f"pid{environment.rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(32.0).reshape(4, 8) / 32 + environment.rank
for step in range(steps):
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    (directory / f"step{environment.rank}").write_text(f"{step} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    time.sleep(pause)
norm = sum(parameter.full_tensor().double().square().sum().item() for parameter in model.parameters())
print(f"trained rank {environment.rank} of {environment.world_size} norm {norm:.12f}", flush=True)
"""
"""A sharded training that leaves its process ids and its progress in a directory."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a job: without what a test run or a cluster may have left in this one."""
    prefixes = ("FSDP_", "ACCELERATE_", "SLURM_", "FULLSHARD_", "TORCHELASTIC_", "HF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        kept.pop(name, None)
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HOME": "/nonexistent", **variables}


class Forked:
    """A Python process that is a copy of one that has imported torch, which takes seconds; what it starts is as ever.

    It has what these tests use of `subprocess.Popen`. Words are those of Python's own command line, in a network
    namespace or in none.
    """

    def __init__(
        self, words: Sequence[str], cwd: Path, environ: dict[str, str], stdout: IO[str] | int, stderr: IO[str] | int
    ) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `tests.distributed`
        self._words = words
        self.stdout: IO[str] | None = None
        if stdout == subprocess.PIPE:
            reader, out = os.pipe()
            self.stdout = os.fdopen(reader)
        elif stdout == subprocess.DEVNULL:
            out = os.open(os.devnull, os.O_WRONLY)
        else:
            out = os.dup(stdout if isinstance(stdout, int) else stdout.fileno())
        err = os.dup(out if isinstance(stderr, int) else stderr.fileno())
        streams = [Connection(file, readable=False) for file in (out, err)]
        first = words.index(sys.executable)
        namespace = words[first - 1] if first else ""
        arguments = (words[first + 1 :], namespace, cwd, environ, streams)
        self._process = _CONTEXT.Process(target=_be_python, args=arguments)
        self._process.start()
        for stream in streams:
            stream.close()
        self.pid = self._process.pid or 0
        self._said: list[str] = []
        self._reader: threading.Thread | None = None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it and all that it has started say, to the end; then it has ended, too."""
        if self.stdout is not None and self._reader is None:
            self._reader = threading.Thread(target=self._read, args=[self.stdout], daemon=True)
            self._reader.start()
        if self._reader is not None:
            self._reader.join(timeout)
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        self.wait(timeout)
        return "".join(self._said), None

    def _read(self, stream: IO[str]) -> None:
        with stream:
            self._said.append(stream.read())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_python(
    words: Sequence[str], namespace: str, cwd: Path, environ: dict[str, str], output: list[Connection]
) -> None:
    os.setsid()
    for number, stream in enumerate(output, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if namespace:
        with Path("/run/netns", namespace).open() as net:
            if ctypes.CDLL(None, use_errno=True).setns(net.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    try:
        if words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), vars(program))
        elif words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


@contextmanager
def _beginning(
    words: Sequence[str],
    cwd: Path,
    environ: dict[str, str],
    stdout: IO[str] | int,
    stderr: IO[str] | int,
    *,
    copies: bool,
) -> Iterator[subprocess.Popen[str]]:
    if copies:
        process = cast("subprocess.Popen[str]", Forked(words, cwd, environ, stdout, stderr))
    else:
        process = subprocess.Popen(
            words, cwd=cwd, env=environ, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def launch(*arguments: str, cwd: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `fullshard launch` to its end."""
    return run_python([*LAUNCH, *arguments], cwd, environment(**variables), timeout)


def run_python(
    words: Sequence[str], cwd: Path, environ: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; one of this Python has imported torch already."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def said() -> list[str]:
            for file in (out, err):
                file.seek(0)
            return [out.read(), err.read()]

        with _beginning(words, cwd, environ, out, err, copies=True) as process:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise subprocess.TimeoutExpired(words, timeout, *said()) from None
        return subprocess.CompletedProcess(words, code, *said())


@contextmanager
def started(*command: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, killed at the end if it is still there; what it says is in `stdout`."""
    with started_into(subprocess.PIPE, *command, cwd=cwd, **variables) as process:
        yield process


@contextmanager
def started_into(stdout: IO[str] | int, *command: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The same with what it says in a file: of a process that says more than a pipe holds before anybody reads."""
    is_launcher = LAUNCH[2] in command
    with _beginning(command, cwd, environment(**variables), stdout, subprocess.STDOUT, copies=is_launcher) as process:
        yield process


def lines_of_each(
    commands: Sequence[list[str]], cwd: Path, seconds: float, **variables: str
) -> list[list[tuple[float, str]]]:
    """Run the launchers of one job to their end: the lines of each, with the moment at which they came.

    All have ended well, or it is an error with what the first has said.
    """
    output: list[list[tuple[float, str]]] = [[] for _ in commands]

    def listen(stream: IO[str], lines: list[tuple[float, str]]) -> None:
        lines.extend((time.monotonic(), line) for line in stream)

    with ExitStack() as stack:
        processes = [stack.enter_context(started(*command, cwd=cwd, **variables)) for command in commands]
        readers = [
            threading.Thread(target=listen, args=(process.stdout, lines), daemon=True)
            for process, lines in zip(processes, output, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(seconds)
        codes = [process.wait(60) for process in processes]
    assert set(codes) == {0}, "".join(line for _, line in output[0])[-5000:]
    return output


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for something; the seconds it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"{what} did not happen within {seconds} seconds"
        time.sleep(0.05)
    return time.monotonic() - begin


def read(path: Path) -> str:
    """The text of a file, empty if it is not there yet."""
    return path.read_text() if path.exists() else ""


def norms(text: str) -> set[str]:
    """What the ranks of `TRAIN` say at the end about the model; one element if they trained together."""
    return {line.rpartition(" ")[2] for line in text.splitlines() if "trained rank" in line}


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def listening(pids: set[int]) -> list[str]:
    """Local addresses, as the kernel writes them, on which processes listen. Of this network namespace's files."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    found = []
    for pid in pids:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1].rpartition(":")[0])
    return found
