"""What one benchmark run leaves behind: a record that holds every raw number and everything needed to repeat it.

The types are plain data; a record file is their JSON and `load` checks it against them, so a record that was edited by
hand or written by an older version is refused instead of half read. No torch here: tables are made without it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.catalog import Row
from fullshard.config.hardware import detect_hardware

FORMAT = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("fullshard", "torch", "transformers", "deepspeed", "numpy")
# Anything here moves times or memory without showing up in a job. `benchmarks.run` sets OMP_NUM_THREADS by itself.
ENVIRONMENT = ("MKL_NUM_THREADS", "LD_PRELOAD", "GLOO_SOCKET_IFNAME", "FULLSHARD_*", "MALLOC_*", "DS_*")


@dataclass(frozen=True, slots=True)
class Job:
    """One engine on one row, once: everything a worker process is told.

    Args:
        engine: a name from `benchmarks.catalog.ENGINES`.
        repeat: which repetition this is, from 0.
        ranks: worker processes; the bare process is always 1.
        warmup: steps before the measured ones, excluded from times but not from losses and memory.
        steps: measured steps.
        lr: learning rate of AdamW.
        device: a device type from `benchmarks.catalog.BACKENDS`.
        compile: `torch.compile` on each transformer block.
        watch_memory: sample the proportional size all the time, which makes steps slower.
    """

    row: Row
    engine: str
    repeat: int
    ranks: int
    warmup: int
    steps: int
    seed: int
    lr: float
    device: str
    compile: bool = False
    watch_memory: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one rank in bytes; the peaks count from `imports_nbytes`.

    Args:
        imports_nbytes: resident after all imports, before the process group and the model exist.
        setup_peak_nbytes: peak while the model is built, sharded and given its optimizer.
        steps_peak_nbytes: peak from the first warm-up step to the last step.
        shared_nbytes: shared memory resident at the end. Pages that several ranks map count in full on each of them.
        pss_nbytes: resident at the end with shared pages divided by the number of their users.
        device_peak_nbytes: the same peak of what torch allocated on the accelerator, from the first warm-up step; or 0.
        setup_pss_peak_nbytes, steps_pss_peak_nbytes: the peaks with shared pages divided by the number of their users,
            from many samples; 0 where they were not taken.
    """

    imports_nbytes: int
    setup_peak_nbytes: int
    steps_peak_nbytes: int
    shared_nbytes: int
    pss_nbytes: int
    device_peak_nbytes: int = 0
    setup_pss_peak_nbytes: int = 0
    steps_pss_peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank measured: seconds per step, one loss per step (warm-up included) and its memory."""

    warmup_seconds: list[float]
    step_seconds: list[float]
    losses: list[float]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Run:
    """One job and what came of it: a result per rank, or the reason why there is none.

    Args:
        position: place of this job in its repeat's order, from 0.
        wall_seconds: from starting the processes to the end of the last one.
        other_cpu_seconds: CPU time the rest of the machine used meanwhile: if large, distrust the times.
        sent_nbytes: what each host put on its link to the others meanwhile; empty with one host.
        planned_nbytes: of fullshard, the least that a rank of this row takes, as `fullshard plan` says; else 0.
    """

    job: Job
    position: int
    wall_seconds: float
    other_cpu_seconds: float
    ranks: list[RankResult]
    error: str | None
    sent_nbytes: list[int] = field(default_factory=list)
    planned_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and software a record was made with.

    Args:
        bf16_instructions: the processor's; without any, bf16 arithmetic is emulated and slower than fp32.
        accelerators: what their driver calls them.
    """

    cpu: str
    bf16_instructions: list[str]
    num_cpus: int
    memory_nbytes: int
    system: str
    python: str
    packages: dict[str, str | None]
    environment: dict[str, str]
    accelerators: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """Everything one invocation of `benchmarks.run` measured.

    Args:
        created: UTC time of the start, ISO 8601.
        command: the command line that repeats it.
        commit: git commit of the checkout, `None` outside a repository or before the first commit.
        dirty: whether the checkout had changes on top of it; `None` where git cannot say.
    """

    format: int
    created: str
    command: str
    commit: str | None
    dirty: bool | None
    machine: Machine
    runs: list[Run] = field(default_factory=list)


RANK_RESULT = TypeAdapter(RankResult)
JOB = TypeAdapter(Job)
_RECORD = TypeAdapter(Record)


def save(record: Record, path: Path) -> None:
    """Writes the record whole or not at all, so that a run that is interrupted leaves the runs before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(_RECORD.dump_json(record, indent=1) + b"\n")
    temporary.replace(path)


def load(path: Path) -> Record:
    """Reads a record.

    Raises:
        pydantic.ValidationError: not a record.
        ValueError: a record of another format.
    """
    record = _RECORD.validate_json(path.read_bytes())
    if record.format != FORMAT:
        raise ValueError(f"{path.name} has format {record.format}, this code reads {FORMAT}")
    return record


def describe_machine() -> Machine:
    """The machine this process runs on."""
    return Machine(
        cpu=_cpu_field("model name") or platform.machine(),
        bf16_instructions=sorted(flag for flag in _cpu_field("flags").split() if flag.endswith("bf16")),
        num_cpus=os.cpu_count() or 1,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}, {'-'.join(platform.libc_ver())}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        environment={name: value for name, value in sorted(os.environ.items()) if _moves_results(name)},
        accelerators=[device.name for device in detect_hardware().accelerators],
    )


def git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout and whether it has changes; records themselves do not count as changes."""
    commit = _git("rev-parse", "--verify", "HEAD")
    status = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return commit, None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_field(name: str) -> str:
    """A field of the first processor, empty where the system does not say."""
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*:\s*(.+)", path.read_text(), re.MULTILINE) if path.exists() else None
    return found.group(1).strip() if found else ""


def _moves_results(name: str) -> bool:
    return any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in ENVIRONMENT)
