"""Find problems in this environment, and run a few ranks to check what works."""

import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.environment import load_environment
from fullshard.config.hardware import Hardware
from fullshard.config.resolve import resolve
from fullshard.config.settings import plain_message
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_object
from fullshard.core.requirements import OLDEST_TORCH, is_too_old
from fullshard.core.sizes import MIB, format_nbytes
from fullshard.launch.report import Report, open_files_limit, shared_memory_nbytes

_SMALL_SHARED_MEMORY = 64 * MIB
"""The default size in containers, which is too small for several ranks."""

_FEW_OPEN_FILES = 1024
_STALE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and an action that fixes it. If `is_wrong` is False, runs are only slower or more fragile."""

    text: str
    hint: str
    is_wrong: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds the results of a trial run of a few ranks. The outcome of a check that has failed begins with `wrong`."""

    exit_code: int
    checks: dict[str, str]
    facts: dict[str, Any]


def examine(
    hardware: Hardware, environ: Mapping[str, str], report: Report, nproc: int, device: str = "auto"
) -> list[Finding]:
    """Return the problems that can be found without starting a rank, for a job of `nproc` ranks on `device`."""
    return [
        *_variables(environ),
        *_interfaces(environ),
        *_host_name(),
        *_threads(environ, nproc, hardware.cpu_count),
        *_limits(shared_memory_nbytes(), open_files_limit()),
        *_torch(hardware, report, device),
    ]


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    if "TORCHELASTIC_RUN_ID" not in environ:
        if stale := [name for name in _STALE if name in environ]:
            yield Finding(
                f"{', '.join(f'{name}={environ[name]}' for name in stale)} is set, but no launcher is running: "
                "a script that is started with python would wait for other ranks forever",
                f"unset {' '.join(stale)}",
            )
        if "MASTER_ADDR" in environ:
            yield Finding(
                f"MASTER_ADDR={environ['MASTER_ADDR']} is set, but it may belong to another job",
                "unset MASTER_ADDR MASTER_PORT",
                is_wrong=False,
            )
    reading = load_environment(environ)
    for problem in reading.problems:
        yield Finding(str(problem), problem.hint or "unset it")
    if not reading.problems:
        try:
            resolve([reading])
        except ConfigError as error:  # the values are well-formed, but out of range or in conflict
            yield Finding(plain_message(error), error.hint or "unset it")


def _interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        if value.startswith("^"):  # in NCCL this excludes the named interfaces
            continue
        is_exact = value.startswith("=") or variable.startswith("GLOO")  # NCCL takes prefixes
        for name in filter(None, value.removeprefix("=").split(",")):
            if not any(each == name if is_exact else each.startswith(name) for each in known):
                yield Finding(
                    f"{variable}={value} contains {name}, which is not a network interface of this host",
                    f"use one of {', '.join(known)}, or unset {variable}",
                )


def _host_name() -> Iterator[Finding]:
    """Yield a finding if this host's name does not resolve to an address that a socket here can be bound to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        yield Finding(
            f"the name of this host, {name}, does not resolve to one of its addresses ({error}), so processes that "
            "look it up may hang",
            f"correct {name} in /etc/hosts or in the DNS, or set GLOO_SOCKET_IFNAME to the interface to use",
            is_wrong=False,
        )


def _threads(environ: Mapping[str, str], nproc: int, cpu_count: int) -> Iterator[Finding]:
    text = environ.get("OMP_NUM_THREADS", "")
    if text and not (text.isdigit() and int(text)):
        yield Finding(f"OMP_NUM_THREADS={text} is not a number of threads", "unset it")
    elif text and int(text) * nproc > cpu_count:
        yield Finding(
            f"OMP_NUM_THREADS={text} gives {nproc} ranks {int(text) * nproc} threads, but there are only {cpu_count} "
            "processors, so the threads slow one another down",
            f"unset it (the launcher then sets it), or set it to {max(1, cpu_count // nproc)}",
            is_wrong=False,
        )


def _limits(shared: int | None, files: int | None) -> Iterator[Finding]:
    if shared is not None and shared <= _SMALL_SHARED_MEMORY:
        yield Finding(
            f"/dev/shm has {format_nbytes(shared)}, which is too little for data loader workers and for ranks that "
            "communicate through it",
            "start the container with --shm-size=8g or --ipc=host",
            is_wrong=False,
        )
    if files is not None and files < _FEW_OPEN_FILES:
        yield Finding(
            f"a process may open only {files} files, but data loaders and sockets of many ranks need more",
            f"run `ulimit -n {8 * _FEW_OPEN_FILES}` before the job",
            is_wrong=False,
        )


def _torch(hardware: Hardware, report: Report, device: str) -> Iterator[Finding]:
    version = report["packages"].get("torch", "0")
    if is_too_old(version):
        yield Finding(f"torch {version} is too old", f"install torch {'.'.join(map(str, OLDEST_TORCH))} or later")
    if hardware.failure:
        yield Finding(
            hardware.failure,
            "use nvidia-smi to check whether the driver supports torch's CUDA version, or restart the host",
        )
    if report["torch"]["CUDA available"] != "false":
        return
    built = report["torch"]["built for"]
    if hardware.accelerators and device != "cpu":
        yield Finding(
            f"the driver shows {len(hardware.accelerators)} GPUs, but torch (built for {built}) cannot use them",
            "install a torch that is built for the driver's CUDA version",
        )
    elif device == "cuda":
        yield Finding(
            f"device is cuda, but this host has no GPU that torch (built for {built}) can use",
            "start the container with its GPUs (--gpus all), or use --device cpu",
        )


def try_ranks(nproc: int, device: str, timeout_seconds: float) -> Trial:
    """Start ranks that check the collectives and compare a step with DDP. A rank that fails prints its traceback."""
    from fullshard.launch.local import launch_local

    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as directory:
        path = Path(directory) / "outcome.json"
        code = launch_local("fullshard.launch.doctor_ranks", [str(path), device, str(timeout_seconds)], nproc=nproc)
        outcome = read_object(path) if path.exists() else {}
    return Trial(code, outcome.get("checks", {}), outcome.get("facts", {}))


def judge(trial: Trial, seen: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding per problem in a trial run, and name the worst earlier one (`seen`) as the likely cause."""
    for name, outcome in trial.checks.items():
        if outcome.startswith("wrong"):
            yield Finding(f"{name}: {outcome}", "please report this with the output of `fullshard doctor --run --json`")
    if trial.exit_code:
        causes = [finding.text for finding in sorted(seen, key=lambda finding: not finding.is_wrong)]
        yield Finding(
            f"the ranks ended with exit code {trial.exit_code}; checks that were reached: "
            f"{', '.join(trial.checks) or 'none'}{f'; most likely: {causes[0]}' if causes else ''}",
            "fix that first" if causes else "see the traceback above; set NCCL_DEBUG=INFO for details about NCCL",
        )
