"""What the tests of `fullshard launch` share: starting it, looking at processes, and cleaning up after a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch.multiprocessing as mp

from fullshard.cli.main import main
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


def launch(*arguments: str, cwd: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `fullshard launch` to its end.

    The launcher is a copy of a process that has imported torch, which takes seconds; what it starts is as ever. With a
    search path of its own, which counts as torch is imported, it is a new process; so it is in `started`.
    """
    words, environ = [*LAUNCH, *arguments], environment(**variables)
    if "PYTHONPATH" in variables:
        return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout, check=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `tests.distributed`
    with tempfile.TemporaryDirectory() as directory:
        output = [Path(directory, name) for name in ("out", "err")]
        launcher = _CONTEXT.Process(target=_be_launcher, args=(arguments, cwd, environ, output))
        launcher.start()
        launcher.join(timeout)
        if launcher.exitcode is None:
            launcher.kill()
            launcher.join()
            raise subprocess.TimeoutExpired(words, timeout, *(path.read_text() for path in output))
        return subprocess.CompletedProcess(words, launcher.exitcode, *(path.read_text() for path in output))


def _be_launcher(arguments: tuple[str, ...], cwd: Path, environ: dict[str, str], output: list[Path]) -> None:
    for number, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.argv[:] = ["fullshard", "launch", *arguments]
    main()


@contextmanager
def started(*command: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, killed at the end if it is still there; what it says is in `stdout`."""
    with started_into(subprocess.PIPE, *command, cwd=cwd, **variables) as process:
        yield process


@contextmanager
def started_into(stdout: IO[str] | int, *command: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The same with what it says in a file: of a process that says more than a pipe holds before anybody reads."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**variables),
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
