"""Find problems in this environment, and run a few ranks to check what works."""

import os
import socket
import tempfile
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fullshard.config.environment import load_environment
from fullshard.config.hardware import Hardware
from fullshard.config.resolve import resolve
from fullshard.config.settings import plain_message
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_object
from fullshard.core.requirements import OLDEST_TORCH, is_too_old
from fullshard.core.sizes import MIB, format_nbytes
from fullshard.launch.links import judge_links
from fullshard.launch.report import Report, open_files_limit, shared_memory_nbytes

_SMALL_SHARED_MEMORY = 64 * MIB
"""The default size in containers, which is too small for several ranks."""

_FEW_OPEN_FILES = 1024
_STALE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


_VERDICTS = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and an action that fixes it. If `is_wrong` is False, runs are only slower or more fragile."""

    text: str
    hint: str
    is_wrong: bool = True

    @classmethod
    def of(cls, verdict: str, **values: Any) -> Self:
        """Return the finding that `verdicts.toml` describes, with these values."""
        row = _VERDICTS[verdict]
        return cls(row["text"].format(**values), row["hint"].format(**values), "is_note" not in row)


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds the results of a trial run of a few ranks. The outcome of a check that has failed begins with `wrong`."""

    exit_code: int
    checks: dict[str, str]
    facts: dict[str, Any]
    ranks: Sequence[dict[str, Any]] = ()  # what `launch.links` judges
    links: Sequence[dict[str, Any]] = ()


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
            said = ", ".join(f"{name}={environ[name]}" for name in stale)
            yield Finding.of("stale_rank", said=said, names=" ".join(stale))
        if "MASTER_ADDR" in environ:
            yield Finding.of("stale_address", address=environ["MASTER_ADDR"])
    reading = load_environment(environ)
    for problem in reading.problems:
        yield Finding.of("setting", problem=problem, hint=problem.hint or "unset it")
    if not reading.problems:
        try:
            resolve([reading])
        except ConfigError as error:  # the values are well-formed, but out of range or in conflict
            yield Finding.of("setting", problem=plain_message(error), hint=error.hint or "unset it")


def _interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        if value.startswith("^"):  # in NCCL this excludes the named interfaces
            continue
        is_exact = value.startswith("=") or variable.startswith("GLOO")  # NCCL takes prefixes
        for name in filter(None, value.removeprefix("=").split(",")):
            if not any(each == name if is_exact else each.startswith(name) for each in known):
                yield Finding.of("no_interface", variable=variable, value=value, name=name, known=", ".join(known))


def _host_name() -> Iterator[Finding]:
    """Yield a finding if this host's name does not resolve to an address that a socket here can be bound to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        yield Finding.of("host_name", name=name, error=error)


def _threads(environ: Mapping[str, str], nproc: int, count: int) -> Iterator[Finding]:
    text = environ.get("OMP_NUM_THREADS", "")
    if text and not (text.isdigit() and int(text)):
        yield Finding.of("no_threads", text=text)
    elif text and (threads := int(text) * nproc) > count:
        right = max(1, count // nproc)
        yield Finding.of("threads", text=text, nproc=nproc, threads=threads, count=count, right=right)


def _limits(shared: int | None, files: int | None) -> Iterator[Finding]:
    if shared is not None and shared <= _SMALL_SHARED_MEMORY:
        yield Finding.of("shared_memory", size=format_nbytes(shared))
    if files is not None and files < _FEW_OPEN_FILES:
        yield Finding.of("open_files", files=files, right=8 * _FEW_OPEN_FILES)


def _torch(hardware: Hardware, report: Report, device: str) -> Iterator[Finding]:
    version, built = report["packages"].get("torch", "0"), report["torch"]["built for"]
    if is_too_old(version):
        yield Finding.of("old_torch", version=version, oldest=".".join(map(str, OLDEST_TORCH)))
    if hardware.failure:
        yield Finding.of("driver", failure=hardware.failure)
    if report["torch"]["CUDA available"] != "false":
        return
    if hardware.accelerators and device != "cpu":
        yield Finding.of("unusable", count=len(hardware.accelerators), built=built)
    elif device == "cuda":
        yield Finding.of("no_gpu", built=built)


def try_ranks(nproc: int, device: str, timeout_seconds: float) -> Trial:
    """Start ranks that measure links and check collectives, or be one of them under a launcher. They print errors."""
    from fullshard.launch.doctor_ranks import check_ranks
    from fullshard.launch.local import launch_local

    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as directory:
        path, code = Path(directory) / "outcome.json", 0
        if "TORCHELASTIC_RUN_ID" in os.environ:
            try:
                check_ranks(path, device, timeout_seconds)
            except RuntimeError:  # rank 0 says what all were doing
                traceback.print_exc()
                code = 1
        else:
            words = [str(path), device, str(timeout_seconds)]
            code = launch_local("fullshard.launch.doctor_ranks", words, nproc=nproc)
        return Trial(code, **({"checks": {}, "facts": {}} | (read_object(path) if path.exists() else {})))


def judge(trial: Trial, seen: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding per problem in a trial run, and name the worst earlier one (`seen`) as the likely cause."""
    found = [Finding.of(verdict, **values) for verdict, values in judge_links(trial.ranks, trial.links)]
    yield from dict.fromkeys(found)  # ranks of one host say the same
    for name, outcome in trial.checks.items():
        if outcome.startswith("wrong"):
            yield Finding.of("wrong_result", name=name, outcome=outcome)
    if trial.exit_code:
        causes = [finding.text for finding in sorted([*found, *seen], key=lambda finding: not finding.is_wrong)]
        reached = ", ".join(trial.checks) or "none"
        ended = {"code": trial.exit_code, "reached": reached, "cause": causes[0] if causes else ""}
        yield Finding.of("ended_because" if causes else "ended", **ended)
